"""Greedy matching of detections to objects, by COCO's rule, for many images at once.

The rule is that of `pycocotools.cocoeval.COCOeval.evaluateImg`: within one image and class, detections are
served by falling score; each takes the free object of largest overlap at or above the threshold; crowd
regions and objects outside a size band never count, and a detection that falls on one is ignored. Equal
scores keep their input order, and of two equal overlaps the later object wins, as there.

The work is vectorised across images, classes and the ten thresholds: in turn `r` the r-th candidate of every (image,
class) group is served. A loop over images costs about ten times the CPU.

Shape legend: D detections, G objects, P pairs whose overlap reaches the lowest threshold, T = 10 thresholds.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""COCO's, in the very floats of pycocotools."""

AREA_RANGES = {"small": (0.0, 32.0**2), "medium": (32.0**2, 96.0**2), "large": (96.0**2, 1e10)}
"""Square pixels of the original image; both ends belong to the band, as in pycocotools."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bits = NDArray[np.uint16]

_REACH = ((1 << np.arange(11)) - 1).astype(np.uint16)


@dataclass(frozen=True)
class Groups:
    """Detections and objects of a chunk of images, laid out for matching.

    Detections are sorted by (group, falling score); objects by group. A group is one image and class.
    """

    det_group: Ints  # (D,)
    det_boxes: Floats  # (D, 4) x, y, w, h
    gt_group: Ints  # (G,)
    gt_boxes: Floats  # (G, 4) x, y, w, h
    gt_crowd: NDArray[np.bool_]  # (G,)


@dataclass(frozen=True)
class Pairs:
    """The pairs of one group whose overlap reaches the lowest threshold, grouped by detection."""

    det: Ints  # (P,) non-decreasing
    gt: Ints  # (P,)
    iou: Floats  # (P,)
    best: Floats  # (D,) largest overlap of each detection with an object of its class; zeros if not wanted


def find_pairs(groups: Groups, *, want_best: bool = False) -> Pairs:
    """All pairs at or above the lowest threshold. Overlaps in the floating-point steps of pycocotools' `bbIou`."""
    # Groups repeat: look each up once.
    change = np.r_[True, groups.det_group[1:] != groups.det_group[:-1]][: len(groups.det_group)]
    own = groups.det_group[change]
    run = np.cumsum(change) - 1
    low = np.searchsorted(groups.gt_group, own, side="left")
    starts, counts = low[run], (np.searchsorted(groups.gt_group, own, side="right") - low)[run]
    det = np.repeat(np.arange(len(counts)), counts)
    offset = np.cumsum(counts) - counts
    gt = np.arange(len(det)) + np.repeat(starts - offset, counts)
    iou = overlaps(groups.det_boxes[det], groups.gt_boxes[gt], groups.gt_crowd[gt])
    best = np.zeros(len(counts))
    with_truth = counts > 0
    if want_best and with_truth.any():
        best[with_truth] = np.maximum.reduceat(iou, offset[with_truth])
    keep = iou >= IOU_THRESHOLDS[0]
    return Pairs(det[keep], gt[keep], iou[keep], best)


def overlaps(a: Floats, b: Floats, crowd: NDArray[np.bool_] | None = None) -> Floats:
    """Row-wise overlap of (n, 4) x, y, w, h boxes: intersection over union, over a's own area if b is a crowd."""
    # Clipping the sides at 0 gives exactly 0 where pycocotools skips the pair.
    width = np.minimum(a[:, 0] + a[:, 2], b[:, 0] + b[:, 2]) - np.maximum(a[:, 0], b[:, 0])
    height = np.minimum(a[:, 1] + a[:, 3], b[:, 1] + b[:, 3]) - np.maximum(a[:, 1], b[:, 1])
    intersection = np.maximum(width, 0.0) * np.maximum(height, 0.0)
    area = a[:, 2] * a[:, 3]
    union = area + b[:, 2] * b[:, 3] - intersection
    if crowd is not None and crowd.any():
        union = np.where(crowd, area, union)
    # Two boxes without area have no union; they do not overlap.
    found: Floats = np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
    return found


