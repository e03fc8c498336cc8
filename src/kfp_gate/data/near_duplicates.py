"""All pairs of 64-bit hashes within a Hamming distance: exact, and far from quadratic.

By the pigeonhole principle two hashes that differ in at most d bits are equal in at least one of d + 1 disjoint
pieces (multi-index hashing, Norouzi et al. 2012). So only hashes that share a piece are compared; where many share
one, their remaining bits are cut into pieces again.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.annotations import Ints
from kfp_gate.data.components import components

Hashes = NDArray[np.uint64]

_CROWDED = 192
"""A bucket with more members is divided again instead of compared pair by pair."""


def near_pairs(hashes: Hashes, distance: int) -> tuple[Ints, Ints]:
    """Indexes of all pairs of *distinct* hashes that differ in at most `distance` bits, each pair once, a < b.

    Args:
        hashes: distinct 64-bit values, shape (n,).
        distance: bits, 0 or more.
    """
    found = [pair for pair in _pairs(hashes, np.arange(len(hashes)), np.arange(64), distance) if len(pair[0])]
    if not found:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    a, b = np.concatenate([p[0] for p in found]), np.concatenate([p[1] for p in found])
    keys = np.unique(np.minimum(a, b) * len(hashes) + np.maximum(a, b))
    return keys // len(hashes), keys % len(hashes)


def near_duplicate_clusters(hashes: Hashes, distance: int) -> Ints:
    """Cluster of each image: images are joined if a chain of near-duplicates links them. Shape (n,)."""
    distinct, codes = np.unique(hashes, return_inverse=True)
    a, b = near_pairs(distinct, distance)
    return np.asarray(components(len(distinct), a, b)[codes])


def pairs_across(hashes: Hashes, sides: Ints, distance: int) -> tuple[Ints, Ints]:
    """Pairs of images within `distance` that lie on different sides, at most one per pair of distinct hashes and sides.

    Args:
        hashes: shape (n,); equal values are allowed.
        sides: for instance the split of each image, shape (n,).

    Returns:
        Indexes of the first image of each side that holds the hash, shape (pairs,) each.
    """
    if not len(hashes):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    distinct, codes = np.unique(hashes, return_inverse=True)
    _, first = np.unique(codes * (int(sides.max()) + 1) + sides, return_index=True)
    code_of, side_of = codes[first], sides[first]
    starts = np.searchsorted(code_of, np.arange(len(distinct) + 1))
    a, b = near_pairs(distinct, distance)
    own = np.arange(len(distinct))
    left: list[Ints] = []
    right: list[Ints] = []
    counts = np.diff(starts)
    for p, q, equal in ((a, b, False), (own, own, True)):
        for i in range(int(counts.max())):
            for j in range(i + 1 if equal else 0, int(counts.max())):
                held = (i < counts[p]) & (j < counts[q])
                x, y = starts[p[held]] + i, starts[q[held]] + j
                apart = side_of[x] != side_of[y]
                left.append(first[x[apart]])
                right.append(first[y[apart]])
    return np.concatenate(left), np.concatenate(right)


def _pairs(hashes: Hashes, members: Ints, bits: Ints, distance: int) -> Iterator[tuple[Ints, Ints]]:
    """Pairs among `members`, which agree on all positions that are not in `bits`."""
    if len(members) <= _CROWDED or len(bits) <= distance + 1:
        a, b = np.triu_indices(len(members), 1)
        yield _close(hashes, members[a], members[b], distance)
        return
    for piece in np.array_split(bits, distance + 1):
        mask = np.uint64(sum(1 << int(p) for p in piece))
        keys = hashes[members] & mask
        order = np.argsort(keys, kind="stable")
        ordered, keys = members[order], keys[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
        counts = np.diff(np.concatenate([starts, [len(keys)]]))
        left = np.setdiff1d(bits, piece)
        for s, c in zip(starts[counts > _CROWDED].tolist(), counts[counts > _CROWDED].tolist(), strict=True):
            yield from _pairs(hashes, ordered[s : s + c], left, distance)
        # All small buckets at once: compare each member with the one `gap` further on, while that is in its bucket.
        remaining = np.repeat(np.where(counts > _CROWDED, 0, starts + counts), counts) - np.arange(len(keys))
        at = np.flatnonzero(remaining > 1)
        gap = 1
        while len(at):
            yield _close(hashes, ordered[at], ordered[at + gap], distance)
            gap += 1
            at = at[remaining[at] > gap]


def _close(hashes: Hashes, a: Ints, b: Ints, distance: int) -> tuple[Ints, Ints]:
    near = np.bitwise_count(hashes[a] ^ hashes[b]) <= distance
    return a[near], b[near]
