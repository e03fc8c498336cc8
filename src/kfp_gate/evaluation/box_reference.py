"""Which box shapes a class has in the training set, to tell a box that is absurd for it.

A detector for traffic cones that reports one as wide as the road, or of four pixels where the smallest it has seen had
forty, is wrong in a way that no overlap shows. The range of each class is widened before anything is called absurd.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kfp_gate.errors import InvalidInput

AREA_MARGIN = 4.0
"""Absurd is below a quarter of the smallest area of the class, or above four times the largest."""

ASPECT_MARGIN = 2.0
"""And half the least, or twice the greatest ratio of width to height."""

ENOUGH = 10
"""A class with fewer boxes is measured by the range of all classes."""


@dataclass(frozen=True)
class BoxReference:
    """Ranges of a data set, by class.

    Attributes:
        area: (K, 2) least and greatest share of the image's area.
        aspect: (K, 2) least and greatest width / height, in pixels.
        counts: (K,) boxes behind them.
    """

    area: NDArray[np.float64]
    aspect: NDArray[np.float64]
    counts: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Iterable[Any], class_count: int) -> "BoxReference":
        """The ranges of manifest rows; crowds are left out.

        Raises:
            InvalidInput: no box at all.
        """
        area = np.tile([np.inf, 0.0], (class_count + 1, 1))
        aspect = area.copy()
        counts = np.zeros(class_count + 1, np.int64)
        for row in rows:
            boxes = row.boxes[~row.crowd]
            boxes = boxes[(boxes[:, 3:5] > 0).all(axis=1)]
            share = boxes[:, 3] * boxes[:, 4]
            ratio = boxes[:, 3] * row.width / (boxes[:, 4] * row.height)
            for kinds in (boxes[:, 0].astype(np.int64), np.full(len(boxes), class_count)):
                for table, values in ((area, share), (aspect, ratio)):
                    np.minimum.at(table[:, 0], kinds, values)
                    np.maximum.at(table[:, 1], kinds, values)
                np.add.at(counts, kinds, 1)
        if not counts[-1]:
            raise InvalidInput(
                "a data set without boxes", expected="at least one", where="box reference",
                next_step="give the manifest of the training set",
            )  # fmt: skip
        few = counts[:-1] < ENOUGH
        area[:-1][few], aspect[:-1][few] = area[-1], aspect[-1]
        return cls(area[:-1], aspect[:-1], counts[:-1])

    def reordered(self, classes: Sequence[str], wanted: Sequence[str]) -> "BoxReference | None":
        """The same ranges by the index of `wanted`, from those by the index of `classes`; None if one is missing."""
        if not set(wanted) <= set(classes):
            return None
        index = [list(classes).index(name) for name in wanted]
        return BoxReference(self.area[index], self.aspect[index], self.counts[index])

    def absurd(self, boxes: ArrayLike, classes: NDArray[np.int64], width: int, height: int) -> NDArray[np.bool_]:
        """(n,) whether (n, 4) x1 y1 x2 y2 boxes of these classes are absurd in an image of this size."""
        sides = np.asarray(boxes, np.float64).reshape(-1, 4)
        sides = np.maximum(sides[:, 2:] - sides[:, :2], 1e-9)
        share = sides.prod(axis=1) / (width * height)
        ratio = sides[:, 0] / sides[:, 1]
        area, aspect = self.area[classes], self.aspect[classes]
        found: NDArray[np.bool_] = (
            (share < area[:, 0] / AREA_MARGIN) | (share > area[:, 1] * AREA_MARGIN)
            | (ratio < aspect[:, 0] / ASPECT_MARGIN) | (ratio > aspect[:, 1] * ASPECT_MARGIN)
        )  # fmt: skip
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain lists, for a model card."""
        return {"area": self.area.tolist(), "aspect": self.aspect.tolist(), "counts": self.counts.tolist()}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> "BoxReference":
        """What `to_json` gave.

        Raises:
            InvalidInput: it is something else.
        """
        try:
            area, aspect = (np.array(found[n], np.float64).reshape(-1, 2) for n in ("area", "aspect"))
            reference = cls(area, aspect, np.array(found["counts"], np.int64))
            if not len(area) == len(aspect) == len(reference.counts):
                raise ValueError("lengths differ")
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(
                f"no box reference ({type(error).__name__}: {error})", expected="area, aspect and counts by class",
                where="box reference", next_step="make it again from the training manifest",
            ) from error  # fmt: skip
        return reference
