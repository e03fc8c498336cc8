"""Before and after: what a change did to the time, the memory and the outputs of a training.

Ratios are after / before. Their 90% intervals come from drawing each run's stretches of steps, or its epochs, again
with replacement. They hold the spread within the two runs: on a machine that others use too, two runs of the same
thing differ by more, and only a repeated run shows by how much.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.comparable import Difference, check_comparable, shared_conditions, show, unknown_of_both
from kfp_gate.diagnosis.outputs import DIFFER, EQUAL, UNKNOWN, WITHIN_NOISE, Outputs, compare_outputs
from kfp_gate.diagnosis.runs import Run
from kfp_gate.diagnosis.spread import Draws, drawn_medians, interval
from kfp_gate.diagnosis.steady import Floats, number, whole_epochs
from kfp_gate.errors import InvalidInput

SCHEMA_VERSION = 1

SAME = 0.01
"""Ratios this close to 1 are no difference, however sure: two runs of one thing differ by as much."""

LESS, MORE, NO_DIFFERENCE, ONE_VALUE = "less", "more", "no difference beyond the noise", "spread unknown"

SMALL = 0.005
"""Phases and parts that take less of the step than this in both runs are left out."""

_MEMORY = {
    "rss": "memory of the process", "children": "memory of the loader processes", "cgroup": "memory of the container",
    "anon": "memory of the container without files", "shmem": "shared memory", "cuda_reserved": "GPU memory reserved",
    "cuda_peak": "GPU memory peak",
}  # fmt: skip

_OUTPUTS = {
    EQUAL: "outputs are equal", WITHIN_NOISE: "outputs are equal within noise", DIFFER: "outputs differ",
    UNKNOWN: "whether outputs are equal cannot be told",
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

    def line(self) -> str:
        """The change in one line."""
        text = f"{self.what}: {shown(self.before, self.unit)} -> {shown(self.after, self.unit)}"
        if self.ratio is None:
            return text
        spread = f" (90%: {self.low:.3g} to {self.high:.3g})" if self.low is not None and self.high is not None else ""
        verdict = f", {self.state}" if self.state in (NO_DIFFERENCE, ONE_VALUE) else ""
        return f"{text}, x {self.ratio:.3g}{spread}{verdict}"


@dataclass(frozen=True)
class Comparison:
    """Two runs, compared. `differences` were all acknowledged, `conditions` are those of both."""

    before: str
    after: str
    answer: str
    differences: tuple[Difference, ...]
    changes: tuple[Change, ...]
    outputs: Outputs
    notes: tuple[str, ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The comparison as JSON; null is unknown."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1, default=str)


def compare(before: Run, after: Run, acknowledged: Sequence[str] = ()) -> Comparison:
    """Compare two runs.

    Args:
        before, after: the runs.
        acknowledged: names of conditions that are meant to differ.

    Raises:
        InvalidInput: conditions differ that nobody acknowledged; all are listed with both values.
    """
    differences = check_comparable(before, after, acknowledged)
    changes = tuple(_changes(before, after))
    outputs = compare_outputs(before, after, [d.name for d in differences])
    answer = _answer(changes, outputs)
    return Comparison(
        before.where, after.where, answer, differences, changes, outputs, tuple(_notes(before, after, differences)),
        shared_conditions(before, after),
    )  # fmt: skip


def compare_each(runs: Sequence[Run], acknowledged: Sequence[str] = ()) -> tuple[Comparison, ...]:
    """The first run with each of the others.

    Raises:
        InvalidInput: as `compare`, or fewer than two runs.
    """
    if len(runs) < 2:
        raise InvalidInput(
            f"{len(runs)} run{'s' * (len(runs) != 1)}", expected="at least two: the one before, and those after",
            where="comparison", next_step="name the run before the change first, then the runs after it",
        )  # fmt: skip
    return tuple(compare(runs[0], other, acknowledged) for other in runs[1:])


def text(comparison: Comparison) -> str:
    """The comparison for a terminal."""
    lines = [comparison.answer, "", f"before: {comparison.before}", f"after:  {comparison.after}"]
    if comparison.differences:
        lines += ["", "acknowledged differences:"]
        lines += [f"  {d.name}: {show(d.before)} -> {show(d.after)}" for d in comparison.differences]
    if comparison.changes:
        lines += ["", "changes:", *(f"  {c.line()}" for c in comparison.changes)]
    lines += ["", f"{_OUTPUTS[comparison.outputs.state]}: {comparison.outputs.judged}"]
    for one in comparison.outputs.series:
        if one.difference is None:
            lines.append(f"  {one.name}: computed in one run only")
        elif one.state != EQUAL:
            noise = "noise unknown" if one.noise is None else f"noise of an epoch {one.noise:.2g}"
            lines.append(f"  {one.name}: {one.difference:+.3g} ({noise})")
    if comparison.notes:
        lines += ["", *(f"note: {n}" for n in comparison.notes)]
    return "\n".join(_printable(line) for line in lines)


def shown(value: float, unit: str) -> str:
    """A value of a change for people."""
    return amounts.duration(value) if unit == "s" else amounts.size(value) if unit == "bytes" else f"{value:.4g}"


def _printable(line: str) -> str:
    """Names come from outside: what would steer a terminal is shown as a replacement."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line)


