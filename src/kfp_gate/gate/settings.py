"""What a user says to the gate, as one value.

The names are those of the flat pipeline parameters, so that an error names what the user typed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import Any, Literal

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.gate.criteria import Criteria, parse_criteria
from kfp_gate.gate.separation import NEAR
from kfp_gate.gate.waivers import Waiver, parse_waivers

_CHOICES = {
    "decide": ("point", "confident"),
    "on_insufficient": ("block", "allow"),
    "correction": ("none", "bonferroni"),
}


@dataclass(frozen=True)
class GateSettings:
    """Everything that a verdict depends on besides model and data.

    Attributes:
        bounds: flat bounds, `min_<metric>` and `max_<metric>`.
        class_thresholds: see `criteria`.
        min_instances: evidence that a criterion needs unless it says otherwise.
        decide, on_insufficient: see `deciding`.
        correction: whether the intervals of a confident gate hold together for all criteria (`bonferroni`) or each
            for itself.
        level: of the intervals, two-sided.
        resamples, seed: of the bootstrap.
        confidence: score from which a detection counts in precision, recall and the rates.
        waivers: see `waivers`.
        champion: URI of the model to compare with; "" for none.
        allow_unproven_separation: whether a model without fingerprints is judged.
        near_duplicate_distance: bits of 64 in which perceptual hashes may differ to count as one look.
    """

    bounds: Mapping[str, Any] = field(default_factory=lambda: {"min_map50": 0.5})
    class_thresholds: Mapping[str, Any] = field(default_factory=dict)
    min_instances: int = 0
    decide: Literal["point", "confident"] = "point"
    on_insufficient: Literal["block", "allow"] = "block"
    correction: Literal["none", "bonferroni"] = "none"
    level: float = 0.95
    resamples: int = 1000
    seed: int = 0
    confidence: float = 0.25
    waivers: Sequence[Any] = ()
    champion: str = ""
    allow_unproven_separation: bool = False
    near_duplicate_distance: int = NEAR

    def check(
        self, classes: Sequence[str], slices: Mapping[str, Sequence[str]] | None = None
    ) -> tuple[Criteria, tuple[Waiver, ...]]:
        """Criteria and waivers, read and checked against the classes of the test set.

        Raises:
            InvalidInput: the first kind of problem found, with all problems of that kind.
        """
        problems = [
            Problem(name, f"{getattr(self, name)!r} is not one of {', '.join(allowed)}")
            for name, allowed in _CHOICES.items()
            if getattr(self, name) not in allowed
        ]
        for name, low, high in (
            ("level", 0.5, 0.9999),
            ("confidence", 0.0, 1.0),
            ("resamples", 0, 100_000),
            ("near_duplicate_distance", 0, 16),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
                problems.append(Problem(name, f"{value!r} is not a number from {low} to {high}"))
        if not problems and self.decide == "confident" and self.resamples < 100:
            problems.append(Problem("resamples", f"{self.resamples}: a confident gate needs at least 100"))
        if problems:
            raise InvalidInput(
                f"{len(problems)} problem{'s' * (len(problems) > 1)} in the gate's settings",
                expected="the values named", where="gate settings", next_step="correct the values listed",
                problems=problems,
            )  # fmt: skip
        criteria = parse_criteria(
            self.bounds, self.class_thresholds, classes, min_instances=self.min_instances, slices=slices
        )
        return criteria, parse_waivers(self.waivers, [c.id for c in criteria.entries])

    def to_json(self) -> dict[str, Any]:
        """Plain values for the verdict."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def gate_settings(**parameters: Any) -> GateSettings:
    """Settings from flat parameters, as the components pass them on.

    Args:
        parameters: fields of `GateSettings`, and any `min_<metric>` or `max_<metric>`.

    Raises:
        InvalidInput: a parameter of another name.
    """
    own = {f.name for f in fields(GateSettings)} - {"bounds"}
    bounds = {k: v for k, v in parameters.items() if k not in own and k.startswith(("min_", "max_"))}
    rest = {k: v for k, v in parameters.items() if k not in bounds}
    if unknown := [k for k in rest if k not in own]:
        raise InvalidInput(
            f"unknown gate parameters: {', '.join(map(repr, unknown))}",
            expected=f"{', '.join(sorted(own))}, or a bound",
            where="gate settings", next_step="remove or correct them",
        )  # fmt: skip
    return GateSettings(bounds=bounds, **rest)


def _plain(value: Any) -> Any:
    """The same value in JSON's own types: numpy's numbers are numbers to a criterion, and none to JSON."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, Real) and not isinstance(value, bool | int | float):
        return float(value)
    return value
