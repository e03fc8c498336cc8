"""Splits that balance images and every class at once, group by group, around what is already pinned."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, Floats, Ints
from kfp_gate.data.assignment import TEST, TRAIN, VAL, Shares

PASSES = 8
"""Rounds of improvement after the first placement; each looks at every free group once."""

ABSENT = (0.25, 0.2, 0.25)
"""What it costs, per split, if a class is not in it: unlearned, unselected or unjudged. More than what one more group
elsewhere could save in distance."""

IMAGES = 0
"""Label 0 stands for the images themselves; class k is label k + 1."""


@dataclass(frozen=True)
class GroupLabels:
    """What each group holds, as a sparse table: group g has `amount[j]` of label `label[j]` for j in its row.

    Attributes:
        starts: shape (groups + 1,).
        label: shape (entries,).
        amount: shape (entries,).
        totals: sum of each label, shape (labels,).
    """

    starts: Ints
    label: Ints
    amount: Ints
    totals: Ints


def group_labels(groups: Ints, count: int, owner: Ints, box_class: Ints, classes: int) -> GroupLabels:
    """Images and instances per group.

    Args:
        groups: code of each image's group from 0 to `count` - 1, shape (n,).
        owner: image of each box, shape (m,).
        box_class: shape (m,).
    """
    width = classes + 1
    keys = np.concatenate([groups * width, groups[owner] * width + box_class + 1])
    entries, amount = np.unique(keys, return_counts=True)
    label = entries % width
    starts = np.searchsorted(entries, np.arange(count + 1) * width)
    totals = np.bincount(label, weights=amount, minlength=width).astype(np.int64)
    return GroupLabels(starts, label, amount.astype(np.int64), totals)


def balanced(labels: GroupLabels, positions: Floats, shares: Shares, pinned: Ints, tolerance: float) -> Ints:
    """Split of each group so that each label's shares come as near to those asked for as a greedy choice can.

    What is minimised is the sum over labels and splits of the squared distance between the share given and the share
    asked for (the aim of iterative stratification, Sechidis et al. 2011, here for groups and instance counts), and
    `ABSENT` for each split without a label: a class of three groups gets one in each, though shares of 70/15/15 are
    nearer to none in one. Groups
    with the rarest label choose first, large ones before small ones, ties by hash. Then single groups move as long as
    that helps and some label is off by more than the tolerance. No split stays empty if there are groups enough.

    Args:
        positions: of each group, from `hash_positions`, shape (groups,).
        pinned: split a group must stay in, `NO_SPLIT` if it is free, shape (groups,).
        tolerance: share by which a label may be off, such as 0.02.
    """
    totals = np.maximum(labels.totals, 1).astype(np.float64)
    held = np.zeros((3, len(totals)))
    owner = np.repeat(np.arange(len(pinned)), np.diff(labels.starts))
    fixed = pinned[owner] != NO_SPLIT
    np.add.at(held, (pinned[owner[fixed]], labels.label[fixed]), labels.amount[fixed] / totals[labels.label[fixed]])
    count = np.zeros((3, len(totals)), np.int64)
    np.add.at(count, (pinned[owner[fixed]], labels.label[fixed]), 1)
    state = _State(
        rows=_rows(labels, totals),
        gap=(held - np.array(shares)[:, None]).tolist(),
        groups=count.tolist(),
        result=pinned.tolist(),
        members=np.bincount(pinned[pinned != NO_SPLIT], minlength=3).tolist(),
    )
    free = np.flatnonzero(pinned == NO_SPLIT)
    rarity = np.bincount(labels.label, minlength=len(totals))
    rarest = np.minimum.reduceat(rarity[labels.label], labels.starts[:-1]) if len(labels.label) else rarity
    sizes = labels.amount[labels.starts[:-1]]  # label 0, the images, is the first of each row
    order = free[np.lexsort((positions[free], -sizes[free], rarest[free]))].tolist()
    for done, group in enumerate(order):
        empty = [s for s in (TEST, VAL, TRAIN) if not state.members[s]]
        state.place(group, empty if len(order) - done <= len(empty) else (TEST, VAL, TRAIN))
    improving = sorted(order, key=lambda g: float(positions[g]))
    for _ in range(PASSES):
        if state.worst() <= tolerance or not sum([state.improve(group) for group in improving]):
            break
    return np.array(state.result, np.int64)


def worst_labels(labels: GroupLabels, splits: Ints, shares: Shares) -> Floats:
    """How far each label is off in its worst split, as a share; 0 for a label that does not occur. Shape (labels,)."""
    owner = np.repeat(np.arange(len(splits)), np.diff(labels.starts))
    held = np.zeros((3, len(labels.totals)))
    np.add.at(held, (splits[owner], labels.label), labels.amount)
    gap = np.abs(held / np.maximum(labels.totals, 1) - np.array(shares)[:, None]).max(axis=0)
    return np.asarray(np.where(labels.totals > 0, gap, 0.0))


@dataclass
class _State:
    """Plain lists: a group has a handful of labels, for which numpy calls cost more than the sums."""

    rows: list[list[tuple[int, float]]]
    gap: list[list[float]]
    groups: list[list[int]]
    result: list[int]
    members: list[int]

    def place(self, group: int, allowed: Sequence[int]) -> None:
        costs = self._costs(group)
        self._add(group, min(allowed, key=lambda split: round(costs[split], 12)), 1)

    def improve(self, group: int) -> bool:
        """Move a group if that lowers the sum, and if its split keeps another."""
        current = self.result[group]
        if self.members[current] < 2:
            return False
        self._add(group, current, -1)
        costs = self._costs(group)
        best = costs.index(min(costs))
        if costs[best] > costs[current] - 1e-12:
            best = current
        self._add(group, best, 1)
        return best != current

    def worst(self) -> float:
        return max(abs(v) for row in self.gap for v in row)

    def _costs(self, group: int) -> list[float]:
        """Per split by how much the sum grows: (gap + part)^2 - gap^2, less what it cost that the label was absent."""
        (gap_a, gap_b, gap_c), (in_a, in_b, in_c), (absent_a, absent_b, absent_c) = self.gap, self.groups, ABSENT
        a = b = c = 0.0
        for label, part in self.rows[group]:  # written out: this is where the time goes
            twice, square = 2 * part, part * part
            a += twice * gap_a[label] + square - (0.0 if in_a[label] else absent_a)
            b += twice * gap_b[label] + square - (0.0 if in_b[label] else absent_b)
            c += twice * gap_c[label] + square - (0.0 if in_c[label] else absent_c)
        return [a, b, c]

    def _add(self, group: int, split: int, sign: int) -> None:
        gap, groups = self.gap[split], self.groups[split]
        for label, part in self.rows[group]:
            gap[label] += sign * part
            groups[label] += sign
        self.members[split] += sign
        self.result[group] = split


def _rows(labels: GroupLabels, totals: Floats) -> list[list[tuple[int, float]]]:
    parts = (labels.amount / totals[labels.label]).tolist()
    label, starts = labels.label.tolist(), labels.starts.tolist()
    return [list(zip(label[a:b], parts[a:b], strict=True)) for a, b in pairwise(starts)]
