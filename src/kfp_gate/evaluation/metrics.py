"""Metrics of evaluation records, by canonical name.

Average precision follows COCO (`pycocotools.cocoeval.COCOeval.accumulate`): detections of a class sorted by falling
score over all images, precision made non-increasing, read at 101 recall points. Precision, recall and F1 are taken at
one stated confidence and IoU 0.50. What cannot be computed is a `NotComputed` with its reason, never a number: a class
without objects has no average precision, and gets neither 0 nor the mean of the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.columns import BEYOND_LIMIT, Records, best_first
from kfp_gate.evaluation.rates import (
    CALIBRATION_BINS,
    NotComputed,
    Rows,
    Tally,
    Value,
    at_least,
    ignored_rows,
    pool,
    rates,
    tally,
)  # fmt: skip
from kfp_gate.metric_names import METRICS, SIZE_BANDS, MetricName

RECALL_POINTS = np.linspace(0.0, 1.0, 101)
"""COCO's, in the very floats of pycocotools."""

__all__ = ["CALIBRATION_BINS", "RECALL_POINTS", "Metrics", "NotComputed", "Ranked", "Rows", "Value", "compute"]

_ACCURACY = ("map50", "map75", "map50_95", "precision", "recall", "f1")


@dataclass(frozen=True)
class Metrics(Mapping[str, Value]):
    """Values by canonical name, with the confidence that precision, recall and the rates were taken at.

    `instances` counts the objects behind a name's scope: 'all', `class/<name>`, `size/<band>`, ... without crowds.
    """

    values_by_name: dict[str, Value]
    confidence: float
    instances: dict[str, int]

    def __getitem__(self, name: str) -> Value:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def numbers(self) -> dict[str, float]:
        """Only what was computed: finite floats."""
        return {n: v for n, v in self.values_by_name.items() if not isinstance(v, NotComputed)}

    def not_computed(self) -> dict[str, str]:
        """The reasons of the others."""
        return {n: v.reason for n, v in self.values_by_name.items() if isinstance(v, NotComputed)}


@dataclass(frozen=True)
class Ranked:
    """The detections of one class and scope that take part in average precision, best first."""

    rows: Rows  # of the records
    true: NDArray[np.uint16]  # true-positive bits
    ignored: NDArray[np.uint16] | None  # neither right nor wrong, bits
    positives: int  # objects that count


def compute(
    records: Records,
    classes: Sequence[str],
    *,
    confidence: float = 0.25,
    bands: bool = False,
    unknown_classes: Sequence[str] = (),
) -> Metrics:
    """All metrics, overall and per class, and by size band on demand.

    Overall average precision is the mean over the classes with objects; overall precision, recall and rates pool all
    detections and objects, so that the false positives of a class without objects count.

    Args:
        records: of the images to judge; a slice is `records.select(mask)`.
        classes: class names of the data set, in index order.
        confidence: detections below it count in average precision only.
        bands: also `size/<band>/...` and `class/<name>/size/<band>/...`; needs records with detail.
        unknown_classes: classes that the model cannot report: theirs are not computed, and the overall values leave
            their objects out.

    Raises:
        InvalidInput: the confidence is outside 0..1, or bands are asked of records without them.
    """
    if not 0.0 <= confidence <= 1.0:  # so written that NaN fails
        raise InvalidInput(
            f"confidence {confidence!r}", expected="a number from 0 to 1", where="confidence",
            next_step="choose the confidence at which precision and recall are stated",
        )  # fmt: skip
    if twice := {c for c in classes if list(classes).count(c) > 1}:
        raise InvalidInput(
            f"class names that occur twice: {sorted(twice)[:20]}", expected="one name per class", where="classes",
            next_step="rename them: metrics and thresholds go by name",
        )  # fmt: skip
    if bands and records.band_true is None:
        raise InvalidInput(
            "records without size bands", expected="records of a stored evaluation", where="metrics by size",
            next_step="evaluate with detail=True",
        )  # fmt: skip
    values: dict[str, Value] = {}
    instances: dict[str, int] = {}
    known = [k for k, name in enumerate(classes) if name not in set(unknown_classes)]
    by_class = rows_by_class(records, len(classes))
    image_of = np.repeat(np.arange(len(records), dtype=np.int32), records.detection_counts)
    truth_of = np.repeat(np.arange(len(records), dtype=np.int32), records.truth_counts)
    for band in [None, *range(len(SIZE_BANDS))] if bands else [None]:
        size = None if band is None else SIZE_BANDS[band]
        per_class: list[dict[str, Value]] = []
        pooled = np.zeros(3, np.int64)
        tallies: list[Tally] = []
        for k, name in enumerate(classes):
            ranked = scoped(records, k, by_class[k], band)
            instances[_scope(name, size)] = ranked.positives
            if k not in known:
                unknown = NotComputed(f"the model does not know the class {name!r}")
                per_class.append(dict.fromkeys(METRICS, unknown))
                continue
            counts = _counts(records, ranked, by_class[k], band, confidence)
            pooled += counts
            found = {**_average_precision(ranked), **_accuracy(counts)}
            if band is None:
                tallies.append(tally(records, image_of, truth_of, by_class[k], k, confidence))
                found |= rates(tallies[-1])
            per_class.append(found)
        overall = _mean_over_classes([per_class[k] for k in known]) | _accuracy(pooled)
        if band is None:
            clear = np.bincount(truth_of, minlength=len(records)) == 0
            overall |= rates(pool(tallies, clear))
        instances[_scope(None, size)] = int(pooled[2])
        for scope, found in [(None, overall), *zip(classes, per_class, strict=True)]:
            for metric, value in found.items():
                if band is None or metric in _ACCURACY:
                    values[str(MetricName(metric, scope, size))] = value
    return Metrics(values, confidence, instances)


