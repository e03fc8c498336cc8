"""One criterion and its evidence in, one judged entry out.

`decide="point"` compares the value itself. `decide="confident"` asks that the whole confidence interval lies on the
right side of the bound: between the two sides there is not enough evidence, and the entry says how much is missing.
Either way, fewer than `min_instances` decide nothing.

The intervals are those of `kfp_gate.evaluation.intervals`, which hold on few objects too: two objects, both found, do
not give [1, 1].
"""

from dataclasses import dataclass, replace
from math import ceil, isfinite
from typing import Any, Literal

from kfp_gate.gate.criteria import Criterion
from kfp_gate.gate.verdict import Entry, State

SLACK = 1e-9
"""What floating point may add: 0.52 - 0.50 is not above 0.02. The evaluator is exact to as much."""

MOST_NEEDED = 1_000_000
"""Beyond this the honest answer is that the value lies at the bound."""


@dataclass(frozen=True)
class Rule:
    """How criteria are decided.

    Attributes:
        decide: `point` or `confident`.
        level: of each two-sided interval, after any correction for many criteria.
    """

    decide: Literal["point", "confident"] = "point"
    level: float = 0.95


@dataclass(frozen=True)
class Evidence:
    """What an evaluation says about one metric.

    Attributes:
        value: None if not computed; then `reason` says why.
        instances: labelled objects behind it (images for a rate of images); None if it cannot be told.
        silent: there were objects to report and the model reported nothing. For a lower bound that is a miss, not a
            lack of evidence; nor is it one for a drop from what the champion reported.
        interval: bootstrap interval of the value; None without resampling.
        champion: the champion's value on the same images; None without a comparison.
        drop_interval: paired bootstrap interval of how much worse the candidate is.
        lower_is_better: the direction of the metric.
        no_champion: why there is no champion value; "" if there is one.
        first: there is no champion because none exists yet.
    """

    value: float | None
    reason: str = ""
    instances: int | None = None
    silent: bool = False
    interval: tuple[float, float] | None = None
    champion: float | None = None
    drop_interval: tuple[float, float] | None = None
    lower_is_better: bool = False
    no_champion: str = ""
    first: bool = False

    @property
    def drop(self) -> float | None:
        """How much worse than the champion; negative: better."""
        if self.value is None or self.champion is None:
            return None
        worse = self.champion - self.value
        return -worse if self.lower_is_better else worse


def corrected_level(level: float, criteria: int, correction: Literal["none", "bonferroni"]) -> float:
    """The level of each interval such that all of them hold together at `level` (Bonferroni), or `level` itself."""
    return 1 - (1 - level) / max(criteria, 1) if correction == "bonferroni" else level


def decide(criterion: Criterion, evidence: Evidence, rule: Rule) -> Entry:
    """Judge one criterion."""
    evidence = _finite(evidence)
    drops = criterion.kind == "max_drop"
    compared = evidence.drop if drops else evidence.value
    interval = evidence.drop_interval if drops else evidence.interval
    state, reason, needed = _state(criterion, evidence, compared, interval, rule)
    return Entry(
        criterion=criterion.id, metric=criterion.metric, kind=criterion.kind, bound=criterion.bound, state=state,
        value=evidence.value, reason=reason, instances=evidence.instances, min_instances=criterion.min_instances,
        interval=interval, champion=evidence.champion if drops else None, drop=evidence.drop if drops else None,
        needed=needed, source=criterion.source,
    )  # fmt: skip


def _state(
    criterion: Criterion, evidence: Evidence, compared: float | None, interval: tuple[float, float] | None, rule: Rule
) -> tuple[State, str, int | None]:
    if evidence.value is None:
        fell = criterion.kind == "max_drop" and evidence.champion is not None and not evidence.lower_is_better
        if evidence.silent and (criterion.kind == "min" or fell):
            return "missed", evidence.reason or "nothing was detected", None
        return "insufficient", evidence.reason or "not computed", _missing(criterion, evidence)
    if criterion.kind == "max_drop" and compared is None:
        # The first model ever has nothing to drop from; a champion that cannot be used is another matter.
        return ("met" if evidence.first else "insufficient"), evidence.no_champion or "no champion value", None
    if evidence.instances is not None and evidence.instances < criterion.min_instances:
        return (
            "insufficient",
            f"{evidence.instances} of {criterion.min_instances} instances",
            _missing(criterion, evidence),
        )
    assert compared is not None
    higher = criterion.kind == "min"
    # Written so that NaN is never met.
    point_met = compared >= criterion.bound - SLACK if higher else compared <= criterion.bound + SLACK
    if rule.decide == "point":
        return ("met" if point_met else "missed"), "", None
    if interval is None:
        return "insufficient", "no interval could be computed", None
    low, high = interval
    if low >= criterion.bound - SLACK if higher else high <= criterion.bound + SLACK:
        return "met", "", None
    if high < criterion.bound - SLACK if higher else low > criterion.bound + SLACK:
        return "missed", "", None
    needed = _more(abs(compared - criterion.bound), (compared - low) if point_met == higher else (high - compared),
                   evidence.instances)  # fmt: skip
    return "insufficient", "the interval includes the bound", needed


def _finite(evidence: Evidence) -> Evidence:
    """NaN and infinity are no values: they would pass a careless comparison, and they are no JSON."""
    changes: dict[str, Any] = {}
    if evidence.value is not None and not isfinite(evidence.value):
        changes |= {"value": None, "reason": "the value is not a finite number"}
    if evidence.champion is not None and not isfinite(evidence.champion):
        changes |= {"champion": None, "no_champion": "the champion's value is not a finite number"}
    for name in ("interval", "drop_interval"):
        interval = getattr(evidence, name)
        if interval is not None and not all(map(isfinite, interval)):
            changes[name] = None
    return replace(evidence, **changes)


def _missing(criterion: Criterion, evidence: Evidence) -> int | None:
    return max(criterion.min_instances - (evidence.instances or 0), 0) or None


def _more(distance: float, reach: float, instances: int | None) -> int | None:
    """Instances to add until the interval, which shrinks with the root of their number, just clears the bound."""
    if not instances or distance <= reach / 1000:  # beyond MOST_NEEDED for any number of instances worth asking
        return None
    more = ceil(instances * ((reach / distance) ** 2 - 1))
    return more if 0 < more <= MOST_NEEDED else None
