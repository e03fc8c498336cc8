"""Making records: detections and objects of each image go in, flat columns come out.

See `columns` for what a record holds. Imports neither torch nor ultralytics.
"""

from collections.abc import Iterable
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation import matching
from kfp_gate.evaluation.abnormal import abnormal_bits
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.columns import ABSURD, BEYOND_LIMIT, Records, best_first, columns, concat, empty, join

__all__ = ["COCO_MAX_DETECTIONS", "Matcher", "Records", "concat", "empty", "match", "truth_pixels"]

COCO_MAX_DETECTIONS = 100
"""COCO's average precision uses the 100 best detections per image and class. The others keep their records, and
count in precision, recall and the rates."""

_CHUNK_DETECTIONS = 20_000
_CHUNK_PAIRS = 200_000


def truth_pixels(boxes: NDArray[np.float64], width: int, height: int) -> NDArray[np.float64]:
    """(n, 4) x1 y1 x2 y2 in pixels of a manifest's (n, 5) class, cx, cy, w, h in 0..1.

    One function for training and gate, so that both round alike.
    """
    scale = np.array([width, height], np.float64)
    centre, half = boxes[:, 1:3] * scale, boxes[:, 3:5] * scale / 2
    return np.concatenate([centre - half, centre + half], axis=1)


class Matcher:
    """Takes images one by one, in any order, and keeps only records. Memory: the records and one chunk.

    Args:
        class_count: classes of the data set; at most 32767.
        detail: also keep the columns of a stored evaluation.
        reference: box shapes of the training set; marks boxes that are absurd against it.
        abnormal: whether to look for abnormal boxes; about a third of the work.
    """

    def __init__(
        self,
        class_count: int,
        *,
        detail: bool = False,
        reference: BoxReference | None = None,
        abnormal: bool = True,
    ) -> None:
        if not 0 < class_count <= np.iinfo(np.int16).max:
            raise InvalidInput(
                f"{class_count} classes", expected="1 to 32767", where="Matcher",
                next_step="check the class names of the manifest",
            )  # fmt: skip
        self._class_count = class_count
        if reference is not None and len(reference.counts) != class_count:
            raise InvalidInput(
                f"a box reference of {len(reference.counts)} classes", expected=f"{class_count}", where="Matcher",
                next_step="make it from a manifest with the same classes",
            )  # fmt: skip
        self._detail, self._abnormal = detail, abnormal
        self._reference = reference
        self._parts: list[dict[str, NDArray[Any]]] = []
        self._pending: list[tuple[Any, ...]] = []
        self._detections = self._pairs = 0

    def add(
        self,
        image: int,
        boxes: ArrayLike,
        scores: ArrayLike,
        classes: ArrayLike,
        truth_boxes: ArrayLike,
        truth_classes: ArrayLike,
        *,
        crowd: ArrayLike | None = None,
        size: tuple[int, int] | None = None,
    ) -> None:
        """Add one image.

        Args:
            image: its index in the manifest.
            boxes: (n, 4) x1 y1 x2 y2 in pixels of the original image.
            scores: (n,) in 0..1.
            classes: (n,) class indices of the data set.
            truth_boxes: (m, 4).
            truth_classes: (m,).
            crowd: (m,) True for regions that neither count nor blame.
            size: (width, height); without it no box is `OUTSIDE`.

        Raises:
            Broken: a value is not finite, a class index is out of range, or the lengths disagree.
        """
        s = np.asarray(scores, np.float32).reshape(-1)
        b = np.asarray(boxes, np.float64).reshape(-1, 4)
        c = np.asarray(classes, np.int64).reshape(-1)
        tb = np.asarray(truth_boxes, np.float64).reshape(-1, 4)
        tc = np.asarray(truth_classes, np.int64).reshape(-1)
        cr = np.zeros(len(tc), bool) if crowd is None else np.asarray(crowd, bool).reshape(-1)
        problem = ""
        if not len(s) == len(b) == len(c) or not len(tb) == len(tc) == len(cr):
            problem = f"{len(b)} boxes, {len(s)} scores, {len(c)} classes; {len(tb)} objects, {len(tc)} classes"
        elif not isfinite(float(s.sum()) + float(b.sum()) + float(tb.sum())):  # any NaN or inf reaches the sum
            problem = "a score or box that is not finite"
        elif any(len(k) and k.view(np.uint64).max() >= self._class_count for k in (c, tc)):  # -1 is very large so
            problem = f"a class index outside 0..{self._class_count - 1}"
        if problem:
            raise Broken(
                problem, expected="one finite score, box and known class per detection and object",
                where=f"image {image} of the evaluation", next_step="check the model's output on this image",
            )  # fmt: skip
        order = best_first(s)
        absurd = np.zeros(len(s), bool)
        if self._reference is not None and size is not None:
            absurd = self._reference.absurd(b, c, *size)
        self._pending.append((image, b[order], s[order], c[order], tb, tc, cr, size or (0, 0), absurd[order]))
        self._detections += len(s)
        # An upper bound of the chunk's pairs when all are of one class.
        self._pairs += len(s) * len(tc)
        if self._detections >= _CHUNK_DETECTIONS or self._pairs >= _CHUNK_PAIRS or len(self._pending) >= 4096:
            self._flush()

    def finish(self) -> Records:
        """The records of all images added, sorted by image. The matcher is empty afterwards."""
        self._flush()
        parts, self._parts = self._parts, []
        return join(parts)

    def _flush(self) -> None:
        if self._pending:
            self._parts.append(columns(_match_chunk(self._pending, self._class_count, self._detail, self._abnormal)))
            self._pending, self._detections, self._pairs = [], 0, 0


