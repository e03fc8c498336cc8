"""Before and after: what a change did to the time, the memory and the outputs of a training."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.comparing.changes import NO_DIFFERENCE, Change, changes
from kfp_gate.diagnosis.comparing.comparable import Difference, check_comparable, shared_conditions, unknown_of_both
from kfp_gate.diagnosis.comparing.outputs import DIFFER, EQUAL, UNKNOWN, WITHIN_NOISE, Outputs, compare_outputs
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.errors import InvalidInput

SCHEMA_VERSION = 1

SAID_OF_OUTPUTS = {
    EQUAL: "outputs are equal", WITHIN_NOISE: "outputs are equal within noise", DIFFER: "outputs differ",
    UNKNOWN: "whether outputs are equal cannot be told",
}  # fmt: skip


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
    found = tuple(changes(before, after))
    outputs = compare_outputs(before, after, [d.name for d in differences])
    answer = _answer(found, outputs)
    return Comparison(
        before.where, after.where, answer, differences, found, outputs, tuple(_notes(before, after, differences)),
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


def _answer(changes: Sequence[Change], outputs: Outputs) -> str:
    step = next((c for c in changes if c.what == "step"), None)
    if step is None or step.ratio is None:
        return f"Whether a step became faster cannot be told; {SAID_OF_OUTPUTS[outputs.state]}."
    times = f"{amounts.duration(step.before)} -> {amounts.duration(step.after)}"
    sure = f"90%: x {step.low:.3g} to x {step.high:.3g}" if step.low is not None else "of a single stretch of steps"
    if step.state == NO_DIFFERENCE:
        said = f"A step takes as long as before, as far as the noise lets one see: {times} ({sure})"
    elif step.ratio < 2:
        way = "less" if step.ratio < 1 else "more"
        said = f"A step takes {abs(1 - step.ratio):.0%} {way} than before: {times} ({sure})"
    else:
        said = f"A step takes {step.ratio:.3g} times as long as before: {times} ({sure})"
    return f"{said}; {SAID_OF_OUTPUTS[outputs.state]}."


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
