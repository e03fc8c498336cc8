"""What a change did to time and memory: each quantity before and after, with the spread of the ratio.

Ratios are after / before. Their 90% intervals come from drawing each run's stretches of steps, or its epochs, again
with replacement. They hold the spread within the two runs: on a machine that others use too, two runs of the same
thing differ by more, and only a repeated run shows by how much.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.measured.spread import Draws, drawn_medians, interval
from kfp_gate.diagnosis.measured.steady import Floats, number, seconds_of, whole_epochs
from kfp_gate.diagnosis.reading.runs import Run

SAME = 0.01
"""Ratios this close to 1 are no difference, however sure: two runs of one thing differ by as much."""

LESS, MORE, NO_DIFFERENCE, ONE_VALUE = "less", "more", "no difference beyond the noise", "spread unknown"

SMALL, SMALL_PART = 0.005, 0.02
"""Phases and parts that take less of the step than this in both runs are left out; so are parts of validation."""

_MEMORY = {
    "rss": "memory of the process", "children": "memory of the loader processes", "cgroup": "memory of the container",
    "anon": "memory of the container without files", "shmem": "shared memory", "cuda_reserved": "GPU memory reserved",
    "cuda_peak": "GPU memory peak",
}  # fmt: skip


@dataclass(frozen=True)
class Change:
    """One quantity before and after.

    Attributes:
        what: for people and programs alike, such as "step", "phase data", "part decode", "images a second".
        unit: "s", "images/s" or "bytes".
        ratio: after / before; None if before is 0.
        low, high: 90% interval of the ratio; None: a single value on a side, or no ratio.
        state: `LESS`, `MORE`, `NO_DIFFERENCE` or `ONE_VALUE`.
    """

    what: str
    unit: str
    before: float
    after: float
    ratio: float | None
    low: float | None
    high: float | None
    state: str

    @property
    def same(self) -> bool:
        """Whether nothing tells the two sides apart: within the noise, or single values that are as good as equal."""
        alone = self.state == ONE_VALUE and self.ratio is not None and abs(self.ratio - 1) < SAME
        return self.state == NO_DIFFERENCE or alone


def shown(value: float, unit: str) -> str:
    """A value of a change for people."""
    return amounts.duration(value) if unit == "s" else amounts.size(value) if unit == "bytes" else f"{value:.4g}"


def changes(before: Run, after: Run) -> Iterator[Change]:
    """What both runs tell, in the order in which one reads it: the step, its phases and parts, epochs, memory."""
    sides = Draws.of(before, 0), Draws.of(after, 0, seed=1)
    if sides[0] is not None and sides[1] is not None:
        yield from _step_changes(sides[0], sides[1])
        yield from _speed(before, after)
    yield from _epoch_changes(before, after)
    for name, title in _MEMORY.items():
        peaks = [_peak(run, name) for run in (before, after)]
        if peaks[0] is not None and peaks[1] is not None and max(peaks[0], peaks[1]) > 0:
            yield _change(f"peak {title}", "bytes", np.array([peaks[0]]), np.array([peaks[1]]), 1)


def _step_changes(first: Draws, second: Draws) -> Iterator[Change]:
    blocks = min(first.blocks, second.blocks)
    yield _change("step", "s", first.step, second.step, blocks)
    names = [*first.names(), *(n for n in second.names() if n not in first.names())]
    for name in names:
        if first.has_device == second.has_device:
            pair = first.phase(name), second.phase(name)
            if _matters(pair[0], first.step) or _matters(pair[1], second.step):
                yield _change(f"phase {name}", "s", *pair, blocks)
    parts = first.parts(), second.parts()
    if parts[0] and parts[1]:
        gone = [np.zeros_like(d.step) for d in (first, second)]
        for name in [*parts[0], *(n for n in parts[1] if n not in parts[0])]:
            pair = parts[0].get(name, gone[0]), parts[1].get(name, gone[1])
            if _matters(pair[0], first.step) or _matters(pair[1], second.step):
                yield _change(f"part {name}", "s", *pair, blocks)


def _speed(before: Run, after: Run) -> Iterator[Change]:
    found = [_images_a_second(run, seed) for seed, run in enumerate((before, after))]
    if found[0] is not None and found[1] is not None:
        yield _change("images a second", "images/s", found[0][0], found[1][0], min(found[0][1], found[1][1]))


def _images_a_second(run: Run, seed: int) -> tuple[Floats, int] | None:
    """(B,) over all ranks, and the stretches behind it; None: unknown."""
    total: Floats | None = None
    blocks = []
    for rank in sorted(run.ranks):
        draws = Draws.of(run, rank, seed=seed)
        images = draws.images() if draws is not None else None
        if draws is None or images is None:
            return None
        total = images / draws.step if total is None else total + images / draws.step
        blocks.append(draws.blocks)
    return None if total is None else (total, min(blocks))


def _epoch_changes(before: Run, after: Run) -> Iterator[Change]:
    epochs = whole_epochs(before), whole_epochs(after)
    parts = _validation_parts(before), _validation_parts(after)
    yield from _once_an_epoch("validation, an epoch", epochs[0].validation, epochs[1].validation)
    for name in sorted(parts[0].keys() & parts[1].keys()):
        yield from _once_an_epoch(f"validation {name}", parts[0][name], parts[1][name])
    yield from _once_an_epoch("checkpoint, an epoch", epochs[0].checkpoint, epochs[1].checkpoint)
    yield from _once_an_epoch("waiting for uploads, an epoch", epochs[0].waited, epochs[1].waited)


def _once_an_epoch(what: str, before: Floats, after: Floats) -> Iterator[Change]:
    if not len(before) or not len(after) or max(before.max(), after.max()) <= 0:
        return
    # The medians' spread is already that of few epochs.
    blocks = 10**6 if min(len(before), len(after)) > 1 else 1
    yield _change(what, "s", drawn_medians(before, seed=100), drawn_medians(after, seed=101), blocks)


def _validation_parts(run: Run) -> dict[str, Floats]:
    """Part of rank 0's validation to its seconds, one an epoch that knows it; without parts that take no time."""
    found: dict[str, list[float]] = {}
    for line in run.lines("validation"):
        for name, seconds in (seconds_of(line.get("parts")) or {}).items():
            found.setdefault(name, []).append(seconds)
    whole = sum(sum(v) for v in found.values())
    return {k: np.array(v) for k, v in found.items() if sum(v) >= SMALL_PART * whole}


def _peak(run: Run, name: str) -> float | None:
    """The largest reading over all ranks."""
    found = [
        value
        for rank in run.ranks
        for kind in ("memory", "sample")
        for line in run.lines(kind, rank)
        if (value := number(line.get(name))) is not None
    ]
    return max(found, default=None)


def _matters(seconds: Floats, step: Floats) -> bool:
    return bool(seconds[0] >= SMALL * step[0])


def _change(what: str, unit: str, before: Floats, after: Floats, blocks: int) -> Change:
    points = float(before[0]), float(after[0])
    if points[0] <= 0:
        return Change(what, unit, *points, None, None, None, MORE if points[1] > 0 else NO_DIFFERENCE)
    ratio = points[1] / points[0]
    if blocks < 2 or len(before) < 2:
        return Change(what, unit, *points, ratio, None, None, ONE_VALUE)
    ratios = np.divide(after, before, out=np.full(len(before), ratio), where=before > 1e-12)
    low, high = interval(ratios, blocks)
    low = max(0.0, low)
    same = low <= 1 <= high or abs(ratio - 1) < SAME
    return Change(what, unit, *points, ratio, low, high, NO_DIFFERENCE if same else LESS if ratio < 1 else MORE)
