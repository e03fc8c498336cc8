"""The steady steps of a run: what each rank's windows say, apart from warm-up, prepared input and profiling.

Taken from the last attempt that has any. Where no window is long enough to be written (short epochs), or the timeline
is of a version that had none, the phases of whole epochs stand in, without the first.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.diagnosis.reading import shapes
from kfp_gate.diagnosis.reading.runs import Line, Run

Floats = NDArray[np.float64]

DATA, TRANSFER, OPTIMIZER, VALIDATION, CHECKPOINT, OTHER = (
    "data", "transfer", "optimizer", "validation", "checkpoint", "other",
)  # fmt: skip
COMPUTE = ("forward", "loss", "backward")
STEP_ORDER = (DATA, TRANSFER, *COMPUTE, OPTIMIZER, OTHER)
_NOT_IN_STEPS = (VALIDATION, CHECKPOINT)

MOST = 400
"""Stretches beyond which neighbours are put together: the spread of a week is not known better from 100,000."""

ENOUGH = 0.5
"""Windows must cover this share of the steps, else whole epochs are used."""


@dataclass(frozen=True)
class Stretch:
    """Some steps in a row, summed.

    Attributes:
        steps: how many.
        seconds: host clock by phase; their sum is the time of the steps.
        device: the device's clock by phase, or None.
        each: (k, 2) seconds of waiting for data and of the whole, of some of the steps.
        batches: batches that `parts` stands for.
        parts: loader part to (wall seconds, CPU seconds or NaN) of the processes that made the batches; None: unknown.
        images: images of these steps, or None.
    """

    steps: int
    seconds: Mapping[str, float]
    device: Mapping[str, float] | None = None
    each: Floats = field(default_factory=lambda: np.empty((0, 2)))
    batches: int = 0
    parts: Mapping[str, tuple[float, float]] | None = None
    images: int | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class RankSteps:
    """One rank's steady steps and what they ran under; None is unknown.

    `cores` is what the rank's container may use, `main_cores` what the training process itself used, `pressure` the
    share of the time in which some task waited for a core.
    """

    rank: int
    node: str
    cuda: bool
    workers: int | None
    prefetch: int | None
    cores: float | None
    main_cores: float | None
    pressure: float | None
    stretches: tuple[Stretch, ...]

    @property
    def steps(self) -> int:
        return sum(s.steps for s in self.stretches)

    def names(self) -> list[str]:
        """Phases that occur, in the order of a step."""
        found = {n for s in self.stretches for n, v in s.seconds.items() if v > 0}
        return [*(n for n in STEP_ORDER if n in found), *sorted(found - set(STEP_ORDER))]


@dataclass(frozen=True)
class Epochs:
    """Whole epochs of rank 0, one entry each. Seconds.

    `between` is what is neither in steps nor in validation or checkpoints, nor taken by a profile window's start and
    stop; `waited` is the part of the checkpoint that waited for an earlier upload, empty if unknown.
    """

    steps: int | None
    validation: Floats
    checkpoint: Floats
    between: Floats
    waited: Floats


def number(value: Any) -> float | None:
    """A finite number that is not negative, as a float; else None."""
    found = shapes.number(value)
    return None if found is None else float(found)


def seconds_of(value: Any) -> dict[str, float] | None:
    """Phase to seconds; None if any of it is unknown, for then their sum is."""
    if not isinstance(value, Mapping):
        return None
    numbers = {str(k): number(v) for k, v in value.items()}
    return None if any(v is None for v in numbers.values()) else {k: v for k, v in numbers.items() if v is not None}


def attempts(lines: Sequence[Line]) -> list[Sequence[Line]]:
    """The lines cut at each start of the process."""
    starts = [i for i, line in enumerate(lines) if line.get("kind") == "start"] or [0]
    starts[0] = 0
    return [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]


def steady_steps(run: Run, rank: int) -> RankSteps | None:
    """One rank's steady steps; None if there are none. A run of weeks gives `MOST` stretches, each of longer ones."""
    if ("steady", rank) not in run.kept:
        run.kept["steady", rank] = _steady_steps(run, rank)
    found: RankSteps | None = run.kept["steady", rank]
    return found


