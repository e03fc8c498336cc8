"""Per-image sums from which a ratio metric follows under any weighting of the images."""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kfp_gate.evaluation.columns import ABNORMAL, Records
from kfp_gate.evaluation.rates import CALIBRATION_BINS

Floats = NDArray[np.float64]


def _ratio(above: Floats, below: Floats) -> Floats:
    found: Floats = np.divide(above, below, out=np.full(len(above), np.nan), where=below > 0)
    return found


def _with_objects(value: Floats, objects: Floats) -> Floats:
    return np.where(objects > 0, value, np.nan)


RATIOS: dict[str, Callable[[Floats], Floats]] = {
    # Columns of true positives, false positives, objects.
    "precision": lambda s: _with_objects(_ratio(s[:, 0], s[:, 0] + s[:, 1]), s[:, 2]),
    "recall": lambda s: _ratio(s[:, 0], s[:, 2]),
    "f1": lambda s: _with_objects(_ratio(2 * s[:, 0], s[:, 0] + s[:, 1] + s[:, 2]), s[:, 2]),
    # Columns of the numerator and the denominator.
    "mean_confidence": lambda s: _ratio(s[:, 0], s[:, 1]),
    "abnormal_box_rate": lambda s: _ratio(s[:, 0], s[:, 1]),
    "undetected_image_rate": lambda s: _ratio(s[:, 0], s[:, 1]),
    "false_alarm_rate": lambda s: _ratio(s[:, 0], s[:, 1]),
    # The gaps of the bins, then the denominator.
    "calibration_error": lambda s: _ratio(np.abs(s[:, :-1]).sum(axis=1), s[:, -1]),
}
"""Metric to its value, (B,), from (B, columns) weighted sums; NaN without evidence."""


NO_SHARES = frozenset({"mean_confidence", "calibration_error"})
"""Ratios that are no share of trials that end one way or the other."""


def column_sums(
    records: Records,
    rows_by_class: Sequence[NDArray[np.int32]],
    known: Sequence[int],
    metric: str,
    class_index: int | None,
    band: int | None,
    confidence: float,
) -> NDArray[np.float32]:
    """(I, columns) sums of one metric in one scope: a class or all known, a size band or all sizes."""
    size = len(records)
    floor = np.float32(confidence)
    sure: NDArray[np.signedinteger]
    if class_index is not None:
        rows = rows_by_class[class_index]
        sure = np.sort(rows[records.scores[rows] >= floor])
        counting = records.truth_classes == class_index
    else:
        sure = np.flatnonzero(records.scores >= floor)
        # What is said of all classes pools those that the model knows.
        counting = np.isin(records.truth_classes, known)
    own = counting if class_index is not None else np.ones(len(counting), bool)
    clear_of = np.bincount(np.repeat(np.arange(size), records.truth_counts)[own], minlength=size) == 0
    counting = counting & ~records.crowd
    image = np.repeat(np.arange(size, dtype=np.int32), records.detection_counts)[sure]
    holder = np.repeat(np.arange(size, dtype=np.int32), records.truth_counts)
    if band is not None:
        assert records.band_true is not None and records.band_ignored is not None  # checked at the door
        counting &= records.truth_in_band(band)
        true, ignored = records.band_true[sure, band] & 1, records.band_ignored[sure, band] & 1
    else:
        true = records.bits[sure] & 1
        ignored = np.zeros(len(sure), np.uint16) if records.ignored is None else records.ignored[sure] & 1

    def count(where: NDArray[np.int32], weight: NDArray[np.generic] | None = None) -> Floats:
        return np.bincount(where, weights=weight, minlength=size).astype(np.float64)

    objects = count(holder[counting])
    if metric in ("precision", "recall", "f1"):
        columns = [count(image, true), count(image, 1 - true.astype(np.int64) - ignored), objects]
    elif metric == "mean_confidence":
        columns = [count(image, records.scores[sure].astype(np.float64)), count(image)]
    elif metric == "abnormal_box_rate":
        columns = [count(image, (records.bits[sure] & ABNORMAL) != 0), count(image)]
    elif metric == "undetected_image_rate":
        holding = objects > 0
        columns = [(holding & (count(image) == 0)).astype(np.float64), holding.astype(np.float64)]
    elif metric == "false_alarm_rate":
        columns = [(clear_of & (count(image) > 0)).astype(np.float64), clear_of.astype(np.float64)]
    else:
        judged = ignored == 0
        scores = records.scores[sure][judged].astype(np.float64)
        place = np.minimum((scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
        gaps = scores - true[judged]
        columns = [
            count(image[judged][place == b], gaps[place == b]) for b in range(CALIBRATION_BINS)
        ]  # fmt: skip
        columns.append(count(image[judged]))
    return np.stack(columns, axis=1).astype(np.float32)
