"""Earlier manifests: what they assigned stays where it is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Bools, Ints
from kfp_gate.data.components import components
from kfp_gate.data.defects import Defect
from kfp_gate.data.manifest import read_manifest
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import open_store


@dataclass(frozen=True)
class Previous:
    """What an earlier split assigned: split code and group name, by content and by path."""

    by_sha256: dict[str, tuple[int, str]]
    by_image: dict[str, tuple[int, str]]


@dataclass(frozen=True)
class Pins:
    """Where the images of a grown dataset have to be.

    Attributes:
        splits: code of the split of each image, `NO_SPLIT` where it is free, shape (n,).
        bridges: True for an image that can be in no split, shape (n,).
        defects: one per bridge.
    """

    splits: Ints
    bridges: Bools
    defects: tuple[Defect, ...]


def read_previous(uri: str) -> Previous:
    """Read the manifests of an earlier split.

    Args:
        uri: folder or prefix with train, val and test, each with or without `.parquet`.

    Raises:
        InvalidInput: a manifest is missing or unusable.
    """
    store = open_store(uri)
    by_sha256: dict[str, tuple[int, str]] = {}
    by_image: dict[str, tuple[int, str]] = {}
    for code, split in enumerate(SPLITS):
        name = next((n for n in (f"{split}.parquet", split) if store.exists(n)), None)
        if name is None:
            raise InvalidInput(
                f"no manifest of {split}", expected=f"{split}.parquet or {split}", where=f"previous: {uri}",
                next_step="pass the folder that `kfp-gate split --out` wrote, or the prefix of the step's artifacts",
            )  # fmt: skip
        table = read_manifest(f"{store.uri}/{name}").table
        for image, sha256, group in zip(
            *(table.column(c).to_pylist() for c in ("image", "sha256", "group")), strict=True
        ):
            by_sha256[sha256] = by_image[image] = (code, group)
    return Previous(by_sha256, by_image)


def old_images(previous: Previous, images: Sequence[str], sha256: Sequence[str]) -> tuple[Ints, list[str]]:
    """Split code and group of each image that was assigned before: the same bytes, or else the same path."""
    found = [
        previous.by_sha256.get(digest) or previous.by_image.get(image) or (NO_SPLIT, "")
        for image, digest in zip(images, sha256, strict=True)
    ]
    return np.array([code for code, _ in found], np.int64), [group for _, group in found]


def pin(images: Sequence[str], splits: Ints, edges: tuple[Ints, Ints]) -> Pins:
    """Follow the edges from old images to new ones.

    New images that hang together go where the old images they touch are. Those that touch old images of two splits
    can be nowhere: they are bridges.

    Args:
        splits: from `old_images`.
        edges: pairs of images that may not be divided: every pair that a rule joins directly, with an old image in the
            middle of a star where there is one.

    Raises:
        InvalidInput: the rule joins old images that are in different splits.
    """
    a, b = edges
    old_a, old_b = splits[a] != NO_SPLIT, splits[b] != NO_SPLIT
    torn = np.flatnonzero(old_a & old_b & (splits[a] != splits[b]))
    if len(torn):
        raise InvalidInput(
            f"{len(torn)} pairs of images that the group rule joins are in different splits of the previous manifests",
            expected="a group rule that agrees with the earlier split", where="previous",
            next_step="use the rule of the earlier split, or split anew without `previous`",
            problems=[
                Problem(f"{images[i]} ({SPLITS[splits[i]]})", f"joined with {images[j]} ({SPLITS[splits[j]]})")
                for i, j in zip(a[torn].tolist(), b[torn].tolist(), strict=True)
            ],
        )  # fmt: skip
    both_new = ~old_a & ~old_b
    labels = components(len(images), a[both_new], b[both_new])
    new = np.concatenate([a[~old_a & old_b], b[old_a & ~old_b]])
    old = np.concatenate([b[~old_a & old_b], a[old_a & ~old_b]])
    touched = np.zeros(len(images), np.int64)
    np.bitwise_or.at(touched, labels[new], 1 << splits[old])
    touched = np.where(splits == NO_SPLIT, touched[labels], 0)
    bridges = np.bitwise_count(touched) > 1
    one = np.bitwise_count(touched) == 1
    pinned = np.where(one, np.log2(np.maximum(touched, 1)).astype(np.int64), splits)
    example = {(int(label), int(splits[o])): int(o) for label, o in zip(labels[new], old, strict=True)}
    defects = tuple(
        Defect("bridge", images[i], 0, _explain(images, example, int(labels[i])), images[i], "dropped")
        for i in np.flatnonzero(bridges).tolist()
    )
    return Pins(pinned, bridges, defects)


def _explain(images: Sequence[str], example: dict[tuple[int, int], int], label: int) -> str:
    ends = [f"{images[example[label, s]]} ({SPLITS[s]})" for s in range(3) if (label, s) in example]
    return f"belongs with {' and with '.join(ends)}"