def assign(groups: Groups, pairs: Pairs, gt_ignore: NDArray[np.bool_]) -> tuple[Bits, Bits]:
    """Serve the detections.

    All ten thresholds are served at once: what a detection may take and what of an object is free are bit fields.

    Args:
        gt_ignore: (G,) objects that do not count: crowds, and those outside the size band.

    Returns:
        Two (D,) bit fields over the ten thresholds: true positive; matched to an object that does not count.
    """
    size = len(groups.det_group)
    true_bits, ignored_bits = np.zeros(size, np.uint16), np.zeros(size, np.uint16)
    if len(pairs.det) == 0:
        return true_bits, ignored_bits
    det, gt, reach = _by_preference(pairs, gt_ignore)
    # 1. The turn of each pair: the place of its detection among its group's, and its own among the detection's.
    first = np.flatnonzero(np.r_[True, det[1:] != det[:-1]])
    lengths = np.diff(np.r_[first, len(det)])
    group = groups.det_group[det[first]]
    group_first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    turn = np.arange(len(first)) - np.repeat(group_first, np.diff(np.r_[group_first, len(first)]))
    wish = np.arange(len(det)) - np.repeat(first, lengths)
    key = np.repeat(turn, lengths) * (int(wish.max()) + 1) + wish
    order = np.argsort(key, kind="stable")
    ends = np.flatnonzero(np.r_[np.diff(key[order]) > 0, True]) + 1
    # 2. Serve, turn by turn. `free` falls as objects are taken; crowds stay free for any number of detections.
    det, gt, reach = det[order], gt[order], reach[order]
    ignored, lasting = gt_ignore[gt], np.where(groups.gt_crowd, np.uint16(0), np.uint16(0xFFFF))
    any_ignored = bool(ignored.any())
    free = np.full(len(groups.gt_group), 0xFFFF, np.uint16)
    begin = 0
    for end in ends.tolist():
        d, g = det[begin:end], gt[begin:end]
        got = reach[begin:end] & free[g] & ~(true_bits[d] | ignored_bits[d])
        free[g] &= ~(got & lasting[g])
        if any_ignored:
            no_count = ignored[begin:end]
            true_bits[d] |= np.where(no_count, np.uint16(0), got)
            ignored_bits[d] |= np.where(no_count, got, np.uint16(0))
        else:
            true_bits[d] |= got
        begin = end
    return true_bits, ignored_bits


def _by_preference(pairs: Pairs, gt_ignore: NDArray[np.bool_]) -> tuple[Ints, Ints, Bits]:
    """Detection, object and reached thresholds of every pair. Within a detection: counting objects first, then the
    larger overlap, then the later object."""
    det, gt, iou = pairs.det, pairs.gt, pairs.iou
    # Most detections have one pair and need no order.
    same = det[1:] == det[:-1]
    several = np.flatnonzero(np.r_[same, False] | np.r_[False, same])
    if len(several):
        d, g = det[several], gt[several]
        order = np.lexsort((-g, -iou[several], gt_ignore[g], d))
        gt, iou = gt.copy(), iou.copy()
        gt[several], iou[several] = g[order], pairs.iou[several][order]
    reached = np.searchsorted(IOU_THRESHOLDS, iou, side="right")
    return det, gt, _REACH[reached]


def assign_within(groups: Groups, pairs: Pairs, area_range: tuple[float, float]) -> tuple[Bits, Bits]:
    """As `assign`, for one size band: objects outside do not count, and neither do unmatched detections outside."""
    true_bits, ignored_bits = assign(groups, pairs, groups.gt_crowd | outside(groups.gt_boxes, area_range))
    unmatched = ~(true_bits | ignored_bits) & np.uint16(0x03FF)
    ignored_bits |= np.where(outside(groups.det_boxes, area_range), unmatched, np.uint16(0))
    return true_bits, ignored_bits


def outside(boxes: Floats, area_range: tuple[float, float]) -> NDArray[np.bool_]:
    """Whether (n, 4) x, y, w, h boxes lie outside an area range."""
    area = boxes[:, 2] * boxes[:, 3]
    return (area < area_range[0]) | (area > area_range[1])
