"""What makes a training slow: each is put in where the product calls the outside world, or where it would really sit.

A fault is applied once in the process of a rank, before the training; loader processes are forked from it.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Fault = Callable[[int], None]

BUMPS = 3


class TargetMaps:
    """A transform of one's own: a map with a bump at every box, made by a loop over its points, or by rows."""

    def __init__(self, *, loop: bool, grid: int) -> None:
        self.loop, self.grid = loop, grid

    def __call__(self, labels: dict[str, Any]) -> dict[str, Any]:
        centres = np.asarray(labels["instances"].bboxes, np.float64).reshape(-1, 4)[:, :2]
        labels["target_map"] = (self.by_points if self.loop else self.by_rows)(centres[:BUMPS] % 1.0)
        return labels

    def by_points(self, centres: np.ndarray) -> np.ndarray:
        found = np.zeros((self.grid, self.grid))
        for x, y in centres:
            for row in range(self.grid):
                for column in range(self.grid):
                    far = (column / self.grid - x) ** 2 + (row / self.grid - y) ** 2
                    found[row, column] = max(found[row, column], 2.718281828 ** (-far / 0.005))
        return found

    def by_rows(self, centres: np.ndarray) -> np.ndarray:
        at = np.arange(self.grid) / self.grid
        found = np.zeros((self.grid, self.grid))
        for x, y in centres:
            for row in range(self.grid):
                far = (at - x) ** 2 + (row / self.grid - y) ** 2
                found[row] = np.maximum(found[row], 2.718281828 ** (-far / 0.005))
        return found


class AskedElsewhere:
    """A transform that waits for an answer from outside this machine, such as a service that holds the attributes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, labels: dict[str, Any]) -> dict[str, Any]:
        time.sleep(self.seconds)
        return labels


class Panorama:
    """A transform that unpacks an image as large as it comes; the hundredth of a process is a giant."""

    def __init__(self, size: int) -> None:
        self.size, self.count = size, 0

    def __call__(self, labels: dict[str, Any]) -> dict[str, Any]:
        self.count += 1
        if self.count == 100:
            np.ones(self.size, np.uint8)
        return labels


def none(_rank: int) -> None:
    """A healthy run."""


def with_transform(made: Callable[[], Any]) -> Fault:
    """One more transform in the data set's own list, before the one that formats."""

    def fault(_rank: int) -> None:
        from ultralytics.data.dataset import YOLODataset

        original = YOLODataset.build_transforms

        def build(self: Any, hyp: Any = None) -> Any:
            transforms = original(self, hyp)
            if self.augment:
                transforms.insert(len(transforms.transforms) - 1, made())
            return transforms

        YOLODataset.build_transforms = build

    return fault


def a_mix_of_waits(_rank: int) -> None:
    """Each image waits a little in several places, and none of it is work: only more images at once would help."""
    import cv2

    decode = cv2.imdecode

    def slow_decode(*arguments: Any) -> Any:
        time.sleep(0.018)
        return decode(*arguments)

    cv2.imdecode = slow_decode
    with_transform(lambda: AskedElsewhere(0.018))(_rank)


def slow_reader(seconds: float) -> Fault:
    """Where no file system can be mounted: the wait of a slow read, in the call that reads."""

    def fault(_rank: int) -> None:
        read = np.fromfile

        def slow(*arguments: Any, **more: Any) -> Any:
            time.sleep(seconds)
            return read(*arguments, **more)

        np.fromfile = slow  # type: ignore[assignment]

    return fault


def rank_1_reads_slowly(rank: int) -> None:
    """A node whose disk is slower than the others'."""
    if rank == 1:
        slow_reader(0.2)(rank)


