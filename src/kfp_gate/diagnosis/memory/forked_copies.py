"""Copies that forked loader processes make of their parent's memory."""

from collections.abc import Sequence

from kfp_gate.diagnosis.amounts import size
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.memory.readings import NO_LIMIT, RankMemory, sums
from kfp_gate.observing.memory import Memory
from kfp_gate.observing.memory_growth import Grown

COPIED = 0.5
"""Of what the container gained at least this share must be copies to say that they reach its limit."""

ORDINARY = 96 << 20
"""Bytes of copies that each loader process makes whatever the data set is: the interpreter's and torch's own objects,
measured at 78 MiB."""


def forked_copies(ranks: Sequence[RankMemory]) -> Finding | Unjudged:
    """Whether loader processes turn the pages that they share with their parent into copies of their own.

    A copy adds to what a family of processes holds, with shared pages once, and not to what any of them has mapped;
    memory that a loader takes for itself adds to both.
    """
    judged = [(r, found) for r in ranks if (found := copied(r)) is not None]
    if not judged:
        ends = [r.last for r in ranks if r.history]
        if ends and all(m.children_count == 0 for m in ends):
            return Finding("forked_copies", "there are no loader processes", 0.0)
        return Unjudged("forked_copies", (
            "anonymous memory of the loader processes, of the container or with shared pages once: not recorded",
        ))  # fmt: skip
    rank, (copies, own) = max(judged, key=lambda pair: pair[1][0])
    last, count = rank.last, rank.last.children_count or 0
    container = next((g for g in rank.grown if g.what == "cgroup"), None)
    grows = container is not None and _gained(rank, container) >= COPIED * _gain(container)
    evidence = [f"since they were forked {count} loader processes made {size(copies)} of pages their own that they "
                "shared with their parent"]  # fmt: skip
    evidence += [container.text] if container is not None and grows else []
    evidence += sums(last)
    against = [f"they took {size(own)} of their own as well: buffers or a cache"] if own > copies else []
    if copies <= count * ORDINARY:
        against.append("any loader copies as much: the objects of the interpreter and of torch")
    against += ["no limit of the container is known"] if rank.limit is None else []
    total = sum(found[0] for _, found in judged) if _in_one_container(judged) else copies
    return Finding(
        "forked_copies", f"loader processes hold {size(copies)} of copies of their parent's memory",
        _urgency(rank, total, container if grows else None), tuple(evidence), tuple(against),
        next_check="keep what the data set carries in arrays in place of lists of objects, or set workers to 1, and "
        "compare the container's memory: reading a Python object writes its reference count, which copies its page",
        refuted_by="memory that stays as it is while the workers read the whole set",
        detail={"advice": "Keep what the data set carries in arrays, not in lists of objects, or lower workers",
                "copies": copies, "own": own, "workers": count},
    )  # fmt: skip


def copied(rank: RankMemory) -> tuple[int, int] | None:
    """Bytes of copies at the end of the last epoch, and bytes that the loaders took for themselves; None: unknown."""
    return _by_family(rank, rank.last) or _by_container(rank, rank.last)


def copies_gained(rank: RankMemory, since: int) -> int:
    """Bytes of copies that were added after an epoch; 0 if that is unknown."""
    then = next((m for e, m in rank.history if e == since), None)
    for measure in (_by_family, _by_container):
        before, after = measure(rank, then) if then is not None else None, measure(rank, rank.last)
        if before is not None and after is not None:
            return max(after[0] - before[0], 0)
    return 0


def _by_family(rank: RankMemory, now: Memory) -> tuple[int, int] | None:
    """By what the rank and its loaders hold with shared pages once: exact, and not recorded in short epochs."""
    own = _own(rank, now)
    if own is None or now.family_anon is None or now.process_anon is None:
        return None
    return max(now.family_anon - now.process_anon - own, 0), own


def _by_container(rank: RankMemory, now: Memory) -> tuple[int, int] | None:
    """By what the container gained beyond what the rank and its loaders took, if it holds nobody else."""
    own, start = _own(rank, now), rank.start
    if own is None or start is None or start.anon is None or now.anon is None or start.children_count != 0:
        return None
    if not rank.alone or start.process_anon is None or now.process_anon is None:
        return None
    return max(now.anon - start.anon - (now.process_anon - start.process_anon) - own, 0), own


def _own(rank: RankMemory, now: Memory) -> int | None:
    """What the loaders took for themselves: when they were forked, each had mapped what their parent had."""
    start = rank.start
    if start is None or start.process_anon is None or not now.children_count or now.children_anon is None:
        return None
    return max(now.children_anon - now.children_count * start.process_anon, 0)


def _urgency(rank: RankMemory, copies: int, container: Grown | None) -> float:
    last = rank.last
    beyond = max(copies - (last.children_count or 0) * ORDINARY, 0)
    if rank.limit is None:
        return NO_LIMIT * beyond / max(last.family_anon or (last.process_anon or 0) + copies, 1)
    epochs = rank.epochs or (rank.history[-1][0] if rank.history else 0)
    # At worst every loader gets a copy of all that it has mapped.
    worst = (last.held or 0) + max((last.children_anon or 0) - copies, 0)
    reached = container is not None and container.limit_epoch is not None and container.limit_epoch <= epochs
    return 1.0 if reached and worst >= rank.limit else min(1.0, beyond / rank.limit)


def _gained(rank: RankMemory, growth: Grown) -> int:
    return copies_gained(rank, growth.growth.since)


def _gain(growth: Grown) -> float:
    return growth.growth.slope * (growth.growth.last - growth.growth.since)


def _in_one_container(judged: Sequence[tuple[RankMemory, tuple[int, int]]]) -> bool:
    """Whether the ranks lie in one container: they see the same use of it."""
    held = [r.last.held for r, _ in judged if r.last.held]
    return len({r.limit for r, _ in judged}) == 1 and len(held) == len(judged) and max(held) < 1.05 * min(held)
