"""Proof that the test images are new to a model: by digest, by look, and by group.

The model folder holds fingerprints of every image that the weights were trained or selected on. A test image with the
same bytes, a perceptual hash within `NEAR` bits, or the same group is a leak: numbers from it say how well the model
remembers, not how well it sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken, InvalidInput, Problem
from kfp_gate.gate.verdict import Separation

if TYPE_CHECKING:
    import pyarrow as pa

NEAR = 4
"""Bits of 64 in which the perceptual hashes of near-duplicates may differ: the default of the group rule
`near-duplicates`, so that what it keeps together is what is looked for here."""

_EXAMPLES = 20
_PAIRS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Leak:
    """One test image that a model has seen, and how."""

    image: str
    how: str


def compare(test: "pa.Table", fingerprints: "pa.Table | None", *, near: int = NEAR) -> Separation:
    """Whether a test set is new to a model.

    Args:
        test: the manifest's table: `image`, `sha256`, `phash` (64-bit unsigned), `group`.
        fingerprints: `sha256`, `phash`, `group` of what the model was trained and selected on; None or without a row:
            not proven, since no model is trained on nothing.
        near: largest Hamming distance of two hashes that counts as a near-duplicate.
    """
    if fingerprints is None or not fingerprints.num_rows:
        return Separation("not proven")
    import pyarrow.compute as pc

    names = test["image"].to_pylist()
    same = pc.is_in(test["sha256"], fingerprints["sha256"]).to_numpy(zero_copy_only=False)
    alike = near_duplicates(_hashes(test), _hashes(fingerprints), near)
    # An empty group is no group.
    known = pc.filter(fingerprints["group"], pc.not_equal(fingerprints["group"], ""))
    grouped = pc.is_in(test["group"], known).to_numpy(zero_copy_only=False)
    found: list[str] = []
    for mask, how in (
        (same, "same image"),
        (alike & ~same, "near-duplicate"),
        (grouped & ~same & ~alike, "same group"),
    ):
        found += [f"{names[i]}: {how}" for i in np.flatnonzero(mask)[:_EXAMPLES]]
    shared = bool(same.any() or alike.any() or grouped.any())
    return Separation(
        "overlap" if shared else "proven", fingerprints.num_rows, int(same.sum()), int((alike & ~same).sum()),
        int(grouped.sum()), tuple(found[:_EXAMPLES]),
    )  # fmt: skip


def compare_splits(test: "pa.Table", others: "Sequence[pa.Table]", *, near: int = NEAR) -> Separation:
    """Whether a test set is new to whatever is trained and selected on these splits: known before any training.

    Args:
        test: the test manifest's table.
        others: the tables of train and val.
    """
    import pyarrow as pa

    return compare(test, pa.concat_tables([t.select(["sha256", "phash", "group"]) for t in others]), near=near)


def require(separation: Separation, *, allow_unproven: bool, where: str) -> None:
    """Stop a gate that could only measure memory.

    Raises:
        Broken: the test set overlaps with what the model has seen.
        InvalidInput: the model has no fingerprints and the caller did not allow that.
    """
    if separation.state == "overlap":
        counts = [
            f"{n} {what}"
            for n, what in (
                (separation.same_image, "with the same bytes"),
                (separation.near_duplicate, "near-duplicates"),
                (separation.same_group, "in the same group"),
            )
            if n
        ]
        raise Broken(
            f"the model has seen test images: {', '.join(counts)}",
            expected="a test set that shares no image, near-duplicate or group with training and selection",
            where=where, next_step="split again so that these stay together, for instance with "
            f"group_rule='auto+near-duplicates:{NEAR}', then train on that split",
            problems=[Problem(*text.rsplit(": ", 1)) for text in separation.examples],
        )  # fmt: skip
    if separation.state == "not proven" and not allow_unproven:
        raise InvalidInput(
            "a model without fingerprints", expected="fingerprints.parquet in the model folder, as training writes it",
            where=where,
            next_step="judge a model folder of launch_training, or set allow_unproven_separation: "
            "the verdict then says that separation is not proven",
        )  # fmt: skip


def near_duplicates(test: NDArray[np.uint64], seen: NDArray[np.uint64], near: int) -> NDArray[np.bool_]:
    """Which test hashes lie within `near` bits of a seen one; exact.

    The 64 bits are cut into `near + 1` bands: two hashes that differ in at most `near` bits agree in one band at least,
    so only hashes that share a band are compared. Not quadratic, unless the hashes are all alike.
    """
    wanted, back = np.unique(test, return_inverse=True)
    known = np.unique(seen)
    hit = np.isin(wanted, known)
    for shift, mask in _bands(near + 1):
        open_ = np.flatnonzero(~hit)
        keys = (known >> shift) & mask
        order = np.argsort(keys, kind="stable")
        keys, sorted_known = keys[order], known[order]
        band = (wanted[open_] >> shift) & mask
        start, stop = np.searchsorted(keys, band, "left"), np.searchsorted(keys, band, "right")
        sizes = stop - start
        # Chunks of test hashes whose pairs fit in memory; one hash alone may exceed it and is then its own chunk.
        chunk = np.cumsum(sizes) // _PAIRS_AT_ONCE
        for part in np.split(np.arange(len(open_)), np.flatnonzero(np.diff(chunk)) + 1):
            count = sizes[part]
            offsets = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
            left = np.repeat(part, count)
            right = sorted_known[np.repeat(start[part], count) + offsets]
            close = np.bitwise_count(wanted[open_[left]] ^ right) <= near
            hit[open_[left[close]]] = True
    result: NDArray[np.bool_] = hit[back]
    return result


def _bands(count: int) -> list[tuple[np.uint64, np.uint64]]:
    edges = np.linspace(0, 64, count + 1).astype(int)
    return [(np.uint64(a), np.uint64((1 << int(b - a)) - 1)) for a, b in pairwise(edges)]


def _hashes(table: "pa.Table") -> NDArray[np.uint64]:
    values: NDArray[np.uint64] = table["phash"].to_numpy().astype(np.uint64)
    return values
