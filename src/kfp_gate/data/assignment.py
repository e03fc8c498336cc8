"""Which split a group goes to by its hash alone, whatever other groups there are."""

from collections.abc import Sequence
from hashlib import sha256

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


def by_hash(positions: Floats, shares: Shares) -> Ints:
    """Split of each group from its position, shape (n,). Other groups have no influence.

    The test set takes the lowest positions, val the next: a larger test share takes groups over and gives none away.
    """
    return np.where(positions < shares[TEST], TEST, np.where(positions < shares[TEST] + shares[VAL], VAL, TRAIN))
