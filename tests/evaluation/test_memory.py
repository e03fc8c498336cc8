"""Evaluating again and again in one process keeps nothing but the result."""

import gc
import os
from pathlib import Path

import numpy as np
import pytest

from kfp_gate.evaluation.evaluate import evaluate
from kfp_gate.evaluation.metrics import compute
from kfp_gate.evaluation.predict import Detector, PredictSettings
from kfp_gate.evaluation.records import Matcher

from .conftest import CLASSES, SIZE, Scene, tiny_module


def resident() -> float:
    """MB of memory held now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.all_only
def test_twenty_evaluations_in_one_process(scene: Scene) -> None:
    """As training does: the same module each epoch, a new detector from it."""
    module = tiny_module()
    settings = PredictSettings(image_size=SIZE, device="cpu")
    held = []
    for _ in range(20):
        found = evaluate(Detector.from_module(module, CLASSES), scene.manifest, scene.images, settings)
        assert found.metrics["map50"] is not None
        del found
        held.append(resident())
    # The allocator settles in the first rounds; afterwards 15 more epochs add less than one detector's weights.
    assert held[-1] - held[4] < 6, held


def test_records_are_all_that_grows() -> None:
    """Ten times the images, ten times the records, and no working memory more."""
    import tracemalloc

    def peak(images: int) -> tuple[int, int]:
        rng = np.random.default_rng(0)
        tracemalloc.start()
        matcher = Matcher(8)
        for i in range(images):
            boxes = rng.uniform(0, 600, (300, 4))
            boxes[:, 2:] = boxes[:, :2] + 30
            matcher.add(i, boxes, rng.random(300), rng.integers(0, 8, 300), boxes[:10], rng.integers(0, 8, 10))
        records = matcher.finish()
        compute(records, list("abcdefgh"))
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most, len(records.scores)

    small, few = peak(200)
    large, many = peak(2000)
    # 8 bytes of records, 4 of rows sorted by class, 4 of image numbers, and the work on one class in eight.
    assert (large - small) / (many - few) < 26
