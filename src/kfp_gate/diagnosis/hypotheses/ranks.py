"""Ranks that wait for each other.

All ranks meet in backward, where gradients are averaged: a rank that comes late is not slow there, the others are. So a
rank's own work is what it does before, and what the others wait is how much longer their backward takes than its.
"""

from collections.abc import Callable
from statistics import median

from kfp_gate.diagnosis.amounts import duration, share
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.crowding import loader_lag
from kfp_gate.diagnosis.measured.observations import Observations, RankSeen
from kfp_gate.diagnosis.measured.steady import DATA, TRANSFER

BEFORE = (DATA, TRANSFER, "forward", "loss")
MEETING = ("backward", "optimizer")
NAMES = {DATA: "waiting for images", TRANSFER: "transfer", "forward": "forward", "loss": "loss"}
LISTED = 6


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Whether one rank keeps the others waiting."""
    cause = "rank_imbalance"
    told = _told_ranks(seen)
    if not seen.ranks:
        return [Unjudged(cause, ("no steady steps",))]
    if len(seen.ranks) < 2:
        if told is not None and told > 1:
            return [Unjudged(cause, (f"steady steps of more than one of the {told} ranks",))]
        return [
            Finding(cause, "a single rank waits for no other", 0.0, against=("this run has one rank",),
                    next_check="none needed", refuted_by="a second rank", detail={"ranks": 1})
        ]  # fmt: skip
    took = _clock(seen)
    late = max(seen.ranks, key=lambda r: took(r, *BEFORE))
    others = [r for r in seen.ranks if r is not late]
    usual = median(_work(r, took, *BEFORE) for r in others)
    ahead = _work(late, took, *BEFORE) - usual
    behind = loader_lag(late, others)
    if behind is not None:
        # The others would wait for images as well, were it not for this rank: only what its loader is slower by is its.
        ahead -= max(0.0, took(late, DATA) - median(took(r, DATA) for r in others) - behind)
    wait = median(took(r, *MEETING) for r in others) - took(late, *MEETING)
    # Both sides must agree: it comes later, and the others stand about as long.
    held = max(0.0, min(ahead, wait))
    weight = seen.share(held)
    phase = max(BEFORE, key=lambda p: _work(late, took, p) - median(_work(r, took, p) for r in others))
    mine, theirs = _work(late, took, phase), median(_work(r, took, phase) for r in others)
    waiting = sorted(r.rank for r in others if took(r, *MEETING) - took(late, *MEETING) > held / 2) or [
        r.rank for r in others
    ]
    who = ("rank " if len(waiting) == 1 else "ranks ") + ", ".join(map(str, waiting[:LISTED]))
    who += ", ..." if len(waiting) > LISTED else ""
    verb = "waits" if len(waiting) == 1 else "wait"
    evidence, against = [], []
    if held > 0:
        evidence += [
            f"{who} {verb} {duration(max(0.0, wait))} a step in backward for rank {late.rank}",
            f"rank {late.rank} needs {duration(_work(late, took, *BEFORE))} before backward, the others "
            f"{duration(usual)}",
            f"most of it is {NAMES[phase]}: {duration(mine)} against {duration(theirs)}",
        ]
    if behind is not None and wait > 0 and ahead < wait / 2:
        against.append("the others' loader processes take as long for a batch: without this rank another would be last")
    if wait < ahead / 2:
        against.append(f"the others' backward is only {duration(max(0.0, wait))} longer")
    if late.node and len({r.node for r in seen.ranks}) > 1:
        evidence.append(f"rank {late.rank} runs on {late.node}")
    missing = []
    if told is not None and told > len(seen.ranks):
        missing.append(f"timelines of {told - len(seen.ranks)} of {told} ranks")
    return [
        Finding(
            cause, f"{who} {verb} for rank {late.rank} {share(weight)} of the time ({NAMES[phase]})", weight,
            tuple(evidence), tuple(against),
            next_check=f"diagnose rank {late.rank} by itself: " + _why(late, phase),
            refuted_by=f"ranks that wait as long for rank {late.rank} after it moved to another node",
            missing=tuple(missing),
            detail={"advice": f"Look at rank {late.rank} first: {NAMES[phase]} takes {duration(mine)} there and "
                    f"{duration(theirs)} elsewhere", "slow_rank": late.rank, "waiting": waiting, "phase": phase,
                    "seconds": held, "node": late.node},
        )
    ]  # fmt: skip


def waits_for_others(seen: Observations, rank: RankSeen) -> float:
    """Seconds a step by which a rank's backward takes longer than the shortest of all."""
    took = _clock(seen)
    return max(0.0, took(rank, *MEETING) - min(took(r, *MEETING) for r in seen.ranks))


def _clock(seen: Observations) -> Callable[..., float]:
    """Seconds a step of some phases of a rank: where all have one, by the device's clock.

    On a GPU gradients meet on the device: there the wait is in its backward, while the host has long gone on.
    """
    if any(r.device is None for r in seen.ranks):
        return lambda rank, *phases: rank.phase(*phases)
    return lambda rank, *phases: sum((rank.device or {}).get(p, 0.0) for p in phases)


def _work(rank: RankSeen, took: Callable[..., float], *phases: str) -> float:
    """As `took`, but of forward no less than the host needs to queue it.

    While a device waits for other ranks its host gets ahead, and what was queued meanwhile is done the faster: of ranks
    whose hosts are equally slow the one that is last would look slow.
    """
    return sum(max(took(rank, p), rank.phase(p)) if p == "forward" else took(rank, p) for p in phases)


def _why(late: RankSeen, phase: str) -> str:
    if phase == DATA:
        return "its disk, its loader processes, and what else runs on its node"
    return "its clocks, its share of the cores, and what else runs on its node"


def _told_ranks(seen: Observations) -> int | None:
    value = seen.run.conditions.get("ranks") or seen.run.record.get("ranks")
    return (
        int(value) if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1 << 16 else None
    )
