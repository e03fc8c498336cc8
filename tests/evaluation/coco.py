"""The reference: pycocotools on the same detections, and generated sets to compare on."""

import contextlib
import io
from dataclasses import dataclass

import numpy as np
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from kfp_gate.evaluation.records import Matcher, Records


@dataclass(frozen=True)
class Picture:
    """Detections and objects of one image; boxes are x1 y1 x2 y2."""

    boxes: np.ndarray
    scores: np.ndarray
    classes: np.ndarray
    truth_boxes: np.ndarray
    truth_classes: np.ndarray
    crowd: np.ndarray


def records_of(pictures: list[Picture], class_count: int, *, detail: bool = True) -> Records:
    matcher = Matcher(class_count, detail=detail)
    for i, p in enumerate(pictures):
        matcher.add(i, p.boxes, p.scores, p.classes, p.truth_boxes, p.truth_classes, crowd=p.crowd, size=(640, 640))
    return matcher.finish()


def coco_precision(pictures: list[Picture], class_count: int) -> np.ndarray:
    """pycocotools' (T, R, K, A) precision at 100 detections; -1 where there is no object."""
    truth, found, number = [], [], 1
    for i, p in enumerate(pictures):
        for (x1, y1, x2, y2), c, crowd in zip(p.truth_boxes, p.truth_classes, p.crowd, strict=True):
            w, h = x2 - x1, y2 - y1
            truth.append({
                "id": number, "image_id": i, "category_id": int(c), "bbox": [x1, y1, w, h], "area": w * h,
                "iscrowd": int(crowd),
            })  # fmt: skip
            number += 1
        for (x1, y1, x2, y2), s, c in zip(p.boxes, p.scores, p.classes, strict=True):
            found.append({
                "image_id": i, "category_id": int(c), "bbox": [x1, y1, x2 - x1, y2 - y1], "score": float(s)
            })  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        gt = COCO()
        gt.dataset = {
            "images": [{"id": i, "width": 640, "height": 640} for i in range(len(pictures))],
            "annotations": truth, "categories": [{"id": k, "name": str(k)} for k in range(class_count)], "info": {},
        }  # fmt: skip
        gt.createIndex()
        if found:
            dt = gt.loadRes(found)
        else:  # loadRes refuses an empty list
            dt = COCO()
            dt.dataset = {**gt.dataset, "annotations": []}
            dt.createIndex()
        evaluation = COCOeval(gt, dt, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval["precision"][..., -1]


def generate(
    rng: np.random.Generator,
    *,
    images: int = 12,
    classes: int = 4,
    objects: int = 8,
    detections: int = 30,
    crowds: float = 0.0,
    score_levels: int = 0,
    grid: bool = False,
    duplicates: bool = False,
) -> list[Picture]:
    """Noisy detections around generated objects.

    `score_levels` makes equal scores, `grid` equal overlaps (whole pixels), `crowds` is the share of crowd regions.
    """
    pictures = []
    for _ in range(images):
        n = int(rng.integers(0, objects + 1))
        corner = rng.uniform(0, 400, (n, 2))
        truth = np.concatenate([corner, corner + rng.uniform(4, 220, (n, 2))], 1)
        truth_classes = rng.integers(0, max(classes - 1, 1), n)  # the last class has no object
        m = int(rng.integers(0, detections + 1))
        if n:
            source = rng.integers(0, n, m)
            boxes = truth[source] + rng.normal(0, 6, (m, 4))
            kinds = np.where(rng.random(m) < 0.8, truth_classes[source], rng.integers(0, classes, m))
        else:
            corner = rng.uniform(0, 400, (m, 2))
            boxes, kinds = np.concatenate([corner, corner + 50], 1), rng.integers(0, classes, m)
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2])
        scores = rng.random(m).astype(np.float32)
        if grid:
            boxes, truth = np.round(boxes / 8) * 8, np.round(truth / 8) * 8
        if score_levels:
            scores = (np.round(scores * score_levels) / score_levels).astype(np.float32)
        if duplicates and m:
            boxes, scores, kinds = (np.concatenate([a, a[: m // 2]]) for a in (boxes, scores, kinds))
        pictures.append(Picture(boxes, scores, kinds, truth, truth_classes, rng.random(n) < crowds))
    return pictures