def _answer(changes: Sequence[Change], outputs: Outputs) -> str:
    step = next((c for c in changes if c.what == "step"), None)
    if step is None or step.ratio is None:
        return f"Whether a step became faster cannot be told; {_OUTPUTS[outputs.state]}."
    times = f"{amounts.duration(step.before)} -> {amounts.duration(step.after)}"
    sure = f"90%: x {step.low:.3g} to x {step.high:.3g}" if step.low is not None else "of a single stretch of steps"
    if step.state == NO_DIFFERENCE:
        said = f"A step takes as long as before, as far as the noise lets one see: {times} ({sure})"
    elif step.ratio < 2:
        way = "less" if step.ratio < 1 else "more"
        said = f"A step takes {abs(1 - step.ratio):.0%} {way} than before: {times} ({sure})"
    else:
        said = f"A step takes {step.ratio:.3g} times as long as before: {times} ({sure})"
    return f"{said}; {_OUTPUTS[outputs.state]}."


def _changes(before: Run, after: Run) -> Iterator[Change]:
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
    picks: dict[str, Callable[[int], Floats]] = {
        "validation, an epoch": lambda i: epochs[i].validation, "checkpoint, an epoch": lambda i: epochs[i].checkpoint,
        "waiting for uploads, an epoch": lambda i: epochs[i].waited,
    }  # fmt: skip
    for what, of_side in picks.items():
        if len(of_side(0)) and len(of_side(1)) and max(of_side(0).max(), of_side(1).max()) > 0:
            pair = [drawn_medians(of_side(i), seed=100 + i) for i in (0, 1)]
            # The medians' spread is already that of few epochs.
            yield _change(what, "s", pair[0], pair[1], 10**6 if min(len(of_side(0)), len(of_side(1))) > 1 else 1)


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
    ratios = np.divide(after, before, out=np.full(len(before), ratio), where=before > 0)
    low, high = interval(ratios, blocks)
    low = max(0.0, low)
    same = low <= 1 <= high or abs(ratio - 1) < SAME
    return Change(what, unit, *points, ratio, low, high, NO_DIFFERENCE if same else LESS if ratio < 1 else MORE)


def _notes(before: Run, after: Run, differences: Sequence[Difference]) -> Iterator[str]:
    unknown = unknown_of_both(before, after)
    if unknown:
        yield f"not known of either run, and taken as equal: {', '.join(unknown)}"
    names: Mapping[str, Difference] = {d.name: d for d in differences}
    if "batch" in names or "ranks" in names:
        yield "a step holds another number of images in the two runs: images a second is what compares"
    if names:
        yield f"what differs beside the change may be at work too: {', '.join(names)}"
    if set(before.ranks) != set(after.ranks) or len(before.ranks) > 1:
        yield "phases and parts are those of rank 0"
    for word, run in (("before", before), ("after", after)):
        if run.running:
            yield f"the run {word} has not ended"
        starts = sum(1 for _ in run.lines("start"))
        if starts > 1:
            yield f"the run {word} was started {starts} times: times are of the last attempt that has steady steps"
    yield "intervals hold the spread within the two runs; on a shared machine repeat a run to see what else varies"
