"""The numbers behind the report's curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.metrics import CALIBRATION_BINS, RECALL_POINTS, interpolated, precision_envelope, rows_by_class
from kfp_gate.evaluation.metrics import scoped as ranked_of
from kfp_gate.gate.verdict import Verdict
from kfp_gate.metric_names import parse

MOST_CLASSES = 5
"""Beside the mean: more lines cannot be told apart."""


def precision_recall(evaluation: Evaluation, verdict: Verdict) -> list[dict[str, Any]]:
    """Precision over recall at IoU 0.50: the mean over classes, and the classes that need a look.

    Those are the classes with a criterion that is not met, then the ones of lowest average precision.

    Returns:
        Series for the figure `lines`: label and 101 points. Empty if no class has objects.
    """
    records, classes = evaluation.records, evaluation.classes
    found: dict[str, np.ndarray[Any, np.dtype[np.float64]]] = {}
    for index, rows in enumerate(rows_by_class(records, len(classes))):
        ranked = ranked_of(records, index, rows, None)
        if ranked.positives and classes[index] not in evaluation.unknown_classes:
            found[classes[index]] = interpolated(*precision_envelope(ranked, 0))
    if not found:
        return []
    trouble = {parse(e.metric).class_name for e in verdict.entries if e.state != "met"}
    names = sorted(found, key=lambda n: (n not in trouble, found[n].mean()))[:MOST_CLASSES]
    series = [_series(f"{n} (AP50 {found[n].mean():.3f})", found[n]) for n in names]
    if len(found) > 1:
        mean = np.mean(list(found.values()), axis=0)
        series.insert(0, _series(f"mean of {len(found)} classes (mAP50 {mean.mean():.3f})", mean))
    return series


def calibration(records: Records, confidence: float) -> list[dict[str, Any]]:
    """Share of right detections over their score, in ten bins, beside the line of a perfectly calibrated model."""
    sure = (records.scores >= np.float32(confidence)) & ~records.ignored_at(0)
    scores, right = records.scores[sure].astype(np.float64), (records.bits[sure] & 1).astype(np.float64)
    if not len(scores):
        return []
    place = np.minimum((scores * CALIBRATION_BINS).astype(int), CALIBRATION_BINS - 1)
    counts = np.bincount(place, minlength=CALIBRATION_BINS)
    points = [
        (float(scores[place == i].mean()), float(right[place == i].mean()))
        for i in range(CALIBRATION_BINS)
        if counts[i]
    ]
    return [
        {"label": "this model", "points": points},
        {"label": "perfectly calibrated", "points": [(0.0, 0.0), (1.0, 1.0)]},
    ]


def diagnostics(evaluation: Evaluation, confidence: float) -> dict[str, Any] | None:
    """Confusion between classes and the kinds of error; None for records without detail."""
    return None


def _series(label: str, precision: Sequence[float] | Any) -> dict[str, Any]:
    return {"label": label, "points": list(zip(RECALL_POINTS.tolist(), np.asarray(precision).tolist(), strict=True))}
