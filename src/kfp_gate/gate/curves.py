"""The numbers behind the report's curves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.diagnostics import ERROR_KINDS, confusion_matrix, error_parts
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.metrics import CALIBRATION_BINS, RECALL_POINTS, interpolated, precision_envelope, rows_by_class
from kfp_gate.evaluation.metrics import scoped as ranked_of
from kfp_gate.gate.verdict import Verdict
from kfp_gate.metric_names import parse

MOST_CLASSES = 5
"""Beside the mean: more lines cannot be told apart."""

MOST_CONFUSED = 12
"""Rows of the matrix in the report."""


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
    """What each kind of error costs, and which class is taken for which; None for records without detail."""
    records, classes = evaluation.records, evaluation.classes
    if records.boxes is None:
        return None
    parts = error_parts(records, classes)
    errors = [
        {"label": f"{kind}: {ERROR_KINDS[kind]}", "value": max(cost, 0.0), "text": f"{max(cost, 0.0):.3f}",
         "state": "bad" if cost >= 0.0005 else "soft", "interval": None, "bound": None}
        for kind, cost in parts.items()
    ]  # fmt: skip
    top = max([0.05, *(1.1 * cost for cost in parts.values())])
    return {"errors": errors, "errors_top": top, "confusion": _confusion(evaluation, confidence)}


def most_confused(table: NDArray[np.int64], most: int) -> list[int]:
    """The classes with the most objects or detections under another class's name, in index order.

    Args:
        table: (K + 1, K + 1), as `confusion_matrix` gives it.
    """
    inner = table[:-1, :-1]
    between = inner.sum(0) + inner.sum(1) - 2 * inner.diagonal()
    order = np.lexsort((np.arange(len(between)), -table[:-1].sum(1), -between))
    return sorted(int(i) for i in order[:most])


def _confusion(evaluation: Evaluation, confidence: float) -> dict[str, Any]:
    table = confusion_matrix(evaluation.records, evaluation.classes, confidence=confidence)
    count = len(evaluation.classes)
    shown = most_confused(table, MOST_CONFUSED)
    names = [evaluation.classes[i] for i in shown]
    note = f"Objects and detections at confidence {confidence:g} and IoU 0.50."
    if count > MOST_CONFUSED:
        note += f" The {MOST_CONFUSED} of {count} classes that are taken for others most."
    return {
        "cells": table[np.ix_([*shown, count], [*shown, count])].tolist(),
        "rows": [*names, "no object"], "columns": [*names, "not found"], "note": note,
    }  # fmt: skip


def _series(label: str, precision: Sequence[float] | Any) -> dict[str, Any]:
    return {"label": label, "points": list(zip(RECALL_POINTS.tolist(), np.asarray(precision).tolist(), strict=True))}