def slow_copy(_rank: int) -> None:
    """The copy of a batch to the device takes long, as from unpinned memory over a narrow bus."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    original = DetectionTrainer.preprocess_batch

    def preprocess(self: Any, batch: Any) -> Any:
        time.sleep(0.5)
        return original(self, batch)

    DetectionTrainer.preprocess_batch = preprocess


def rank_1_computes_slowly(rank: int) -> None:
    """A node whose processor is slower than the others'."""
    from ultralytics.nn.tasks import DetectionModel

    original = DetectionModel._predict_once

    def predict(self: Any, *arguments: Any, **more: Any) -> Any:
        if rank == 1 and self.training:
            time.sleep(0.5)
        return original(self, *arguments, **more)

    DetectionModel._predict_once = predict


def slow_disk(_rank: int) -> None:
    """The disk that takes the state of an epoch is slow."""
    from kfp_gate.training import state

    original = state.write_state

    def write(*arguments: Any, **more: Any) -> None:
        time.sleep(4.0)
        original(*arguments, **more)

    state.write_state = write


def slow_store(_rank: int) -> None:
    """The object store takes a checkpoint slowly; nothing else is slow."""
    from kfp_gate.storage import LocalStore

    original = LocalStore.upload

    def upload(self: Any, path: Any, key: str) -> None:
        if key.endswith("state.pt"):
            time.sleep(6.0)
        original(self, path, key)

    LocalStore.upload = upload


def slow_suppression(_rank: int) -> None:
    """Thousands of boxes of an untrained class go through suppression."""
    from kfp_gate.evaluation import predict

    original = predict.suppress

    def suppress(*arguments: Any, **more: Any) -> Any:
        time.sleep(0.05)
        return original(*arguments, **more)

    predict.suppress = suppress


def evaluator_keeps_its_predictions(_rank: int) -> None:
    """Every validation leaves what it made behind: 48 MiB of touched memory."""
    from kfp_gate.training.validation import Validation

    original, kept = Validation._records, []

    def records(self: Any, *arguments: Any) -> Any:
        found = original(self, *arguments)
        kept.append(np.ones(48 << 20, np.uint8))
        return found

    Validation._records = records


def annotations_in_a_list(_rank: int) -> None:
    """The data set holds its annotations as Python objects: some 300 MiB.

    Reading one counts a reference in it, so every page that a loader process reads becomes its own. An image reads a
    stretch of its own choice, so that copies grow for many epochs.
    """
    from ultralytics.data.dataset import YOLODataset

    build, get = YOLODataset.build_transforms, YOLODataset.__getitem__

    def build_transforms(self: Any, hyp: Any = None) -> Any:
        if self.augment and not hasattr(self, "annotations"):
            self.annotations = [(float(i), float(-i)) for i in range(3_000_000)]
        return build(self, hyp)

    def item(self: Any, index: int) -> Any:
        part = len(self.annotations) // len(self) // 8
        begin = int(np.random.default_rng().integers(len(self.annotations) - part))
        sum(a[0] for a in self.annotations[begin : begin + part])
        return get(self, index)

    YOLODataset.build_transforms, YOLODataset.__getitem__ = build_transforms, item


def only_first_epochs(count: int, fault: Fault) -> Fault:
    """The run is looked at after some of its epochs: its ranks are gone by then, without a word."""

    def both(rank: int) -> None:
        from kfp_gate.training.course import TrainingCourse

        original = TrainingCourse.epoch_begins

        def begins(self: Any, trainer: Any, epoch: int) -> None:
            if epoch > count:
                os._exit(0)
            original(self, trainer, epoch)

        TrainingCourse.epoch_begins = begins
        fault(rank)

    return both


def not_finite(_rank: int) -> None:
    """The last batch of epochs 2, 3 and 4 is not finite, twice each: the epoch is done again."""
    from kfp_gate.training.trainer import RankTrainer

    original, done = RankTrainer.preprocess_batch, {1: 0, 2: 0, 3: 0}

    def preprocess(self: Any, batch: Any) -> Any:
        result = original(self, batch)
        last = (self.batch_index + 1) % len(self.train_loader) == 0
        if last and done.get(self.epoch, 2) < 2:
            done[self.epoch] += 1
            result["img"] = result["img"] * float("nan")
        return result

    RankTrainer.preprocess_batch = preprocess
