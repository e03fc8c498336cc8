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
    away, inside, area = np.zeros(len(boxes), bool), np.ones(len(boxes)), np.ones(len(boxes))
    for axis in (0, 1):
        low, side, limit = boxes[:, axis], boxes[:, axis + 2], sizes[:, axis]
        centre = low + side / 2
        away |= (centre < 0) | (centre > limit)
        inside *= np.maximum(np.minimum(low + side, limit) - np.maximum(low, 0.0), 0.0)
        area *= side
    found: NDArray[np.bool_] = known & (away | (inside < (1 - OUTSIDE_SHARE) * area))
    return found


def _duplicates(group: NDArray[np.int64], boxes: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the worse ones of all pairs of a group with an overlap of `DUPLICATE_IOU`.

    Two boxes of that overlap have nearly the same left edge: within (1 - iou) of the wider one's width. So they are
    sorted by it, and each is compared with its next neighbours only while the edge allows: about D log D.
    """
    if len(group) < 2:
        return np.zeros(0, np.int64)
    left = boxes[:, 0]
    low, high = float(left.min()), float(left.max())
    # One key of group and edge: a single sort of floats is three times as fast as two stable ones.
    change = np.cumsum(np.r_[0, group[1:] != group[:-1]])
    order = np.argsort(change + (left - low) / (2 * (high - low) + 1))
    g = group[order]
    x, y, w, h = np.ascontiguousarray(boxes[order].T)
    shift = (1 - DUPLICATE_IOU) / DUPLICATE_IOU
    reach, slack = x + w * shift, h * shift
    found: list[NDArray[np.int64]] = []
    active = np.arange(len(order) - 1)
    step = 1
    while len(active):
        other = active + step
        close = (x[other] <= reach[active]) & (g[other] == g[active])
        active, other = active[close], other[close]
        near = np.abs(y[other] - y[active]) <= slack[active]
        a, b = active[near], other[near]
        width = np.minimum(x[a] + w[a], x[b] + w[b]) - np.maximum(x[a], x[b])
        height = np.minimum(y[a] + h[a], y[b] + h[b]) - np.maximum(y[a], y[b])
        shared = np.maximum(width, 0.0) * np.maximum(height, 0.0)
        union = w[a] * h[a] + w[b] * h[b] - shared
        same = (shared >= DUPLICATE_IOU * union) & (union > 0)
        found.append(np.maximum(order[a[same]], order[b[same]]))
        step += 1
        active = active[active + step < len(order)]
    return np.unique(np.concatenate(found))
