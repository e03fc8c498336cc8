"""Copies that forked loader processes make of their parent's memory."""

from collections.abc import Sequence

from kfp_gate.diagnosis.amounts import size
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.memory_readings import NO_LIMIT, RankMemory, sums
from kfp_gate.observing.memory_growth import Grown

COPIED = 0.5
"""Of the loaders' growth at least this share must be without growth of their resident size to be copies."""


def forked_copies(ranks: Sequence[RankMemory]) -> Finding | Unjudged:
    """Whether loader processes turn the pages that they share with their parent into copies of their own.

    A copy adds to what a process has to itself (its proportional size) and not to what it has mapped (its resident
    size); memory that a loader takes for itself adds to both.
    """
    judged = [(r, c) for r in ranks if (c := _copies(r)) is not None]
    if not judged:
        if ranks and all((m.children_count or 0) == 0 and m.children_count is not None for r in ranks
                         for _, m in r.history) and any(r.history for r in ranks):  # fmt: skip
            return Finding("forked_copies", "there are no loader processes", 0.0)
        return Unjudged("forked_copies", (
            "proportional sizes of the loader processes, at the start and after an epoch: not recorded or not readable",
        ))  # fmt: skip
    rank, (copies, own) = max(judged, key=lambda pair: pair[1][0])
    last, count = rank.last, rank.last.children_count or 0
    total = sum(c for _, (c, _) in judged) if _shared_container(judged) else copies
    grown = {g.what: g for g in rank.grown}
    container, shares = grown.get("cgroup"), grown.get("children_pss")
    grows = shares is not None and copies > 0 and copies >= COPIED * (copies + own) and "children" not in grown
    if rank.limit is not None:
        weight = min(1.0, total / rank.limit)
        if grows and container is not None and container.limit_epoch is not None and _within(rank, container):
            weight = 1.0
    else:
        weight = NO_LIMIT * total / max((last.pss or last.rss or 0) + (last.children_pss or 0), 1)
    evidence = [
        f"what the {count} loader processes have to themselves grew by {size(copies)} more than what they have mapped, "
        "since the first step",
    ]
    if shares is not None:
        evidence.append(shares.text)
    evidence += sums(last)
    against = []
    if own > copies:
        against.append(f"they took {size(own)} of their own as well: buffers or a cache")
    if rank.limit is None:
        against.append("no limit of the container is known")
    return Finding(
        "forked_copies", f"loader processes hold {size(copies)} of copies of their parent's memory", weight,
        tuple(evidence), tuple(against),
        next_check="keep what the data set carries in arrays in place of lists of objects, or set workers to 1, and "
        "compare the proportional sizes: reading a Python object writes its reference count, which copies its page",
        refuted_by="proportional sizes that stay level while workers read the whole set",
        detail={"advice": "Keep what the data set carries in arrays, not in lists of objects, or lower workers",
                "copies": copies, "own": own, "workers": count, "copies_grow": grows},
    )  # fmt: skip


def _within(rank: RankMemory, growth: Grown) -> bool:
    return growth.limit_epoch is not None and growth.limit_epoch <= (rank.epochs or growth.growth.last)


def _copies(rank: RankMemory) -> tuple[int, int] | None:
    """Bytes that became copies since the first step, and bytes that the loaders took for themselves; None: unknown."""
    before, after = rank.start, rank.last
    if before is None or before.children_pss is None or after.children_pss is None or not before.children_count:
        # Timelines without a reading at the start: from the first epoch on.
        before = rank.history[0][1] if len(rank.history) > 1 else None
    if before is None or before.children_pss is None or after.children_pss is None:
        return None
    if not before.children_count or before.children_count != after.children_count:
        return None
    own = max((after.children or 0) - (before.children or 0), 0)
    return max(after.children_pss - before.children_pss - own, 0), own


def _shared_container(judged: Sequence[tuple[RankMemory, tuple[int, int]]]) -> bool:
    """Whether the ranks lie in one container: they see the same use of it."""
    seen = [r.last.limit for r, _ in judged]
    held = [r.last.held for r, _ in judged if r.last.held]
    return len(set(seen)) == 1 and len(held) == len(judged) and max(held) < 1.05 * min(held)
