"""Rates over detections and images at a stated confidence: what average precision does not tell."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfp_gate.evaluation.columns import ABNORMAL, Records

CALIBRATION_BINS = 10


@dataclass(frozen=True)
class NotComputed:
    """A metric that has no value, and why."""

    reason: str

    def __str__(self) -> str:
        return f"not computed: {self.reason}"


Value = float | NotComputed

Rows = NDArray[np.int32]


@dataclass(frozen=True)
class Tally:
    """Sums of one class, or of all, from which its rates follow."""

    shown: int
    score_sum: float
    abnormal: int
    judged: int
    gaps: NDArray[np.float64]  # (bins,) sum of score - right
    reported: NDArray[np.bool_]  # (I,) images with a detection
    holding: NDArray[np.bool_]  # (I,) images with objects that count
    clear: NDArray[np.bool_]  # (I,) images without any, crowds included


def tally(records: Records, image_of: Rows, truth_of: Rows, rows: Rows, class_index: int, confidence: float) -> Tally:
    """The sums of one class. `rows` are its detections, best first."""
    sure = at_least(records, rows, confidence)
    own = records.truth_classes == class_index
    size = len(records)
    scores = records.scores[sure].astype(np.float64)
    judged = ~ignored_rows(records, sure)
    present = np.bincount(truth_of[own], minlength=size) > 0
    return Tally(
        shown=len(sure),
        score_sum=float(scores.sum()),
        abnormal=int(((records.bits[sure] & ABNORMAL) != 0).sum()),
        judged=int(judged.sum()),
        gaps=_gaps(scores[judged], (records.bits[sure[judged]] & 1) != 0),
        reported=np.bincount(image_of[sure], minlength=size) > 0,
        holding=np.bincount(truth_of[own & ~records.crowd], minlength=size) > 0,
        clear=~present,
    )


def pool(tallies: Sequence[Tally], clear: NDArray[np.bool_]) -> Tally:
    """The sums of several classes together; `clear` are the images without objects of any."""
    nowhere = np.zeros(len(clear), bool)
    return Tally(
        shown=sum(t.shown for t in tallies),
        score_sum=sum(t.score_sum for t in tallies),
        abnormal=sum(t.abnormal for t in tallies),
        judged=sum(t.judged for t in tallies),
        gaps=np.sum([t.gaps for t in tallies], axis=0) if tallies else np.zeros(CALIBRATION_BINS),
        reported=np.logical_or.reduce([nowhere, *(t.reported for t in tallies)]),
        holding=np.logical_or.reduce([nowhere, *(t.holding for t in tallies)]),
        clear=clear,
    )


def rates(sums: Tally) -> dict[str, Value]:
    """The rates that follow from the sums."""
    silent = NotComputed("no detection at this confidence")
    holding, clear = int(sums.holding.sum()), int(sums.clear.sum())
    undetected, alarmed = sums.holding & ~sums.reported, sums.clear & sums.reported
    return {
        "mean_confidence": sums.score_sum / sums.shown if sums.shown else silent,
        "abnormal_box_rate": sums.abnormal / sums.shown if sums.shown else silent,
        "undetected_image_rate": int(undetected.sum()) / holding
        if holding
        else NotComputed("no image with such objects"),
        "false_alarm_rate": int(alarmed.sum()) / clear if clear else NotComputed("no image without such objects"),
        "calibration_error": float(np.abs(sums.gaps).sum() / sums.judged) if sums.judged else silent,
    }


def _gaps(scores: NDArray[np.float64], right: NDArray[np.bool_]) -> NDArray[np.float64]:
    """(bins,) sum of score minus outcome in ten equal score bins. The expected calibration error is the sum of their
    absolute values over the number of detections (Guo et al. 2017)."""
    place = np.minimum((scores * CALIBRATION_BINS).astype(np.int64), CALIBRATION_BINS - 1)
    weights = scores - right
    found = np.asarray(np.bincount(place, weights=weights, minlength=CALIBRATION_BINS), np.float64)
    return found


def at_least(records: Records, rows: Rows, confidence: float) -> Rows:
    """The rows, given best first, whose score reaches the confidence, compared in float32 as stored."""
    return rows[: np.searchsorted(-records.scores[rows], -np.float32(confidence), side="right")]


def ignored_rows(records: Records, rows: Rows) -> NDArray[np.bool_]:
    """Whether each row fell on a crowd at IoU 0.50."""
    if records.ignored is None:
        return np.zeros(len(rows), bool)
    return (records.ignored[rows] & 1).astype(bool)