def _steady_steps(run: Run, rank: int) -> RankSteps | None:
    for lines in reversed(attempts(run.ranks.get(rank, ()))):
        windows = [s for line in lines if line.get("kind") == "window" and (s := _window(line)) is not None]
        epochs = [s for line in lines if line.get("kind") == "phases" and (s := _epoch(line)) is not None]
        later = epochs[1:] or epochs
        # An epoch's sums mix in what a probe did on prepared input and under the profiler: those steps are no gap.
        apart = sum(
            number(w.get("steps")) or 0
            for w in lines
            if w.get("kind") == "window" and (w.get("profiled") or w.get("input", "usual") != "usual")
        )
        if windows and sum(s.steps for s in windows) >= ENOUGH * (sum(s.steps for s in later) - apart):
            return _rank_steps(run, rank, lines, merged(windows))
        if later:
            return _rank_steps(run, rank, lines, merged(later))
    return None


def merged(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """At most `MOST` stretches, of neighbours put together."""
    size = -(-len(stretches) // MOST)
    if size <= 1:
        return tuple(stretches)
    return tuple(_together(stretches[i : i + size]) for i in range(0, len(stretches), size))


def _together(group: Sequence[Stretch]) -> Stretch:
    made = [s for s in group if s.parts is not None]
    parts: dict[str, tuple[float, float]] = {}
    for name in {n for s in made for n in s.parts or ()}:
        pairs = [(s.parts or {}).get(name, (0.0, 0.0)) for s in made]
        parts[name] = (sum(p[0] for p in pairs), sum(p[1] for p in pairs))
    images = [s.images for s in group if s.images is not None]
    return Stretch(
        sum(s.steps for s in group), _sums([s.seconds for s in group]),
        _sums([s.device or {} for s in group]) if all(s.device is not None for s in group) else None,
        np.concatenate([s.each for s in group]), sum(s.batches for s in made), parts if made else None,
        sum(images) if len(images) == len(group) else None,
    )  # fmt: skip


def _sums(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row.get(name, 0.0) for row in rows) for name in dict.fromkeys(n for row in rows for n in row)}


def whole_epochs(run: Run) -> Epochs:
    """What the epochs of rank 0 held beside their steps; arrays are empty where nothing is known."""
    found: list[tuple[float, float, float]] = []
    steps, waited = None, []
    for lines in reversed(attempts(run.ranks.get(0, ()))):
        per_step = 0.0
        steady = [s for line in lines if line.get("kind") == "window" and (s := _window(line)) is not None]
        if steady:
            per_step = sum(s.seconds.get(OTHER, 0.0) for s in steady) / sum(s.steps for s in steady)
        instruments = 0.0
        for line in lines:
            seconds, count = seconds_of(line.get("seconds")), number(line.get("steps"))
            if line.get("kind") == "profile":
                instruments += number(line.get("apart_s")) or 0.0
            if line.get("kind") == "phases" and seconds is not None and count:
                steps = int(count)
                between = max(0.0, seconds.get(OTHER, 0.0) - per_step * count - instruments)
                instruments = 0.0
                found.append((seconds.get(VALIDATION, 0.0), seconds.get(CHECKPOINT, 0.0), between))
            elif line.get("kind") == "checkpoint" and (wait := number(line.get("waited_s"))) is not None:
                waited.append(wait)
        if found:
            break
    table = np.array(found, dtype=float).reshape(-1, 3)
    said = number(run.conditions.get("steps_per_epoch"))
    return Epochs(
        int(said) if said else steps, table[:, 0], table[:, 1], table[:, 2], np.array(waited, dtype=float)
    )  # fmt: skip


def is_steady(window: Line) -> bool:
    """Whether a window is neither warm-up nor prepared input nor profiled."""
    return not (window.get("warmup") or window.get("profiled")) and window.get("input", "usual") == "usual"


def _window(line: Line) -> Stretch | None:
    if not is_steady(line):
        return None
    seconds, steps, batches = seconds_of(line.get("seconds")), number(line.get("steps")), line.get("batches")
    if steps is None and isinstance(batches, Sequence) and len(batches) == 2 and None not in map(number, batches):
        steps = float(batches[1] - batches[0] + 1)
    if seconds is None or not steps or steps < 1:
        return None
    loader, device = line.get("loader"), seconds_of(line.get("device"))
    made, parts = _parts(loader) if isinstance(loader, Mapping) else (0, None)
    images = number(line.get("images"))
    return Stretch(
        int(steps), {k: v for k, v in seconds.items() if k not in _NOT_IN_STEPS},
        {k: v for k, v in device.items() if k not in _NOT_IN_STEPS} if device else None,
        _each(line.get("each")), made, parts, int(images) if images is not None else None,
    )  # fmt: skip


def _epoch(line: Line) -> Stretch | None:
    seconds, steps = seconds_of(line.get("seconds")), number(line.get("steps"))
    if seconds is None or not steps:
        return None
    # Here `other` is the time between the steps and around them: see `Epochs.between`.
    outside = (*_NOT_IN_STEPS, OTHER)
    device = seconds_of(line.get("device"))
    return Stretch(
        int(steps), {k: v for k, v in seconds.items() if k not in outside},
        {k: v for k, v in device.items() if k not in outside} if device else None,
    )  # fmt: skip


def _each(value: Any) -> Floats:
    pairs = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    good = [
        (float(p[0]), float(p[1]))
        for p in pairs
        if isinstance(p, Sequence) and len(p) == 2 and None not in (number(p[0]), number(p[1])) and p[1] >= p[0]
    ]
    return np.array(good, dtype=float).reshape(-1, 2)


def _parts(loader: Mapping[str, Any]) -> tuple[int, dict[str, tuple[float, float]] | None]:
    made, parts = number(loader.get("batches")), loader.get("parts")
    if not made or not isinstance(parts, Mapping) or not parts:
        return 0, None
    found = {}
    for name, values in parts.items():
        wall = number(values[0]) if isinstance(values, Sequence) and values else None
        if wall is None:
            return 0, None
        cpu = number(values[1]) if len(values) > 1 else None
        found[str(name)] = (wall, math.nan if cpu is None else cpu)
    return int(made), found


def _rank_steps(run: Run, rank: int, lines: Sequence[Line], stretches: tuple[Stretch, ...]) -> RankSteps:
    own = next((line for line in reversed(lines) if line.get("kind") == "conditions"), None)
    if own is None:
        own = next(iter(reversed(list(run.lines("conditions", rank)))), {})
    samples = [line for line in lines if line.get("kind") == "sample" and line.get("phase") == "train"]
    used = [v for s in samples if (v := number(s.get("cpu"))) is not None]
    pressed = [v for s in samples if (v := number(s.get("pressure_cpu"))) is not None]
    limits = [v for k in ("cpus", "cpu_quota") if (v := number(own.get(k)))]
    device = str(own.get("device") or run.record.get("device") or "")
    workers, prefetch = number(own.get("workers")), number(own.get("prefetch"))
    if workers is None and not own:
        counts = [v for s in samples if isinstance(s.get("loaders"), Mapping)
                  and (v := number(s["loaders"].get("count"))) is not None]  # fmt: skip
        workers = median(counts) if counts else 0.0 if device.startswith("cpu") else None
    return RankSteps(
        rank, str(next((line["node"] for line in lines if line.get("node")), "")),
        device.startswith("cuda") or any(s.device for s in stretches),
        int(workers) if workers is not None else None, int(prefetch) if prefetch else None,
        min(limits) if number(own.get("cpus")) else None, fmean(used) if used else None,
        fmean(pressed) if pressed else None, stretches,
    )  # fmt: skip
