"""What an evaluation keeps of predictions: flat columns, never images, masks or pickled objects.

Per detection eight bytes: score (float32), class (int16) and a bit field (uint16). The image follows from the
count of detections per image. Per object three bytes, per image twelve. With `detail=True` the columns that a stored
evaluation needs are added: boxes, size bands, image sizes. Imports neither torch nor ultralytics.

Legend: I images, D detections, G objects.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken, InvalidInput

TRUE = 0x03FF
"""Bits 0 to 9: true positive at IoU 0.50, 0.55, ... 0.95."""
BEYOND_LIMIT = 1 << 10
"""Not among the 100 best of its image and class."""
DEGENERATE, OUTSIDE, DUPLICATE, ABSURD = 1 << 11, 1 << 12, 1 << 13, 1 << 14
"""Bits of an abnormal box; ABSURD only if a box reference was given."""

ABNORMAL = DEGENERATE | OUTSIDE | DUPLICATE | ABSURD

CROWD = 1
"""Bit 0 of `truth_flags`; bits 1, 2 and 3: small, medium, large. COCO's bands share their ends, so one object may
have two."""


@dataclass(frozen=True)
class Records:
    """Flat columns, sorted by image; within an image by falling score, equal scores in the order of the model.

    The first eight are always there; the others are None unless the evaluation asked for them.
    """

    images: NDArray[np.int32]  # (I,) index in the manifest, ascending
    detection_counts: NDArray[np.int32]  # (I,)
    truth_counts: NDArray[np.int32]  # (I,) crowds included
    scores: NDArray[np.float32]  # (D,)
    classes: NDArray[np.int16]  # (D,)
    bits: NDArray[np.uint16]  # (D,) see TRUE ... ABSURD
    truth_classes: NDArray[np.int16]  # (G,)
    truth_flags: NDArray[np.uint8]  # (G,) see CROWD
    ignored: NDArray[np.uint16] | None = None  # (D,) matched to a crowd, per threshold; None: there is no crowd
    band_true: NDArray[np.uint16] | None = None  # (D, 3) true positives within small, medium, large
    band_ignored: NDArray[np.uint16] | None = None  # (D, 3) neither right nor wrong within the band
    boxes: NDArray[np.float32] | None = None  # (D, 4) x1 y1 x2 y2, pixels of the original image
    overlaps: NDArray[np.float32] | None = None  # (D,) largest overlap with an object of the same class
    truth_boxes: NDArray[np.float64] | None = None  # (G, 4)
    sizes: NDArray[np.int32] | None = None  # (I, 2) width, height

    def __len__(self) -> int:
        """The number of images."""
        return len(self.images)

    @property
    def detection_images(self) -> NDArray[np.int64]:
        """(D,) position of each detection's image in `images`."""
        return np.repeat(np.arange(len(self.images)), self.detection_counts)

    @property
    def truth_images(self) -> NDArray[np.int64]:
        """(G,) position of each object's image in `images`."""
        return np.repeat(np.arange(len(self.images)), self.truth_counts)

    def truth_in_band(self, band: int) -> NDArray[np.bool_]:
        """(G,) objects of size band 0 small, 1 medium, 2 large."""
        return ((self.truth_flags >> np.uint8(band + 1)) & 1).astype(bool)

    @property
    def crowd(self) -> NDArray[np.bool_]:
        """(G,)"""
        return (self.truth_flags & CROWD).astype(bool)

    def ignored_at(self, bit: int) -> NDArray[np.bool_]:
        """(D,) detections that fell on a crowd at one threshold."""
        if self.ignored is None:
            return np.zeros(len(self.scores), bool)
        return ((self.ignored >> np.uint16(bit)) & 1).astype(bool)

    def select(self, keep: NDArray[np.bool_]) -> "Records":
        """The records of some images; `keep` is (I,)."""
        by = {
            "image": keep, "detection": np.repeat(keep, self.detection_counts),
            "truth": np.repeat(keep, self.truth_counts),
        }  # fmt: skip
        return replace(self, **{n: v[by[_AXIS[n]]] for n, v in columns(self).items()})


_AXIS = {
    "images": "image", "detection_counts": "image", "truth_counts": "image", "sizes": "image",
    "truth_classes": "truth", "truth_flags": "truth", "truth_boxes": "truth",
    **dict.fromkeys(
        ("scores", "classes", "bits", "ignored", "band_true", "band_ignored", "boxes", "overlaps"), "detection"
    ),
}  # fmt: skip

LAYOUT: dict[str, tuple[type[np.generic], int]] = {
    "images": (np.int32, 1), "detection_counts": (np.int32, 1), "truth_counts": (np.int32, 1),
    "scores": (np.float32, 1), "classes": (np.int16, 1), "bits": (np.uint16, 1),
    "truth_classes": (np.int16, 1), "truth_flags": (np.uint8, 1), "ignored": (np.uint16, 1),
    "band_true": (np.uint16, 3), "band_ignored": (np.uint16, 3), "boxes": (np.float32, 4),
    "overlaps": (np.float32, 1), "truth_boxes": (np.float64, 4), "sizes": (np.int32, 2),
}  # fmt: skip
"""Type and width of every column: the wire format of gathering and storing."""


