"""Boxes that no sound detector reports: degenerate, out of the image, duplicates.

These three need no reference and go into the records' bit field. Boxes whose shape or size is absurd against the
training set need one: see `diagnostics`.
"""

import numpy as np
from numpy.typing import NDArray

MIN_SIDE = 1.0
"""A box with a side below one pixel is degenerate."""

OUTSIDE_SHARE = 0.1
"""A box is out of the image if more than this share of its area is, or its centre."""

DUPLICATE_IOU = 0.9
"""A box is a duplicate of a better one of its class that it overlaps this much. Suppression at a lower overlap leaves
none; heads without suppression can."""

_DEGENERATE, _OUTSIDE, _DUPLICATE = (np.uint16(1 << b) for b in (11, 12, 13))


def abnormal_bits(group: NDArray[np.int64], boxes: NDArray[np.float64], sizes: NDArray[np.int32]) -> NDArray[np.uint16]:
    """Flags of each detection.

    Args:
        group: (D,) image and class, non-decreasing; within a group the better detection comes first.
        boxes: (D, 4) x, y, w, h in pixels.
        sizes: (D, 2) width and height of the detection's image; 0 for unknown.
    """
    bits = np.where((boxes[:, 2] < MIN_SIDE) | (boxes[:, 3] < MIN_SIDE), _DEGENERATE, np.uint16(0))
    bits |= np.where(_is_outside(boxes, sizes), _OUTSIDE, np.uint16(0))
    bits[_duplicates(group, boxes)] |= _DUPLICATE
    return bits


def _is_outside(boxes: NDArray[np.float64], sizes: NDArray[np.int32]) -> NDArray[np.bool_]:
    known: NDArray[np.bool_] = sizes.min(axis=1, initial=1) > 0
    if not known.any():
        return known
    limit = sizes.astype(np.float64)
    low, high = boxes[:, :2], boxes[:, :2] + boxes[:, 2:]
    centre = (low + high) / 2
    inside = np.clip(np.minimum(high, limit) - np.maximum(low, 0.0), 0.0, None).prod(axis=1)
    area = boxes[:, 2:].prod(axis=1)
    away = ((centre < 0) | (centre > limit)).any(axis=1)
    found: NDArray[np.bool_] = known & (away | (inside < (1 - OUTSIDE_SHARE) * area))
    return found


def _duplicates(group: NDArray[np.int64], boxes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the worse ones of all pairs of a group with an overlap of `DUPLICATE_IOU`.

    Two boxes of that overlap have nearly the same left edge: within (1 - iou) of the wider one's width. So they are
    sorted by it, and each is compared with its next neighbours only while the edge allows: about D log D.
    """
    left = boxes[:, 0]
    order = np.lexsort((left, group))
    g, x, w = group[order], left[order], boxes[order, 2]
    reach = x + w * (1 - DUPLICATE_IOU) / DUPLICATE_IOU
    found: list[NDArray[np.int64]] = []
    active = np.arange(max(len(order) - 1, 0))
    step = 1
    while len(active):
        other = active + step
        close = (g[other] == g[active]) & (x[other] <= reach[active])
        active, other = active[close], other[close]
        a, b = order[active], order[other]
        low = np.maximum(boxes[a, :2], boxes[b, :2])
        high = np.minimum(boxes[a, :2] + boxes[a, 2:], boxes[b, :2] + boxes[b, 2:])
        intersection = np.clip(high - low, 0.0, None).prod(axis=1)
        union = boxes[a, 2:].prod(axis=1) + boxes[b, 2:].prod(axis=1) - intersection
        same = (intersection >= DUPLICATE_IOU * union) & (union > 0)
        found.append(np.maximum(a[same], b[same]))
        step += 1
        active = active[active + step < len(order)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, np.int64)