def match(images: Iterable[tuple[Any, ...]], class_count: int, *, detail: bool = False) -> Records:
    """Records of (image, boxes, scores, classes, truth_boxes, truth_classes) tuples; see `Matcher.add`.

    >>> match([(0, [[0, 0, 10, 10]], [0.9], [0], [[0, 0, 10, 8]], [0])], 1).bits.tolist()
    [127]
    """
    matcher = Matcher(class_count, detail=detail)
    for image in images:
        matcher.add(*image)
    return matcher.finish()


def _match_chunk(pending: list[tuple[Any, ...]], class_count: int, detail: bool, abnormal: bool) -> Records:
    counts = np.array([len(p[2]) for p in pending], np.int32)
    truth_counts = np.array([len(p[5]) for p in pending], np.int32)
    boxes, scores, classes = (np.concatenate([p[i] for p in pending]) for i in (1, 2, 3))
    truth, truth_classes, crowd = (np.concatenate([p[i] for p in pending]) for i in (4, 5, 6))
    absurd = np.where(np.concatenate([p[8] for p in pending]), np.uint16(ABSURD), np.uint16(0))
    sizes = np.array([p[7] for p in pending], np.int32).reshape(-1, 2)
    image = np.repeat(np.arange(len(pending)), counts)
    # Groups by (image, class). Both sorts are stable: input order breaks ties, as in pycocotools.
    key, truth_key = _keys(counts, classes, class_count), _keys(truth_counts, truth_classes, class_count)
    small = len(pending) * class_count < 1 << 16  # sixteen bits are sorted by radix
    order, truth_order = (np.argsort(k.astype(np.uint16) if small else k, kind="stable") for k in (key, truth_key))
    xywh, truth_xywh = _xywh(boxes), _xywh(truth)
    groups = matching.Groups(
        key[order], xywh[order], truth_key[truth_order], truth_xywh[truth_order], crowd[truth_order]
    )
    pairs = matching.find_pairs(groups, want_best=detail)
    true, ignored = matching.assign(groups, pairs, groups.gt_crowd)
    first = np.searchsorted(groups.det_group, groups.det_group, side="left")
    beyond = np.arange(len(order)) - first >= COCO_MAX_DETECTIONS
    bits = true | np.where(beyond, np.uint16(BEYOND_LIMIT), np.uint16(0))
    if abnormal:
        bits |= abnormal_bits(groups.det_group, groups.det_boxes, sizes[image[order]])
    flags = crowd.astype(np.uint8)
    for place, area_range in enumerate(matching.AREA_RANGES.values()):
        flags |= (~matching.outside(truth_xywh, area_range)).astype(np.uint8) << np.uint8(place + 1)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    more: dict[str, Any] = {"ignored": ignored[back]} if crowd.any() else {}
    if detail:
        bands = [matching.assign_within(groups, pairs, r) for r in matching.AREA_RANGES.values()]
        more |= {
            "band_true": np.stack([b[0] for b in bands], axis=1)[back],
            "band_ignored": np.stack([b[1] for b in bands], axis=1)[back],
            "boxes": boxes.astype(np.float32), "overlaps": pairs.best[back].astype(np.float32),
            "truth_boxes": truth, "sizes": sizes,
        }  # fmt: skip
    return Records(
        np.array([p[0] for p in pending], np.int32), counts, truth_counts, scores, classes.astype(np.int16),
        bits[back] | absurd, truth_classes.astype(np.int16), flags, **more,
    )  # fmt: skip


def _keys(counts: NDArray[np.int32], classes: NDArray[np.int64], class_count: int) -> NDArray[np.int64]:
    return np.repeat(np.arange(len(counts)), counts) * class_count + classes


def _xywh(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], axis=1)
