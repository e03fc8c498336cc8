"""Gathers images and boxes in whatever order a source gives them, and puts them into columns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kfp_gate.data.annotations import Annotations, Bools, Floats, Ints
from kfp_gate.data.defects import Defect


@dataclass
class Collector:
    """What was read so far.

    Attributes:
        images: paths in the order of their arrival; the position is the image's row.
        defects, notes: findings of the reader.
    """

    images: list[str] = field(default_factory=list)
    defects: list[Defect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    _row: dict[str, int] = field(default_factory=dict)
    _files: list[str] = field(default_factory=list)
    _declared: list[tuple[int, int]] = field(default_factory=list)
    _fixed: list[int] = field(default_factory=list)
    _parts: list[tuple[Ints, Ints, Floats, Bools, Ints]] = field(default_factory=list)

    def image(self, path: str, file: str, width: int, height: int, split: int) -> int:
        """Row of an image. One that was there before is a defect, and keeps its row.

        Args:
            file: that states the image.
            width, height: as stated, 0 if unknown.
            split: code of the split the source puts it into.
        """
        if path in self._row:
            row = self._row[path]
            self.defects.append(Defect("image listed twice", file, 0, f"{path!r} is in {self._files[row]}", path))
            return row
        self._row[path] = row = len(self.images)
        self.images.append(path)
        self._files.append(file)
        self._declared.append((width, height))
        self._fixed.append(split)
        return row

    def pixel_boxes(
        self, owner: Ints, box_class: Ints, corners: Floats, crowd: Bools | Sequence[bool], lines: Ints
    ) -> None:
        """Add boxes in pixels.

        Args:
            owner: row of the image of each box, shape (m,).
            corners: x, y of the upper left corner, width, height, shape (m, 4).
            lines: line or annotation id, shape (m,).
        """
        sides = np.array(self._declared, np.float64).reshape(-1, 2)[owner]
        unknown = (sides <= 0).any(axis=1)
        sides[unknown] = 1.0
        boxes = np.concatenate([(corners[:, :2] + corners[:, 2:] / 2) / sides, corners[:, 2:] / sides], axis=1)
        # An unknown size is a defect of its own: its boxes are not to add one each.
        boxes[unknown] = (0.5, 0.5, 1.0, 1.0)
        self._parts.append((owner, box_class, boxes, np.asarray(crowd, bool), lines))

    def finish(self, listing: Mapping[str, int], classes: Sequence[str]) -> Annotations:
        """The columns: images sorted by path, each box behind its image."""
        order = sorted(range(len(self.images)), key=self.images.__getitem__)
        position = np.empty(len(order), np.int64)
        position[order] = np.arange(len(order))
        empty = (
            np.empty(0, np.int64),
            np.empty(0, np.int64),
            np.empty((0, 4)),
            np.empty(0, bool),
            np.empty(0, np.int64),
        )
        owner, box_class, boxes, crowd, lines = (np.concatenate(c) for c in zip(empty, *self._parts, strict=True))
        owner = position[owner]
        by_owner = np.argsort(owner, kind="stable")
        counts = np.bincount(owner, minlength=len(order))
        images = [self.images[i] for i in order]
        return Annotations(
            images=images,
            sizes=np.array([listing.get(image, 0) for image in images], np.int64),
            classes=tuple(classes),
            offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
            box_class=box_class[by_owner],
            boxes=boxes[by_owner],
            crowd=crowd[by_owner],
            lines=lines[by_owner],
            label_files=[self._files[i] for i in order],
            declared=np.array([self._declared[i] for i in order], np.int64).reshape(-1, 2),
            fixed=np.array([self._fixed[i] for i in order], np.int64),
            defects=tuple(self.defects),
            notes=tuple(self.notes),
        )
