"""Which values are watched, when each was best, and when to stop.

A monitor has improved in weights when its value is strictly better than ever before; ties keep the earlier
epoch, except at a value of zero, where the later epoch is the better-trained one. For patience a gain must
exceed `min_delta`: many tiny gains do not keep a training alive for ever.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfp_gate import metric_names
from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.training.spec import STOP_OFF, STOP_ON_ALL, TrainingSpec

FLAT_WINDOW = 3
"""Epochs without a gain after which a monitor counts as flat in the record."""


@dataclass
class Watched:
    """The state of one monitor. `value`s are as measured; comparisons turn lower-is-better ones round."""

    name: str
    best: float | None = None
    best_epoch: int = 0
    reference: float | None = None
    gained_epoch: int = 0
    missing: int = 0
    classes_then: dict[str, float] = field(default_factory=dict)

    @property
    def sign(self) -> float:
        return -1.0 if metric_names.parse(self.name).metric in metric_names.LOWER_IS_BETTER else 1.0


@dataclass(frozen=True)
class Observation:
    """What one epoch's values mean: the fitness for upstream, the monitors that improved, whether to stop."""

    fitness: float
    improved: tuple[str, ...]
    stop: bool
    reason: str = ""


class Monitors:
    """All monitors of a training. Epochs count from 1."""

    def __init__(self, spec: TrainingSpec) -> None:
        self.spec = spec
        self.watched = {name: Watched(name) for name in spec.monitors}
        self.primary = spec.monitors[0]
        self.epoch = 0
        self.last: dict[str, float] = {}

    def observe(self, epoch: int, values: Mapping[str, float | None]) -> Observation:
        """Take one epoch's values.

        Args:
            epoch: from 1.
            values: canonical name to a finite float, or None where it was not computed.

        Raises:
            InvalidInput: a monitored name is not among the values at all.
        """
        self.look_up(values)
        self.epoch = epoch
        improved = tuple(name for name, state in self.watched.items() if self._take(state, epoch, values))
        self.last = {k: v for k, v in values.items() if v is not None}
        primary = values[self.primary]
        # Upstream compares fitness as "higher is better" and never survives a NaN.
        fitness = self.watched[self.primary].sign * primary if primary is not None else self._floor()
        stop, reason = self._stop(epoch)
        return Observation(fitness, improved, stop, reason)

    def look_up(self, values: Mapping[str, float | None]) -> None:
        """Refuse a monitored name that these values do not have.

        Raises:
            InvalidInput: with close matches.
            Broken: a value that is neither finite nor "not computed".
        """
        for name in self.watched:
            if name not in values:
                classes = {c for c in (metric_names.parse(v).class_name for v in values) if c is not None}
                metric_names.parse(name, classes=sorted(classes), where="monitors")
                raise InvalidInput(
                    f"monitor {name!r} is not among the computed values", expected="a metric that validation computes",
                    where="monitors", next_step="choose an overall or per-class metric",
                )  # fmt: skip
            value = values[name]
            if value is not None and not math.isfinite(value):
                raise Broken(
                    f"{name} is {value}", expected="a finite number, or not computed", where="validation",
                    next_step="report this: the evaluator let a non-finite value through",
                )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """Plain values from which `restore` continues."""
        return {"epoch": self.epoch, "watched": {n: dict(vars(w)) for n, w in self.watched.items()}, "last": self.last}

    def restore(self, state: Mapping[str, Any]) -> tuple[str, ...]:
        """Continue from a saved state; returns the monitors that the state did not know and that start afresh."""
        self.epoch, self.last = int(state["epoch"]), dict(state["last"])
        for name in self.watched:
            if name in state["watched"]:
                self.watched[name] = Watched(**state["watched"][name])
        return tuple(name for name in self.watched if name not in state["watched"])

    def flattened(self) -> dict[str, list[str]]:
        """Overall monitors that stopped gaining while a class still gains: monitor to those per-class names."""
        found = {}
        for state in self.watched.values():
            if state.best is None or self.epoch - state.gained_epoch < FLAT_WINDOW:
                continue
            margin = max(self.spec.min_delta, 0.005)
            still = [
                name for name, then in state.classes_then.items()
                if state.sign * (self.last.get(name, then) - then) > margin
            ]  # fmt: skip
            if still:
                found[state.name] = sorted(still)
        return found

    def record(self) -> list[dict[str, Any]]:
        """One row per monitor for the training record."""
        flat = self.flattened()
        return [
            {
                "monitor": w.name, "primary": w.name == self.primary, "best": w.best, "best_epoch": w.best_epoch,
                "last_gain_epoch": w.gained_epoch, "epochs_without_value": w.missing,
                "flat_while_improving": flat.get(w.name, []),
            }
            for w in self.watched.values()
        ]  # fmt: skip

    def _take(self, state: Watched, epoch: int, values: Mapping[str, float | None]) -> bool:
        value = values[state.name]
        if value is None:
            state.missing += 1
            return False
        better = state.best is None or state.sign * (value - state.best) > 0
        if state.reference is None or state.sign * (value - state.reference) > self.spec.min_delta:
            state.reference, state.gained_epoch = value, epoch
            parsed = metric_names.parse(state.name)
            if parsed.class_name is None and parsed.size is None:
                state.classes_then = _per_class(values, parsed.metric)
        if better or (value == state.best == 0.0 and state.sign > 0):
            state.best, state.best_epoch = value, epoch
            return True
        return False

    def _floor(self) -> float:
        # Not computed is worse than anything computed; finite, since upstream stores a NaN for good.
        return -1.0

    def _stop(self, epoch: int) -> tuple[bool, str]:
        spec = self.spec
        if spec.stop_on == STOP_OFF or spec.patience == 0 or epoch < max(spec.min_epochs, 1):
            return False, ""
        names = list(self.watched) if spec.stop_on == STOP_ON_ALL else [spec.stop_on or self.primary]
        # A monitor without any value yet has had no chance to improve: its patience runs from the start.
        if all(epoch - self.watched[n].gained_epoch >= spec.patience for n in names):
            return True, f"{' and '.join(names)} did not improve for {spec.patience} epochs"
        return False, ""


def _per_class(values: Mapping[str, float | None], metric: str) -> dict[str, float]:
    found = {}
    for name, value in values.items():
        if value is None or not name.startswith("class/"):
            continue
        parsed = metric_names.parse(name)
        if parsed.metric == metric and parsed.size is None:
            found[name] = value
    return found
