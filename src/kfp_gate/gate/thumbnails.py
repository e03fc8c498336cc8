"""The images on which the model did worst, small and inline, with their boxes."""

import base64
import io
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.images import exif_of
from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.evaluate import Evaluation

log = logging.getLogger(__name__)

SIDE = 420
"""Longer side of a thumbnail in pixels."""

MOST_BOXES = 60
"""Of one kind on one image: beyond it a thumbnail shows only ink."""


@dataclass(frozen=True)
class Box:
    """A box to draw: `kind` is missed, false or found; the text is its tooltip."""

    kind: str
    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class Thumbnail:
    """One image: its name, size in pixels, JPEG as a data URI, counts of mistakes, and boxes in image pixels."""

    name: str
    width: int
    height: int
    data: str
    missed: int
    false: int
    boxes: tuple[Box, ...]


def worst_images(
    evaluation: Evaluation, paths: Sequence[Path], *, confidence: float, most: int = 12
) -> list[Thumbnail]:
    """The images with the most missed objects and false detections at a confidence and IoU 0.50.

    Args:
        evaluation: with detail.
        paths: the file of every image, in the order of the manifest.
        most: how many. An image without a mistake is never among them, nor one that cannot be opened.
    """
    records = evaluation.records
    missed, false = mistakes(records, confidence)
    order = np.lexsort((np.arange(len(records)), -(missed + false)))
    found: list[Thumbnail] = []
    for at in order[: 2 * most]:
        if missed[at] + false[at] == 0 or len(found) == most:
            break
        index = int(records.images[at])
        if (data := _jpeg(paths[index])) is not None:
            width, height = (int(v) for v in records.sizes[at]) if records.sizes is not None else (0, 0)
            boxes = tuple(_boxes(evaluation, int(at), confidence))
            found.append(
                Thumbnail(evaluation.images[index], width, height, data, int(missed[at]), int(false[at]), boxes)
            )
    return found


def mistakes(records: Records, confidence: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Missed objects and false detections of each image, both (I,)."""
    sure = records.scores >= np.float32(confidence)
    right = (records.bits & 1).astype(bool)
    images = records.detection_images
    size = len(records)
    hits = np.bincount(images[sure & right], minlength=size)
    false = np.bincount(images[sure & ~right & ~records.ignored_at(0)], minlength=size)
    objects = np.bincount(records.truth_images[~records.crowd], minlength=size)
    # Never below zero: records hold which detections are right, not which object each one took.
    return np.maximum(objects - hits, 0), false


def _boxes(evaluation: Evaluation, at: int, confidence: float) -> list[Box]:
    records, names = evaluation.records, evaluation.classes
    assert records.boxes is not None and records.truth_boxes is not None
    begin, first = int(records.detection_counts[:at].sum()), int(records.truth_counts[:at].sum())
    rows = np.arange(begin, begin + int(records.detection_counts[at]))
    rows = rows[records.scores[rows] >= np.float32(confidence)]
    right = (records.bits[rows] & 1).astype(bool)
    drawn: list[Box] = []
    taken = [records.boxes[r].astype(float) for r in rows[right]]
    classes = [int(records.classes[r]) for r in rows[right]]
    missed = []
    for t in range(first, first + int(records.truth_counts[at])):
        if records.crowd[t]:
            continue
        box, kind = records.truth_boxes[t], int(records.truth_classes[t])
        if not _take(box, kind, taken, classes):
            missed.append(_box("missed", box, f"missed: {names[kind]}"))
    for word, chosen in (("found", rows[right]), ("false", rows[~right])):
        drawn += [
            _box(word, records.boxes[r], f"{word}: {names[records.classes[r]]} {records.scores[r]:.2f}")
            for r in chosen[:MOST_BOXES]
        ]
    return [*drawn, *missed[:MOST_BOXES]]


def _take(box: NDArray[np.float64], kind: int, taken: list[NDArray[np.float64]], classes: list[int]) -> bool:
    """Whether a right detection of the class overlaps the object by half; each serves one object."""
    best, at = 0.5, -1
    for i, (other, label) in enumerate(zip(taken, classes, strict=True)):
        sides = np.minimum(box[2:], other[2:]) - np.maximum(box[:2], other[:2])
        shared = float(np.prod(np.maximum(sides, 0)))
        union = float(np.prod(box[2:] - box[:2]) + np.prod(other[2:] - other[:2])) - shared
        if label == kind and union > 0 and shared / union >= best - 1e-6:
            best, at = shared / union, i
    if at >= 0:
        del taken[at], classes[at]
    return at >= 0


def _box(kind: str, box: NDArray[Any], text: str) -> Box:
    x, y, right, bottom = (float(v) for v in box)
    return Box(kind, x, y, max(right - x, 0.0), max(bottom - y, 0.0), text)


def _jpeg(path: Path) -> str | None:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as image:
            exif_of(image)  # turned as the boxes are
            image.draft("RGB", (2 * SIDE, 2 * SIDE))
            upright = ImageOps.exif_transpose(image).convert("RGB")
        upright.thumbnail((SIDE, SIDE))
        out = io.BytesIO()
        upright.save(out, "JPEG", quality=72)
    # What Pillow raises on files that it cannot read, or that are too large to be safe; and ImportError, since
    # ultralytics replaces Image.open by one that asks for a HEIF plugin then. A report does without the picture.
    except (OSError, ValueError, SyntaxError, ImportError, Image.DecompressionBombError) as error:
        log.warning("no thumbnail of %s: %s", path.name, type(error).__name__)
        return None
    return f"data:image/jpeg;base64,{base64.b64encode(out.getvalue()).decode()}"
