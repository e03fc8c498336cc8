"""Which split a group goes to by its hash alone, whatever other groups there are."""

from collections.abc import Sequence
from hashlib import sha256
from numbers import Real

import numpy as np

from kfp_gate.data.annotations import SPLITS, Floats, Ints
from kfp_gate.errors import InvalidInput

Shares = tuple[float, float, float]
TRAIN, VAL, TEST = 0, 1, 2


def check_shares(shares: Sequence[float]) -> Shares:
    """Three shares above 0 that add up to 1 (within 1e-6).

    Raises:
        InvalidInput: anything else; NaN fails each check.
    """
    listed = list(shares) if isinstance(shares, list | tuple) else [shares]
    numbers = [float(s) for s in listed if isinstance(s, Real) and not isinstance(s, bool)]
    if not len(listed) == len(numbers) == 3 or not all(0 < s < 1 for s in numbers) or not abs(sum(numbers) - 1) <= 1e-6:
        told = (f"{n} {s:g}" if isinstance(s, Real) else f"{n} {s!r}" for n, s in zip(SPLITS, listed, strict=False))
        raise InvalidInput(
            f"shares {', '.join(told)}",
            expected="three numbers above 0 that add up to 1: training, choosing the checkpoint, and the gate each "
            "need images",
            where="train_share, val_share, test_share", next_step="correct the shares",
        )  # fmt: skip
    return (numbers[0], numbers[1], numbers[2])


def hash_positions(groups: Sequence[str], seed: int) -> Floats:
    """A number in [0, 1) for each group that depends on the group's name and the seed alone, shape (n,)."""
    salt = sha256(f"kfp-gate split {seed}\0".encode())
    values = bytearray()
    for group in groups:
        one = salt.copy()
        one.update(group.encode("utf-8", "surrogatepass"))
        values += one.digest()[:8]
    return np.frombuffer(bytes(values), ">u8").astype(np.float64) / 2.0**64


def by_hash(positions: Floats, shares: Shares) -> Ints:
    """Split of each group from its position, shape (n,). Other groups have no influence.

    The test set takes the lowest positions, val the next: a larger test share takes groups over and gives none away.
    """
    return np.where(positions < shares[TEST], TEST, np.where(positions < shares[TEST] + shares[VAL], VAL, TRAIN))