def _scope(class_name: str | None, size: str | None) -> str:
    return str(MetricName("", class_name, size)).rstrip("/") or "all"


def rows_by_class(records: Records, class_count: int) -> list[Rows]:
    """Rows of each class, best first; equal scores in the order of the images."""
    found = []
    for k in range(class_count):
        rows = np.flatnonzero(records.classes == k).astype(np.int32)
        found.append(rows[best_first(records.scores[rows])])
    return found


def scoped(records: Records, class_index: int, rows: Rows, band: int | None) -> Ranked:
    """The ranked detections of a class within COCO's limit, overall or in a size band."""
    rows = rows[(records.bits[rows] & BEYOND_LIMIT) == 0]
    counting = (records.truth_classes == class_index) & ~records.crowd
    if band is None:
        ignored = None if records.ignored is None else records.ignored[rows]
        return Ranked(rows, records.bits[rows], ignored, int(counting.sum()))
    assert records.band_true is not None and records.band_ignored is not None  # checked at the door
    positives = int((counting & records.truth_in_band(band)).sum())
    return Ranked(rows, records.band_true[rows, band], records.band_ignored[rows, band], positives)


def precision_envelope(ranked: Ranked, bit: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Recall and non-increasing precision at the true positives, which alone decide COCO's average precision.

    Returns:
        Two arrays of one length, the number of true positives at threshold `bit`; recall ascending.
    """
    hits = np.flatnonzero((ranked.true >> np.uint16(bit)) & 1)
    shown = hits + 1.0
    if ranked.ignored is not None:
        shown -= np.cumsum((ranked.ignored >> np.uint16(bit)) & 1)[hits]
    found = np.arange(1, len(hits) + 1)
    # pycocotools adds an epsilon to the denominator, so that a perfect detector gets 1 - 1e-16 and misses a bound of 1.
    precision = found / shown
    return found / ranked.positives, np.maximum.accumulate(precision[::-1])[::-1]


def interpolated(recall: NDArray[np.float64], precision: NDArray[np.float64]) -> NDArray[np.float64]:
    """(101,) precision at COCO's recall points; 0 where the recall is never reached."""
    at = np.searchsorted(recall, RECALL_POINTS, side="left")
    return np.append(precision, 0.0)[np.minimum(at, len(precision))]


def ap_per_iou(ranked: Ranked) -> NDArray[np.float64]:
    """(10,) average precision at IoU 0.50 ... 0.95; needs at least one object."""
    return np.array([interpolated(*precision_envelope(ranked, bit)).mean() for bit in range(10)])


def _average_precision(ranked: Ranked) -> dict[str, Value]:
    if ranked.positives == 0:
        return dict.fromkeys(("map50", "map75", "map50_95"), NotComputed("no object of this kind in the images"))
    ap = ap_per_iou(ranked)
    return {"map50": float(ap[0]), "map75": float(ap[5]), "map50_95": float(ap.mean())}


def _mean_over_classes(per_class: list[dict[str, Value]]) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for metric in ("map50", "map75", "map50_95"):
        numbers = [v for c in per_class if not isinstance(v := c[metric], NotComputed)]
        found[metric] = float(np.mean(numbers)) if numbers else NotComputed("no object of any class in the images")
    return found


def _counts(records: Records, ranked: Ranked, rows: Rows, band: int | None, confidence: float) -> NDArray[np.int64]:
    """(3,) true positives, false positives, objects of one class at the confidence and IoU 0.50."""
    sure = at_least(records, rows, confidence)
    if band is None:
        true = records.bits[sure] & 1
        ignored = ignored_rows(records, sure)
    else:
        assert records.band_true is not None and records.band_ignored is not None  # checked at the door
        true, ignored = records.band_true[sure, band] & 1, records.band_ignored[sure, band] & 1
    hits = int(true.sum())
    return np.array([hits, len(sure) - hits - int(ignored.sum()), ranked.positives], np.int64)


def _accuracy(counts: NDArray[np.int64]) -> dict[str, Value]:
    true, false, objects = (int(c) for c in counts)
    if objects == 0:
        return dict.fromkeys(("precision", "recall", "f1"), NotComputed("no object of this kind in the images"))
    precision: Value = true / (true + false) if true + false else NotComputed("no detection at this confidence")
    return {"precision": precision, "recall": true / objects, "f1": 2 * true / (true + false + objects)}
