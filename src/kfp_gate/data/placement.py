"""Decides the split of every group: pinned, by hash, balanced, or as the source's own folders say."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Annotations, Bools, Floats, Ints
from kfp_gate.data.assignment import Shares, by_hash, hash_positions
from kfp_gate.data.balance import GroupLabels, balanced, group_labels, worst_labels
from kfp_gate.data.defects import Defect
from kfp_gate.errors import InvalidInput

STRATEGIES = ("hash", "stratified", "fixed")

SHARE_TOLERANCE = 0.05
"""A split whose share of the images is further than this from what was asked for is named in the notes."""


@dataclass(frozen=True)
class Placement:
    """Where the groups went.

    Attributes:
        splits: split of each group, shape (groups,).
        positions: hash position of each group, shape (groups,).
        labels: what each group holds.
        pinned: split each group had to be in, `NO_SPLIT` if it was free, shape (groups,).
        by_hash: whether the free groups are where their hashes put them.
        notes: sentences a person should read.
    """

    splits: Ints
    positions: Floats
    labels: GroupLabels
    pinned: Ints
    by_hash: bool
    notes: tuple[str, ...]


_FEW_GROUPS = 20
"""Up to so many, one group more or less in a split moves its share by a point or more."""


def place_groups(
    codes: Ints, names: Sequence[str], annotations: Annotations, pinned: Ints, strategy: str, shares: Shares, seed: int,
    tolerance: float, rule: str, where: str,
) -> Placement:  # fmt: skip
    """Choose a split for every group.

    Args:
        codes: group of each image, shape (n,).
        names: of the groups.
        pinned: split each group must be in, or `NO_SPLIT`, shape (groups,).

    Raises:
        InvalidInput: fewer than three groups, or a split that stays empty.
    """
    if len(names) < 3:
        raise InvalidInput(
            f"{len(names)} group{'s' * (len(names) != 1)} of images by the rule {rule!r}: {_listed(names)}",
            expected="at least 3 groups, one for each split, since no group may be divided", where=where,
            next_step="choose a finer group_rule ('none' makes each image its own group), or add other scenes",
        )  # fmt: skip
    owner = annotations.owner
    labels = group_labels(codes, len(names), owner, annotations.box_class, len(annotations.classes))
    positions = hash_positions(names, seed)
    notes: list[str] = []
    hashed = strategy != "stratified"
    if hashed:
        splits = np.where(pinned == NO_SPLIT, by_hash(positions, shares), pinned)
        empty = np.flatnonzero(np.bincount(splits, minlength=3) == 0)
        if len(empty) and (pinned == NO_SPLIT).any():
            hashed = False
            left = " and ".join(SPLITS[i] for i in empty.tolist())
            notes.append(
                f"the hashes of {len(names)} groups leave {left} empty, so the groups were balanced by size and class "
                "instead: until there are more groups, adding images may move these"
            )
    if not hashed:
        splits = balanced(labels, positions, shares, pinned, tolerance)
    empty = np.flatnonzero(np.bincount(splits, minlength=3) == 0)
    if len(empty):
        raise InvalidInput(
            f"no image for {' and '.join(SPLITS[i] for i in empty.tolist())}", expected="images in all three splits",
            where=where,
            next_step="with strategy='fixed' the source has to hold train, val and test: choose strategy='hash' if it "
            "does not" if strategy == "fixed" else "add groups that the earlier manifests do not pin",
        )  # fmt: skip
    if strategy == "stratified":
        notes += _balance_notes(labels, splits, shares, annotations.classes, tolerance)
    return Placement(splits, positions, labels, pinned, hashed, tuple(notes))


def fixed_pins(codes: Ints, annotations: Annotations, names: Sequence[str]) -> tuple[Ints, Bools, tuple[Defect, ...]]:
    """Pins of each group from the source's own splits; where these divide a group, the images to leave out.

    Of a divided group those images stay that lie in the split to be protected most: test, then val.

    Returns:
        Split of each group, shape (groups,); images to leave out, shape (n,); one defect for each of them.
    """
    held = np.zeros(len(names), np.int64)
    known = annotations.fixed != NO_SPLIT
    np.bitwise_or.at(held, codes[known], 1 << annotations.fixed[known])
    pins = np.where(held > 0, np.log2(np.maximum(held, 1)).astype(np.int64), NO_SPLIT)  # the highest bit: test
    leaving = known & (annotations.fixed != pins[codes])
    defects = tuple(
        Defect(
            "divided group", annotations.images[i], 0,
            f"group {names[codes[i]]!r} is in {SPLITS[annotations.fixed[i]]} and in {SPLITS[pins[codes[i]]]}",
            annotations.images[i],
        )
        for i in np.flatnonzero(leaving).tolist()
    )  # fmt: skip
    return pins, leaving, defects


def share_note(images: Ints, groups: int, shares: Shares) -> str:
    """What the groups give where they cannot give what was asked for, else ""."""
    given = images / images.sum()
    if (np.abs(given - shares) <= SHARE_TOLERANCE).all():
        return ""
    asked = "/".join(f"{100 * s:.4g}" for s in shares)
    parts = ", ".join(
        f"{s} {g:.1%} ({n} image{'s' * (n != 1)})"
        for s, g, n in zip(SPLITS, given.tolist(), images.tolist(), strict=True)
    )
    if groups > _FEW_GROUPS:
        # Many groups could: it is the hash that keeps every group where it is and lets the shares waver.
        return f"the hashes of {groups} groups give {parts}; asked were {asked}"
    return f"{groups} groups cannot give the asked shares {asked}; they give {parts}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _balance_notes(
    labels: GroupLabels, splits: Ints, shares: Shares, classes: Sequence[str], tolerance: float
) -> list[str]:
    off = worst_labels(labels, splits, shares)
    beyond = sorted((k for k in range(len(off)) if off[k] > tolerance), key=lambda k: -off[k])
    if not beyond:
        return [f"every class and the images are within {tolerance:.1%} of the asked shares"]
    rarity = np.bincount(labels.label, minlength=len(off)).tolist()
    shown = ", ".join(
        f"{'the images' if k == 0 else repr(classes[k - 1])} {off[k]:.1%} ({rarity[k]} group{'s' * (rarity[k] != 1)})"
        for k in beyond[:5]
    )
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    return [f"{len(beyond)} of {len(off)} shares are off by more than {tolerance:.1%}: {shown}{more}"]
