"""The upstream train set, timed by parts: open, read, decode, resize, labels, each transform, collate, other.

Nothing here draws a random number or changes a value: training is bit for bit what it is without. Everything is
pickled as any data set is, so loader processes may be forked or spawned (a spawned one calls `install` first).

    open                 finding and opening files: one look for a cached copy, one open, per image
    read                 their bytes
    decode               the rest of upstream's `imread`
    resize               the rest of its `load_image`
    labels               the rest of its `get_image_and_label`
    transform:<Class>    the transform alone, without the images that a mosaic loads and transforms inside of it
"""

import os
import pathlib
from typing import Any

from ultralytics.data import base
from ultralytics.data.augment import Compose
from ultralytics.data.dataset import YOLODataset
from ultralytics.utils import patches

from kfp_gate.observing.loading import OPEN, OTHER, PARTS, READ, TimedCollate, begin, count_bytes

DECODE, RESIZE, LABELS, TRANSFORM = "decode", "resize", "labels", "transform:"


def instrument(loader: Any) -> None:
    """Time what upstream's train loader does. Its iterator must not be made yet."""
    dataset = loader.dataset
    if type(dataset) is not YOLODataset:
        # Another data set than ours: its batches come without parts, which reads as unknown.
        return
    install()
    dataset.__class__ = TimedDataset
    dataset.npy_files = [_CachedPath(p) for p in dataset.npy_files]
    dataset.transforms = timed(dataset.transforms)
    loader.collate_fn = TimedCollate(loader.collate_fn)


def install() -> None:
    """Time upstream's reading of images, in this process; a second call changes nothing."""
    if not isinstance(patches.np, _Numpy):
        patches.np = _Numpy(patches.np)
        base.imread = _TimedRead(base.imread)


class TimedDataset(YOLODataset):  # type: ignore[misc]  # upstream has no types
    """Upstream's data set with parts; made of one by `instrument`."""

    def __getitems__(self, indexes: list[int]) -> list[dict[str, Any]]:
        begin()
        return [self[i] for i in indexes]

    def __getitem__(self, index: int) -> dict[str, Any]:
        with PARTS.during(OTHER):
            item: dict[str, Any] = super().__getitem__(index)
            return item

    def get_image_and_label(self, index: int) -> dict[str, Any]:
        with PARTS.during(LABELS):
            label: dict[str, Any] = super().get_image_and_label(index)
            return label

    def load_image(self, *arguments: Any, **more: Any) -> Any:
        with PARTS.during(RESIZE):
            return super().load_image(*arguments, **more)

    def build_transforms(self, hyp: Any = None) -> Any:
        """Also runs when mosaics end and upstream builds its transforms anew."""
        return timed(super().build_transforms(hyp))


class TimedTransform:
    """One transform, timed; its attributes are the transform's."""

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.part = TRANSFORM + getattr(transform, "__name__", type(transform).__name__)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        with PARTS.during(self.part):
            return self.transform(*arguments, **more)

    def __getattr__(self, name: str) -> Any:
        if name in ("transform", "part") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.transform, name)

    def __repr__(self) -> str:
        return repr(self.transform)


def timed(transform: Any) -> Any:
    """A transform, and those inside of it, with a timer around each."""
    if isinstance(transform, TimedTransform):
        return transform
    if isinstance(transform, Compose):
        transform.transforms = [timed(t) for t in transform.transforms]
        return transform
    inner = getattr(transform, "pre_transform", None)
    if inner is not None:
        transform.pre_transform = timed(inner)
    return TimedTransform(transform)


class _TimedRead:
    """Upstream's `imread`, timed."""

    def __init__(self, imread: Any) -> None:
        self.imread = imread

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        with PARTS.during(DECODE):
            return self.imread(*arguments, **more)


class _CachedPath(type(pathlib.Path())):  # type: ignore[misc]  # PosixPath or WindowsPath
    """Where upstream looks for a decoded copy of an image, at each load: one call to the file system."""

    __slots__ = ()

    def exists(self, **more: Any) -> bool:
        with PARTS.during(OPEN):
            return bool(super().exists(**more))


class _Numpy:
    """numpy as `ultralytics.utils.patches` sees it: files are opened and read in two steps."""

    def __init__(self, numpy: Any) -> None:
        self.numpy = numpy

    def __getattr__(self, name: str) -> Any:
        return getattr(self.numpy, name)

    def fromfile(self, file: Any, *arguments: Any, **more: Any) -> Any:
        if not isinstance(file, str | os.PathLike):
            return self.numpy.fromfile(file, *arguments, **more)
        with PARTS.during(OPEN):
            handle = open(file, "rb", buffering=0)  # noqa: PTH123, SIM115  # closed below; a Path per image costs
        with handle, PARTS.during(READ):
            found = self.numpy.fromfile(handle, *arguments, **more)
        count_bytes(found.nbytes)
        return found
