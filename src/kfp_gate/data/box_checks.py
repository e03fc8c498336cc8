"""Checks of all boxes at once: classes, borders, areas, duplicates."""

from dataclasses import replace

import numpy as np

from kfp_gate.data.annotations import Annotations, Bools, Floats
from kfp_gate.data.defects import Defect

EDGE_TOLERANCE = 0.001
"""How far an edge may lie outside the image, as a share of it: writers round to four to six digits, and half a pixel
at 640 is 0.0008. Within it a box is taken as written."""


def check_boxes(annotations: Annotations, *, fix: bool) -> Annotations:
    """Find bad boxes; with `fix`, mend those that have an exact cure.

    Every range check is written so that NaN fails it.

    Returns:
        The annotations with the findings added to `defects`. Boxes that were clipped or found twice are mended if
        `fix`; the others are still there: their images have to leave.
    """
    a = annotations
    known: Bools = (a.box_class >= 0) & (a.box_class < len(a.classes))
    size = a.boxes[:, 2:]
    area: Bools = np.all(size > 0, axis=1)
    low, high = a.boxes[:, :2] - size / 2, a.boxes[:, :2] + size / 2
    middle = a.boxes[:, :2]
    within = (middle >= 0) & (middle <= 1) & (size <= 1) & (low >= -EDGE_TOLERANCE) & (high <= 1 + EDGE_TOLERANCE)
    inside: Bools = np.all(within, axis=1)
    clipped = _clip(low, high)
    # Exact: the part inside the image is what the label means. Nothing inside, or a size that is no size: no cure.
    curable: Bools = known & area & ~inside & (clipped[:, 2:] > 0).all(axis=1) & np.isfinite(a.boxes).all(axis=1)
    twice = _repeated(a) & known & area & inside
    action = {True: "clipped to the border", False: "refused"}

    found: list[Defect] = []
    owner = a.owner
    for b in np.flatnonzero(~known | ~area | ~inside | twice).tolist():
        i = int(owner[b])
        box = " ".join(f"{v:.6g}" for v in a.boxes[b].tolist())
        if not known[b]:
            text, kind = f"class {a.box_class[b]} with {len(a.classes)} names", "unknown class"
            found.append(_defect(a, i, b, kind, text, "refused"))
        if not area[b]:
            found.append(_defect(a, i, b, "zero area", f"width and height {box.split(' ', 2)[2]}", "refused"))
        elif not inside[b]:
            edges = " ".join(f"{v:.4g}" for v in (*low[b].tolist(), *high[b].tolist()))
            text = f"box {box} spans {edges}"
            found.append(_defect(a, i, b, "out of range", text, action[bool(fix and curable[b])]))
        if twice[b]:
            text = f"class {a.box_class[b]}, box {box} again"
            found.append(_defect(a, i, b, "duplicate box", text, "kept once" if fix else "refused"))
    result = replace(a, defects=a.defects + tuple(found))
    if not fix:
        return result
    mended = a.boxes.copy()
    mended[curable] = clipped[curable]
    return replace(result, boxes=mended).keep_boxes(~twice)


def _defect(a: Annotations, image: int, box: int, kind: str, found: str, action: str) -> Defect:
    return Defect(kind, a.label_files[image], int(a.lines[box]), found, a.images[image], action)


def _clip(low: Floats, high: Floats) -> Floats:
    low, high = np.clip(low, 0, 1), np.clip(high, 0, 1)
    return np.concatenate([(low + high) / 2, high - low], axis=1)


def _repeated(a: Annotations) -> Bools:
    """True for each box that equals an earlier one of the same image in class, place and crowd flag.

    Boxes of equal fingerprint are few; only they are compared in full, which spares sorting all columns.
    """
    repeated = np.zeros(len(a.boxes), bool)
    owner = a.owner
    mark = owner.astype(np.uint64)
    for column in (a.box_class, a.crowd.astype(np.int64), *(a.boxes + 0.0).T):  # + 0.0: -0.0 is 0.0
        mark = (mark ^ np.ascontiguousarray(column).view(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mark ^= mark >> np.uint64(29)
    order = np.argsort(mark, kind="stable")  # stable, so that of equal boxes the first written is kept
    same = mark[order][1:] == mark[order][:-1]
    alike = order[np.concatenate([same, [False]]) | np.concatenate([[False], same])] if len(order) else order
    alike.sort()
    keys = np.column_stack([owner, a.box_class, a.crowd, a.boxes])[alike] if len(alike) else np.empty((0, 7))
    order = np.lexsort(keys.T[::-1])
    equal = (keys[order][1:] == keys[order][:-1]).all(axis=1)
    repeated[alike[order[1:][equal]]] = True
    return repeated
