"""Thresholds from what a model does today: per class, the highest that it would still pass on another such test set.

The test set is resampled by image. One quantile is taken for all classes and metrics, the highest at which the model
passes *all* bounds together in the asked share of resamples: bounds that each hold in 95 of 100 hold together far more
rarely.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.bootstrap import Resamples, resample
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.intervals import FEW, wilson
from kfp_gate.gate.wording import metric_word
from kfp_gate.metric_names import LOWER_IS_BETTER, METRICS, parse, per_class

FEW_IMAGES = 10
"""A class on fewer images gets a bound that says little; it is named."""

_STEPS = 1000


@dataclass(frozen=True)
class Suggestion:
    """Proposed thresholds.

    Attributes:
        class_thresholds: in the form of the gate's parameter.
        share: of the resamples in which the model passes all of them together.
        values: canonical name to today's value, for the names that have a bound.
        notes: classes without a bound and why, and bounds that rest on little.
    """

    class_thresholds: dict[str, dict[str, dict[str, float]]]
    share: float
    values: dict[str, float]
    notes: tuple[str, ...]


def suggest(
    evaluation: Evaluation,
    *,
    metrics: Sequence[str] = ("map50", "recall"),
    share: float = 0.95,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float | None = None,
) -> Suggestion:
    """Propose thresholds for each class.

    Args:
        evaluation: of the model that sets the standard, usually the champion.
        metrics: metric names without scope.
        share: of resamples that the model shall pass, above 0 and below 1.
        confidence: at which precision, recall and the rates are taken; None: the evaluation's.

    Raises:
        InvalidInput: an unknown metric, a share outside 0..1, or no class with enough evidence.
    """
    unknown = [m for m in metrics if m not in METRICS]
    if unknown or not metrics or not 0.0 < share < 1.0:
        raise InvalidInput(
            f"metrics {list(metrics)!r} and share {share!r}", expected=f"some of {', '.join(METRICS)}; 0 < share < 1",
            where="suggest-thresholds", next_step="choose metrics by name, and for instance share=0.95",
        )  # fmt: skip
    names = [per_class(c, m) for c in evaluation.classes for m in metrics]
    drawn = resample(
        evaluation.records, evaluation.classes, names, resamples=resamples, seed=seed,
        confidence=evaluation.confidence if confidence is None else confidence,
        unknown_classes=evaluation.unknown_classes,
    )  # fmt: skip
    notes: list[str] = []
    kept = _with_evidence(names, drawn.point, drawn.samples, 1 - share, notes)
    if not kept:
        raise InvalidInput(
            "no class with enough evidence", expected="a test set in which each class is on several images",
            where="suggest-thresholds", next_step="evaluate on more images",
        )  # fmt: skip
    signs = np.array([-1.0 if parse(names[i]).metric in LOWER_IS_BETTER else 1.0 for i in kept])
    samples, point = drawn.samples[:, kept] * signs, drawn.point[kept]
    bounds, passed = _joint_bounds(samples, _provable(drawn, kept, signs, share), share)
    thresholds: dict[str, dict[str, dict[str, float]]] = {}
    for i, bound, sign in zip(kept, bounds, signs, strict=True):
        name = parse(names[i])
        assert name.class_name is not None
        if sign > 0 and bound <= 0:
            notes.append(f"{name.class_name}: no {metric_word(name.metric)} can be asked for, it is close to 0")
            continue
        spec = {"min": bound} if sign > 0 else {"max": min(abs(bound), 1.0)}
        thresholds.setdefault(name.class_name, {})[name.metric] = spec
    notes += _on_few_images(evaluation)
    values = {names[i]: float(v) for i, v in zip(kept, point, strict=True)}
    return Suggestion(thresholds, passed, values, tuple(notes))


def _with_evidence(
    names: Sequence[str], point: NDArray[np.float64], samples: NDArray[np.float64], allowed: float, notes: list[str]
) -> list[int]:
    """Places of the names that nearly every resample can judge."""
    kept = []
    for i, name in enumerate(names):
        parsed = parse(name)
        what = f"{parsed.class_name}: {metric_word(parsed.metric)}"
        missing = float(np.isnan(samples[:, i]).mean()) if len(samples) else 1.0
        if not np.isfinite(point[i]):
            notes.append(f"{what} was not computed")
        elif missing > allowed / 2:
            notes.append(f"{what} rests on so few images that {missing:.0%} of the resamples cannot judge it")
        else:
            kept.append(i)
    return kept


def _provable(drawn: Resamples, kept: list[int], signs: NDArray[np.float64], share: float) -> NDArray[np.float64]:
    """The highest bound that each value's evidence can carry, in the direction of `signs`.

    Resamples of a set without a single failure know no failure: 45 cones, all found, would be asked for again for ever.
    Where failures (or successes) are that few, no more is asked for than Wilson's limit of the share.
    """
    z = NormalDist().inv_cdf(share)
    most = np.full(len(kept), np.inf)
    for at, (i, sign) in enumerate(zip(kept, signs, strict=True)):
        point, trials = float(drawn.point[i]), int(drawn.trials[i])
        if trials and min(point, 1 - point) * trials < FEW:
            low, high = wilson(point, trials, z)
            most[at] = low if sign > 0 else -high
    return most


def _joint_bounds(samples: NDArray[np.float64], most: NDArray[np.float64], share: float) -> tuple[list[float], float]:
    """The highest common quantile whose bounds, rounded down to cents, hold together in the share of resamples."""
    ordered = np.sort(samples, axis=0)  # NaN last

    def at(step: int) -> tuple[NDArray[np.float64], float]:
        row = ordered[int(step / _STEPS * (len(ordered) - 1))]
        bounds = np.floor(np.minimum(np.where(np.isnan(row), ordered[0], row), most) * 100 + 1e-9) / 100
        return bounds, float((samples >= bounds - 1e-9).all(axis=1).mean())

    low, high = 0, _STEPS
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if at(middle)[1] >= share else (low, middle - 1)
    bounds, passed = at(low)
    return [floor(b * 100 + 1e-6) / 100 for b in bounds], passed


def _on_few_images(evaluation: Evaluation) -> list[str]:
    records: Any = evaluation.records
    notes = []
    for index, name in enumerate(evaluation.classes):
        mine = (records.truth_classes == index) & ~records.crowd
        images = len(np.unique(records.truth_images[mine]))
        if 0 < images < FEW_IMAGES:
            notes.append(f"{name} is on {images} images only: its bounds say little")
    return notes
