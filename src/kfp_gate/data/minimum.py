"""Classes that the test set cannot judge, and the smallest change that would cure it."""

import math

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, Floats, Ints
from kfp_gate.data.assignment import TEST, Shares
from kfp_gate.data.balance import GroupLabels
from kfp_gate.data.coverage import Shortfall
from kfp_gate.errors import InvalidInput, Problem


def find_shortfalls(
    labels: GroupLabels, splits: Ints, positions: Floats, pinned: Ints, classes: tuple[str, ...], shares: Shares,
    minimum: int, *, by_hash: bool,
) -> tuple[Shortfall, ...]:  # fmt: skip
    """Classes with fewer than `minimum` instances in test.

    Args:
        labels: what each group holds (label 0 the images, class k label k + 1).
        splits: of each group, shape (groups,).
        positions: hash of each group; with `by_hash`, groups below the test share are in test, so the smallest share
            that suffices is exact.
        pinned: groups that cannot move, shape (groups,).
    """
    owner = np.repeat(np.arange(len(splits)), np.diff(labels.starts))
    in_test = np.bincount(
        labels.label, weights=labels.amount * (splits[owner] == TEST), minlength=len(labels.totals)
    ).astype(np.int64)
    found = []
    for k, name in enumerate(classes):
        instances, total = int(in_test[k + 1]), int(labels.totals[k + 1])
        if instances >= minimum:
            continue
        entries = labels.label == k + 1
        groups, amounts = owner[entries], labels.amount[entries]
        movable = pinned[groups] == NO_SPLIT
        stuck = int(amounts[~movable & (splits[groups] != TEST)].sum())
        if total - stuck < minimum:
            where = f"{total} in the whole dataset" + (f", {stuck} of them pinned elsewhere" if stuck else "")
            cure = f"there are {where}: label {minimum - total + stuck} more in images of new groups"
        else:
            cure = _cure(groups, amounts, splits, positions, movable, instances, minimum, total, shares, by_hash)
        found.append(Shortfall(name, instances, minimum, cure))
    return tuple(found)


def _cure(
    groups: Ints, amounts: Ints, splits: Ints, positions: Floats, movable: Ints, instances: int, minimum: int,
    total: int, shares: Shares, by_hash: bool,
) -> str:  # fmt: skip
    if by_hash:
        base = int(amounts[~movable & (splits[groups] == TEST)].sum())
        order = np.argsort(positions[groups[movable]])
        reached = base + np.cumsum(amounts[movable][order])
        last = float(positions[groups[movable]][order][int(np.searchsorted(reached, minimum))])
        share = (math.floor(last * 1000) + 1) / 1000
        if share + shares[1] < 1:
            return f"test_share={share:g} is the smallest that gives {minimum}, or strategy='stratified'"
    candidates = np.flatnonzero(movable & (splits[groups] != TEST))
    enough = candidates[amounts[candidates] >= minimum - instances]
    if by_hash or not len(enough):
        share = min(math.ceil(1000 * minimum / total) / 1000, 0.98)
        return f"strategy='stratified' with test_share={share:g} comes nearest to {minimum}"
    one = enough[np.argmin(amounts[enough])]
    missing = minimum - instances
    return f"one more group with {int(amounts[one])} instances would do: raise test_share, or label {missing} more"


def refuse_shortfalls(shortfalls: tuple[Shortfall, ...], where: str) -> InvalidInput:
    """The error for `on_shortfall="error"`."""
    return InvalidInput(
        f"{len(shortfalls)} classes have too few instances in the test set",
        expected=f"at least min_instances={shortfalls[0].needed} of each class", where=where,
        next_step="apply the change named for each class, or lower min_instances",
        problems=[Problem(repr(s.class_name), f"{s.instances} in test; {s.cure}") for s in shortfalls],
    )  # fmt: skip
