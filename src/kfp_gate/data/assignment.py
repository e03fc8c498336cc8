"""Which split a group goes to: by its hash alone, or by best fit where that cannot be."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Floats, Ints
from kfp_gate.errors import InvalidInput

Shares = tuple[float, float, float]
TRAIN, VAL, TEST = 0, 1, 2


def check_shares(shares: Sequence[float]) -> Shares:
    """Three shares above 0 that add up to 1 (within 1e-6).

    Raises:
        InvalidInput: anything else; NaN fails each check.
    """
    if len(shares) != 3 or not all(0 < s < 1 for s in shares) or not abs(sum(shares) - 1) <= 1e-6:
        raise InvalidInput(
            f"shares {', '.join(f'{n} {s:g}' for n, s in zip(SPLITS, shares, strict=False))}",
            expected="three numbers above 0 that add up to 1: training, choosing the checkpoint, and the gate each "
            "need images",
            where="train_share, val_share, test_share", next_step="correct the shares",
        )  # fmt: skip
    return (float(shares[0]), float(shares[1]), float(shares[2]))


def hash_positions(groups: Sequence[str], seed: int) -> Floats:
    """A number in [0, 1) for each group that depends on the group's name and the seed alone, shape (n,)."""
    salt = sha256(f"kfp-gate split {seed}\0".encode())
    values = bytearray()
    for group in groups:
        one = salt.copy()
        one.update(group.encode("utf-8", "surrogatepass"))
        values += one.digest()[:8]
    return np.frombuffer(bytes(values), ">u8").astype(np.float64) / 2.0**64


def by_hash(groups: Sequence[str], shares: Shares, seed: int) -> Ints:
    """Split of each group, shape (n,). Other groups have no influence.

    The test set takes the lowest positions, val the next: a larger share only adds groups to a set.
    """
    position = hash_positions(groups, seed)
    return np.where(position < shares[TEST], TEST, np.where(position < shares[TEST] + shares[VAL], VAL, TRAIN))


def best_fit(sizes: Ints, positions: Floats, shares: Shares, pinned: Ints) -> Ints:
    """Splits that come as near to the shares as a greedy choice can, with no split left empty if that is possible.

    The largest group chooses first (ties: by hash position) and goes where most images are lacking (ties: test, then
    val, so that the gate rests on more images). Depends on all groups: used where `by_hash` leaves a split empty.

    Args:
        sizes: images per group, shape (n,).
        positions: `hash_positions`, shape (n,).
        pinned: code of the split a group must stay in, `NO_SPLIT` if free, shape (n,).
    """
    result = pinned.copy()
    held = np.bincount(pinned[pinned != NO_SPLIT], weights=sizes[pinned != NO_SPLIT], minlength=3)
    free = np.flatnonzero(pinned == NO_SPLIT)
    order = free[np.lexsort((positions[free], -sizes[free]))].tolist()
    wanted = np.array(shares) * sizes.sum()
    for done, group in enumerate(order):
        lacking = wanted - held
        empty = held == 0
        if len(order) - done <= empty.sum():
            lacking = np.where(empty, lacking, -np.inf)
        choice = max((TEST, VAL, TRAIN), key=lambda s: round(float(lacking[s]), 9))
        result[group] = choice
        held[choice] += sizes[group]
    return result
