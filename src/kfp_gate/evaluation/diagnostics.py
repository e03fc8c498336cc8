"""Why detections are wrong: the kinds of error, what each costs, and which class is taken for which.

The kinds are those of TIDE (Bolya et al. 2020, "TIDE: A General Toolbox for Identifying Object Detection Errors") at
IoU 0.50 for a match and 0.10 for background. Needs records with detail.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.columns import BEYOND_LIMIT, Records

MATCH, BACKGROUND = 0.5, 0.1

RIGHT, IGNORED, LOCATION, CLASS, DUPLICATE, BOTH, NOTHING = range(7)
ERROR_KINDS = {
    "class": "on an object, but of another class",
    "location": "on an object of its class, but too far off",
    "both": "near an object of another class, and too far off",
    "duplicate": "on an object that a better detection has taken",
    "background": "on no object at all",
    "missed": "objects that no detection came near",
}
"""In the order of the paper."""

_CODE = {"class": CLASS, "location": LOCATION, "both": BOTH, "duplicate": DUPLICATE, "background": NOTHING}


@dataclass(frozen=True)
class Causes:
    """What became of every detection and object.

    Attributes:
        kinds: (D,) RIGHT, IGNORED (on a crowd), or the kind of error.
        targets: (D,) row of the object that a detection took or fell on; -1 for none.
        found: (G,) whether a detection of its class took the object.
    """

    kinds: NDArray[np.int8]
    targets: NDArray[np.int64]
    found: NDArray[np.bool_]


def causes(records: Records) -> Causes:
    """The cause of every detection. One image at a time: memory holds one image's overlaps.

    Raises:
        InvalidInput: records without boxes.
    """
    kinds = np.full(len(records.scores), NOTHING, np.int8)
    targets = np.full(len(records.scores), -1, np.int64)
    found = np.zeros(len(records.truth_classes), bool)
    right = (records.bits & 1).astype(bool)
    ignored = records.ignored_at(0)
    for dets, truths, iou in _overlaps(records):
        if not len(dets) or not len(truths):
            continue
        same = records.classes[dets, None] == records.truth_classes[None, truths]
        for d in np.flatnonzero(right[dets]):
            # The records know which detections are right; serving them in order gives the object of each, by the
            # matcher's own rule: the free one of largest overlap, the later of equal ones.
            free = np.where(same[d] & ~found[truths], iou[d], -1.0)
            g = len(free) - 1 - int(np.argmax(free[::-1]))
            found[truths[g]] = True
            targets[dets[d]] = truths[g]
        own, other = np.where(same, iou, 0.0), np.where(same, 0.0, iou)
        place, strange = own.argmax(1), other.argmax(1)
        own_best, other_best = own.max(1), other.max(1)
        taken_best = np.where(found[truths][None], own, 0.0).max(1)
        # In TIDE's order: the first that holds.
        near = (own_best >= BACKGROUND) & (own_best < MATCH)
        conditions = [near, other_best >= MATCH, taken_best >= MATCH, np.maximum(own_best, other_best) < BACKGROUND]
        image_kinds = np.select(conditions, [LOCATION, CLASS, DUPLICATE, NOTHING], default=BOTH)
        image_kinds[ignored[dets]] = IGNORED
        image_kinds[right[dets]] = RIGHT
        kinds[dets] = image_kinds
        on = np.select([image_kinds == LOCATION, image_kinds == CLASS], [truths[place], truths[strange]], default=-1)
        targets[dets] = np.where(image_kinds == RIGHT, targets[dets], on)
    return Causes(kinds, targets, found)


def error_parts(records: Records, classes: Sequence[str]) -> dict[str, float]:
    """The AP50 that each kind of error costs: the rise of the mean over classes if that kind alone were put right.

    A detection put right takes its object if no detection holds it and no better one of the same kind claims it; else
    it is removed. Missed objects are those without a class or location error on them; put right, they are not counted.
    The parts do not add up to 1 - AP50.

    Returns:
        Kind to rise in 0..1; empty without objects.
    """
    base = causes(records)
    counting = ~records.crowd
    within = (records.bits & BEYOND_LIMIT) == 0
    positives = np.bincount(records.truth_classes[counting], minlength=len(classes))
    if not positives.any():
        return {}

    def mean(
        hits: NDArray[np.bool_], shown: NDArray[np.bool_], kinds: NDArray[np.int16], objects: NDArray[np.int64]
    ) -> float:
        values = [
            _average_precision(records.scores[rows], hits[rows], int(objects[k]))
            for k in np.flatnonzero(positives)
            for rows in [np.flatnonzero(shown & (kinds == k))]
        ]
        return float(np.mean(values))

    hits = base.kinds == RIGHT
    shown = within & (base.kinds != IGNORED)
    before = mean(hits, shown, records.classes, positives)
    parts: dict[str, float] = {}
    for name, code in _CODE.items():
        wrong = shown & (base.kinds == code)
        fixed_hits, fixed_kinds = hits, records.classes
        winners = np.zeros(len(hits), bool)
        if code in (CLASS, LOCATION):
            rows = np.flatnonzero(wrong & ~base.found[base.targets])
            rows = rows[np.argsort(-records.scores[rows], kind="stable")]
            winners[rows[np.unique(base.targets[rows], return_index=True)[1]]] = True
            winners &= counting[base.targets]
            fixed_kinds = np.where(winners, records.truth_classes[base.targets], records.classes)
            fixed_hits = hits | winners
        parts[name] = mean(fixed_hits, shown & (~wrong | winners), fixed_kinds, positives) - before
    covered = np.zeros(len(counting), bool)
    covered[base.targets[shown & np.isin(base.kinds, (CLASS, LOCATION))]] = True
    missed = counting & ~base.found & ~covered
    left = positives - np.bincount(records.truth_classes[missed], minlength=len(classes))
    parts["missed"] = mean(hits, shown, records.classes, left) - before
    return {name: parts[name] for name in ERROR_KINDS}


def confusion_matrix(records: Records, classes: Sequence[str], *, confidence: float) -> NDArray[np.int64]:
    """(K + 1, K + 1) counts: true class by row, reported class by column; the last row is "no object", the last column
    "not found".

    Detections at or above the confidence. Right ones are those of the metrics, so that the diagonal agrees with recall;
    then each wrong one, best first, takes the free object of largest overlap at IoU 0.50, of whatever class.
    """
    size = len(classes)
    table = np.zeros((size + 1, size + 1), np.int64)
    sure = records.scores >= np.float32(confidence)
    right, ignored = (records.bits & 1).astype(bool), records.ignored_at(0)
    for dets, truths, iou in _overlaps(records):
        free = ~records.crowd[truths]
        same = records.classes[dets, None] == records.truth_classes[None, truths]
        order = np.flatnonzero(sure[dets] & ~ignored[dets])
        # Right ones first, in order, as in `causes`; then the wrong ones.
        for d in [*order[right[dets[order]]], *order[~right[dets[order]]]]:
            reported = int(records.classes[dets[d]])
            hit = bool(right[dets[d]])
            usable = np.where(free & (same[d] | (not hit)), iou[d], -1.0)
            g = len(usable) - 1 - int(np.argmax(usable[::-1])) if len(usable) else -1
            if g >= 0 and usable[g] >= (0.0 if hit else MATCH):
                free[g] = False
                table[records.truth_classes[truths[g]], reported] += 1
            else:
                table[size, reported] += 1
        left = records.truth_classes[truths[free]]
        table[:size, size] += np.bincount(left, minlength=size)
    return table


def _overlaps(records: Records) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float64]]]:
    """Per image: rows of its detections, rows of its objects, (d, g) overlaps."""
    if records.boxes is None or records.truth_boxes is None:
        raise InvalidInput(
            "records without boxes", expected="records of a stored evaluation", where="diagnostics",
            next_step="evaluate with detail=True",
        )  # fmt: skip
    det_ends, truth_ends = np.cumsum(records.detection_counts), np.cumsum(records.truth_counts)
    crowd = records.crowd
    for i in range(len(records)):
        dets = np.arange(det_ends[i] - records.detection_counts[i], det_ends[i])
        truths = np.arange(truth_ends[i] - records.truth_counts[i], truth_ends[i])
        truths = truths[~crowd[truths]]
        a, b = records.boxes[dets].astype(np.float64)[:, None], records.truth_boxes[truths][None]
        sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0.0, None)
        shared = sides.prod(-1)
        union = (a[..., 2:] - a[..., :2]).prod(-1) + (b[..., 2:] - b[..., :2]).prod(-1) - shared
        yield dets, truths, np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _average_precision(scores: NDArray[np.float32], hits: NDArray[np.bool_], positives: int) -> float:
    """COCO's, of one class at one threshold. A class whose objects were all missed loses nothing more: 1."""
    from kfp_gate.evaluation.metrics import Ranked, interpolated, precision_envelope

    if positives == 0:
        return 1.0
    order = np.argsort(-scores, kind="stable").astype(np.int32)
    ranked = Ranked(order, hits[order].astype(np.uint16), None, positives)
    return float(interpolated(*precision_envelope(ranked, 0)).mean())
