"""From a model's raw output to its detections: threshold, non-maximum suppression, limit.

Upstream gives up after a time limit and returns nothing for the rest of the batch, with a warning only: a slow machine
lowers mAP. Here no image is ever cut short. One that exceeds the limit fails the evaluation by name.
"""

import time
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken

CANDIDATES = 30_000
"""Boxes of one image that enter suppression, best first; upstream's number."""

Found = tuple[NDArray[np.float64], NDArray[np.float32], NDArray[np.int32]]


def suppress(
    output: Any,
    *,
    ranked: bool,
    confidence_floor: float,
    nms_iou: float,
    max_detections: int,
    seconds: float,
    where: str,
) -> Found:
    """The detections of one image, best first.

    Args:
        output: a tensor; (4 + classes, anchors) with centre, width, height and class scores, each box under every
            class that reaches the floor; or, from a head that suppresses by itself, (n, 6) x1 y1 x2 y2 score class.
        ranked: which of the two.
        seconds: what suppression may take.
        where: the image, for messages.

    Returns:
        (n, 4) float64 x1 y1 x2 y2 in the square's pixels, (n,) float32 scores, (n,) int32 classes.

    Raises:
        Broken: an output that is not finite, or suppression took longer than `seconds`.
    """
    import torch

    # One sum instead of a mask: not finite if any value is not (a sum of finite values this small cannot overflow).
    if not torch.isfinite(output.sum(dtype=torch.float64)):
        raise Broken(
            "model outputs that are not finite (NaN or inf)", expected="finite boxes and scores", where=where,
            next_step="look for a diverged training; with half=True try half=False: float16 overflows at 65504",
        )  # fmt: skip
    if ranked:
        rows = output[output[:, 4] > confidence_floor].double().cpu()
        rows = rows[torch.sort(rows[:, 4], descending=True, stable=True).indices][:max_detections]
        return rows[:, :4].numpy(), rows[:, 4].float().numpy(), rows[:, 5].int().numpy()
    begin = time.monotonic()
    scores = output[4:].T
    anchor, kind = torch.where(scores > confidence_floor)
    score = scores[anchor, kind]
    if len(score) > CANDIDATES:
        best = torch.sort(score, descending=True, stable=True).indices[:CANDIDATES]
        anchor, kind, score = anchor[best], kind[best], score[best]
    # Double, so that setting the classes apart by an offset costs no digit of the boxes.
    raw = output[:4, anchor].T.double()
    half = raw[:, 2:] / 2
    boxes = torch.cat([raw[:, :2] - half, raw[:, :2] + half], 1)
    span = (boxes.max() - boxes.min() + 1.0) if len(boxes) else 0.0
    apart = boxes + (kind.double() * span)[:, None]
    keep = _nms()(apart, score.double(), nms_iou)[:max_detections]
    found = boxes[keep].cpu().numpy(), score[keep].float().cpu().numpy(), kind[keep].int().cpu().numpy()
    if (took := time.monotonic() - begin) > seconds:
        raise Broken(
            f"suppression of {len(score)} boxes took {took:.1f} s", expected=f"at most {seconds:g} s an image",
            where=where, next_step="raise confidence_floor, give the step more CPU, or raise nms_seconds",
        )  # fmt: skip
    return found


@cache
def _nms() -> Any:
    """Torchvision's operator without its Python package, which imports torch's compiler: four CPU seconds."""
    import torch

    spec = find_spec("torchvision")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for library in sorted(Path(folder).glob("_C*.so")):
            torch.ops.load_library(str(library))
            if hasattr(torch.ops.torchvision, "nms"):
                return torch.ops.torchvision.nms
    # A build that lays its library elsewhere.
    import torchvision

    return torchvision.ops.nms
