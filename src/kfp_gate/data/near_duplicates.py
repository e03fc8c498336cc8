"""All pairs of 64-bit hashes within a Hamming distance: exact, and far from quadratic.

By the pigeonhole principle two hashes that differ in at most d bits are equal in at least one of d + 1 disjoint
pieces (multi-index hashing, Norouzi et al. 2012). So only hashes that share a piece are compared; where many share
one, their remaining bits are cut into pieces again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.annotations import Ints
from kfp_gate.data.components import components, shared_key_edges

Hashes = NDArray[np.uint64]

_CROWDED = 1024
"""A bucket with more members may be cut again instead of being compared pair by pair."""

_AT_ONCE = 1 << 22
"""Comparisons done in one block."""


def near_pairs(hashes: Hashes, distance: int) -> tuple[Ints, Ints]:
    """Indexes of all pairs of *distinct* hashes that differ in at most `distance` bits, each pair once, a < b.

    Args:
        hashes: distinct 64-bit values, shape (n,).
        distance: bits, 0 or more.
    """
    return _once(_pairs(hashes, np.arange(len(hashes)), np.arange(64), distance), len(hashes))


def near_duplicate_edges(hashes: Hashes, distance: int, first: Ints | None = None) -> tuple[Ints, Ints]:
    """Edges between images that join exactly the near-duplicates and chains of them.

    Args:
        hashes: of the images, shape (n,); equal values are allowed.
        first: order in which images stand for their hash, shape (n,). With it, every pair of hashes within the
            distance is an edge; without, only as many as hold each chain together, which takes less memory.
    """
    distinct, codes = np.unique(hashes, return_inverse=True)
    same = shared_key_edges(codes, first)
    middle = np.arange(len(hashes)) if first is None else first
    stands = np.empty(len(distinct), np.int64)
    stands[codes[middle[::-1]]] = middle[::-1]  # the first one is written last, and stays
    chunks = _pairs(distinct, np.arange(len(distinct)), np.arange(64), distance)
    a, b = _once(chunks, len(distinct)) if first is not None else _forest(chunks, len(distinct))
    return np.concatenate([same[0], stands[a]]), np.concatenate([same[1], stands[b]])


def pairs_across(hashes: Hashes, sides: Ints, distance: int, limit: int = 1_000_000) -> tuple[Ints, Ints]:
    """Pairs of images within `distance` that lie on different sides, one for each pair of hashes and sides.

    Args:
        hashes: shape (n,); equal values are allowed.
        sides: for instance the split of each image, shape (n,).
        limit: pairs after which the search may stop: that many say enough, and all could fill the memory.

    Returns:
        Indexes of the first image of each side that holds the hash, shape (pairs,) each.
    """
    if not len(hashes):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    distinct, codes = np.unique(hashes, return_inverse=True)
    width = int(sides.max()) + 1
    held = np.full((len(distinct), width), -1, np.int64)  # first image of each hash on each side
    held[codes[::-1], sides[::-1]] = np.arange(len(hashes))[::-1]
    lies = held >= 0
    # Hashes on one side only, and on the same one, cannot differ: most pairs are dropped here, chunk by chunk.
    only = np.where(lies.sum(axis=1) == 1, lies.argmax(axis=1), -1)

    def crossing() -> Iterator[tuple[Ints, Ints]]:
        found = 0
        for p, q in _pairs(distinct, np.arange(len(distinct)), np.arange(64), distance):
            if found > limit:
                return
            apart = (only[p] != only[q]) | (only[p] < 0)
            found += int(apart.sum())
            yield p[apart], q[apart]

    p, q = _once(crossing(), len(distinct))
    shared = np.flatnonzero(only < 0)
    left = [np.empty(0, np.int64)]
    right = [np.empty(0, np.int64)]
    for i in range(width):
        for j in range(width):
            if i != j:
                found = lies[p, i] & lies[q, j]
                left.append(held[p[found], i])
                right.append(held[q[found], j])
            if i < j:
                found = lies[shared, i] & lies[shared, j]
                left.append(held[shared[found], i])
                right.append(held[shared[found], j])
    return np.concatenate(left), np.concatenate(right)


def _once(chunks: Iterator[tuple[Ints, Ints]], count: int) -> tuple[Ints, Ints]:
    """Each pair once, sorted; a pair that agrees in several pieces is found in each."""
    keys = [np.minimum(a, b) * count + np.maximum(a, b) for a, b in chunks if len(a)]
    found = np.unique(np.concatenate(keys)) if keys else np.empty(0, np.int64)
    return found // max(count, 1), found % max(count, 1)


def _forest(chunks: Iterator[tuple[Ints, Ints]], count: int) -> tuple[Ints, Ints]:
    """Enough of the pairs to connect what all of them connect."""
    labels = np.arange(count)
    kept: list[tuple[Ints, Ints]] = []
    waiting = 0
    for a, b in chunks:
        apart = labels[a] != labels[b]
        if apart.any():
            kept.append((a[apart], b[apart]))
            waiting += int(apart.sum())
        if waiting > count:  # rarely enough that the labels cost less than the pairs they save
            labels = components(count, *_joined(kept))
            kept, waiting = [shared_key_edges(labels)], 0
    return _joined(kept)


def _joined(pairs: list[tuple[Ints, Ints]]) -> tuple[Ints, Ints]:
    if not pairs:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([a for a, _ in pairs]), np.concatenate([b for _, b in pairs])


def _pairs(hashes: Hashes, members: Ints, bits: Ints, distance: int) -> Iterator[tuple[Ints, Ints]]:
    """Pairs among `members`, which agree on all positions that are not in `bits`.

    Heaps of similar hashes share most pieces, so that cutting would only multiply the work: then each is compared with
    each, which is never more than quadratic in the heap.
    """
    if len(members) <= _CROWDED or len(bits) <= distance + 1:
        yield from _each_with_each(hashes, members, distance)
        return
    cuts = [_buckets(hashes, members, piece) for piece in np.array_split(bits, distance + 1)]
    if 2 * sum(int((cut.counts.astype(np.float64) ** 2).sum()) for cut in cuts) > len(members) ** 2:
        yield from _each_with_each(hashes, members, distance)
        return
    for cut in cuts:
        crowded = cut.counts > _CROWDED
        left = np.setdiff1d(bits, cut.piece)
        for s, c in zip(cut.starts[crowded].tolist(), cut.counts[crowded].tolist(), strict=True):
            yield from _pairs(hashes, cut.ordered[s : s + c], left, distance)
        # All small buckets at once: compare each member with the one `gap` further on, while that is in its bucket.
        ends = np.repeat(np.where(crowded, 0, cut.starts + cut.counts), cut.counts)
        remaining = ends - np.arange(len(members))
        at = np.flatnonzero(remaining > 1)
        gap = 1
        while len(at):
            yield _close(hashes, cut.ordered[at], cut.ordered[at + gap], distance)
            gap += 1
            at = at[remaining[at] > gap]


@dataclass(frozen=True)
class _Cut:
    """Members ordered by one piece of their hashes, and where each bucket begins."""

    piece: Ints
    ordered: Ints
    starts: Ints
    counts: Ints


def _buckets(hashes: Hashes, members: Ints, piece: Ints) -> _Cut:
    keys = hashes[members] & np.uint64(sum(1 << int(p) for p in piece))
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]]))
    return _Cut(piece, members[order], starts, np.diff(np.concatenate([starts, [len(keys)]])))


def _each_with_each(hashes: Hashes, members: Ints, distance: int) -> Iterator[tuple[Ints, Ints]]:
    """Blocks of rows against all later members: memory is bounded whatever the heap."""
    rows = max(1, _AT_ONCE // max(len(members), 1))
    for start in range(0, len(members), rows):
        block, later = members[start : start + rows], members[start:]
        near = np.bitwise_count(hashes[block][:, None] ^ hashes[later][None]) <= distance
        i, j = np.nonzero(np.triu(near, 1))
        yield block[i], later[j]


def _close(hashes: Hashes, a: Ints, b: Ints, distance: int) -> tuple[Ints, Ints]:
    near = np.bitwise_count(hashes[a] ^ hashes[b]) <= distance
    return a[near], b[near]
