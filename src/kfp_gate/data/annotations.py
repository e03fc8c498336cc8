"""What a source says about its images, as flat columns: a million images fit in memory and no row is an object."""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.defects import Defect

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SPLITS = ("train", "val", "test")
"""The three splits, in the order of their codes 0, 1, 2."""

NO_SPLIT = -1


@dataclass(frozen=True)
class Annotations:
    """All images and boxes of a dataset as its source states them.

    Box `b` belongs to the image `i` with `offsets[i] <= b < offsets[i + 1]`.

    Attributes:
        images: paths relative to the dataset, with forward slashes, sorted; n of them.
        sizes: bytes of each image file, shape (n,).
        classes: class names; the index is the class.
        offsets: shape (n + 1,).
        box_class: class index of each box, shape (m,); out of range until checked.
        boxes: centre x, centre y, width, height as shares of the image, shape (m, 4).
        crowd: True for a box around a crowd (COCO `iscrowd`), which no detection is judged against, shape (m,).
        lines: where the box stands in its label file: a line from 1, or a COCO annotation id, shape (m,).
        label_files: per image the file that holds its boxes, "" if there is none.
        declared: width and height the source states, shape (n, 2); 0 where it states none.
        fixed: code of the split the source's own folders put the image into, `NO_SPLIT` if none, shape (n,).
        defects: what the reader could not take.
        notes: sentences a person should read.
    """

    images: list[str]
    sizes: Ints
    classes: tuple[str, ...]
    offsets: Ints
    box_class: Ints
    boxes: Floats
    crowd: Bools
    lines: Ints
    label_files: list[str]
    declared: Ints
    fixed: Ints
    defects: tuple[Defect, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.images)

    @property
    def owner(self) -> Ints:
        """Index of the image of each box, shape (m,)."""
        return np.repeat(np.arange(len(self.images)), np.diff(self.offsets))

    def keep_boxes(self, keep: Bools) -> "Annotations":
        """Only the boxes where `keep` (shape (m,)) is True."""
        kept = np.concatenate([[0], np.cumsum(keep)])
        return replace(
            self,
            offsets=kept[self.offsets],
            box_class=self.box_class[keep],
            boxes=self.boxes[keep],
            crowd=self.crowd[keep],
            lines=self.lines[keep],
        )

    def keep_images(self, keep: Bools) -> "Annotations":
        """Only the images where `keep` (shape (n,)) is True, with their boxes."""
        if keep.all():
            return self
        held = self.keep_boxes(keep[self.owner])
        counts = np.diff(self.offsets)[keep]
        rows = np.flatnonzero(keep).tolist()
        return replace(
            held,
            images=[self.images[i] for i in rows],
            sizes=self.sizes[keep],
            offsets=np.concatenate([[0], np.cumsum(counts)]),
            label_files=[self.label_files[i] for i in rows],
            declared=self.declared[keep],
            fixed=self.fixed[keep],
        )