def columns(records: Records) -> dict[str, NDArray[Any]]:
    """The columns that are present, by name."""
    found = {f.name: getattr(records, f.name) for f in fields(records)}
    return {n: v for n, v in found.items() if v is not None}


def from_columns(found: dict[str, NDArray[Any]], *, where: str = "records") -> Records:
    """Build records from untrusted columns.

    Raises:
        InvalidInput: a column is missing or unknown, or has another type or length than the layout says.
    """
    needed = [f.name for f in fields(Records)][:8]
    problem = ""
    if unknown := sorted(set(found) - set(LAYOUT)) or [n for n in needed if n not in found]:
        problem = f"columns {sorted(found)}; unknown or missing: {unknown}"
    else:
        sizes = {
            "image": len(found["images"]), "detection": int(found["detection_counts"].sum()),
            "truth": int(found["truth_counts"].sum()),
        }  # fmt: skip
        for name, value in found.items():
            kind, width = LAYOUT[name]
            if name.endswith("_counts") and value.dtype == kind and (value < 0).any():
                problem = f"column {name!r} counts below 0"
            shape = (sizes[_AXIS[name]],) if width == 1 else (sizes[_AXIS[name]], width)
            if value.dtype != kind or value.shape != shape:
                problem = f"column {name!r} is {value.dtype}{value.shape}, not {np.dtype(kind)}{shape}"
    if problem:
        raise InvalidInput(
            problem, expected="the columns of evaluation records", where=where,
            next_step="evaluate the model again with this version",
        )  # fmt: skip
    return Records(**found)


def empty() -> Records:
    """Records of no image, for a rank without a shard."""
    return Records(**{n: np.zeros(0, LAYOUT[n][0]) for n in [f.name for f in fields(Records)][:8]})


def concat(parts: Sequence[Records]) -> Records:
    """One set of records from several, sorted by image; whatever the order of parts, the result is the same.

    Raises:
        Broken: an image occurs twice, or some parts have detail and others not.
    """
    return join([columns(p) for p in parts])


def join(parts: list[dict[str, NDArray[Any]]]) -> Records:
    """As `concat`, of columns; each column of the parts is let go as soon as it is joined."""
    parts = [p for p in parts if len(p["images"])]
    if not parts:
        return empty()
    names = {n for p in parts for n in p}
    sizes = [len(p["scores"]) for p in parts]
    for name in names - {"ignored"}:
        if any(name not in p for p in parts):
            raise Broken(
                f"column {name!r} in some parts only", expected="parts of one evaluation", where="concat",
                next_step="evaluate every shard with the same `detail`",
            )  # fmt: skip
    joined: dict[str, NDArray[Any]] = {}
    for name in [n for n in LAYOUT if n in names]:
        # Only parts with a crowd carry `ignored`.
        pieces = [p.pop(name) if name in p else np.zeros(s, np.uint16) for p, s in zip(parts, sizes, strict=True)]
        joined[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        del pieces
    images = joined["images"]
    if (np.diff(images) > 0).all():
        return Records(**joined)
    order = np.argsort(images, kind="stable")
    if (np.diff(images[order]) == 0).any():
        twice = images[order][1:][np.diff(images[order]) == 0]
        raise Broken(
            f"image {int(twice[0])} occurs twice", expected="every image once", where="concat of evaluation records",
            next_step="check that the shards of the ranks are disjoint",
        )  # fmt: skip
    index = {
        "image": order, "detection": _spread(joined["detection_counts"], order),
        "truth": _spread(joined["truth_counts"], order),
    }  # fmt: skip
    return Records(**{n: v[index[_AXIS[n]]] for n, v in joined.items()})


def best_first(scores: NDArray[np.float32]) -> NDArray[np.int64]:
    """(n,) the order by falling score, equal scores as they come.

    Scores and positions make one 64-bit key each. Sorting those is three times as fast as a stable sort of floats.
    """
    bits = (scores + np.float32(0)).view(np.uint32)  # adding 0 makes -0.0 equal to 0.0
    # Floats order like integers but for the sign: flip all bits of the negative ones, the sign bit of the others.
    falling = np.where(bits >> np.uint32(31), bits, bits ^ np.uint32(0x7FFFFFFF))
    keys = (falling.astype(np.uint64) << np.uint64(32)) | np.arange(len(scores), dtype=np.uint64)
    keys.sort()
    order: NDArray[np.int64] = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return order


def _spread(counts: NDArray[np.int32], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Row indices that bring segments of the given lengths into a new order."""
    starts = np.cumsum(counts, dtype=np.int64) - counts
    wanted = counts[order].astype(np.int64)
    begin = np.cumsum(wanted) - wanted
    index: NDArray[np.int64] = np.arange(wanted.sum()) + np.repeat(starts[order] - begin, wanted)
    return index
