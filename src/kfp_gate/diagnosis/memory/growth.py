"""How a run's memory developed: what grows, since when, in which phase, and when its limit is reached."""

from kfp_gate.diagnosis.findings import Finding, MemoryGrowth, Unjudged
from kfp_gate.diagnosis.memory.forked_copies import forked_copies
from kfp_gate.diagnosis.memory.leak import memory_growth
from kfp_gate.diagnosis.memory.pressure import memory_pressure
from kfp_gate.diagnosis.memory.readings import BETWEEN, RankMemory, rank_memories
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.observing.memory_growth import NAMES, Grown


def growth(run: Run) -> tuple[MemoryGrowth, ...]:
    """Every kind of memory that grows, each on the rank on which it grows fastest; page cache is none of them."""
    fastest: dict[str, tuple[RankMemory, Grown]] = {}
    ranks = rank_memories(run)
    for memory in ranks:
        for found in memory.grown:
            if found.what not in fastest or found.growth.slope > fastest[found.what][1].growth.slope:
                fastest[found.what] = (memory, found)
    return tuple(
        _told(*fastest[what], several=len(ranks) > 1) for what in NAMES if what in fastest
    )  # fmt: skip


def memory_findings(run: Run) -> tuple[Finding | Unjudged, ...]:
    """The three causes that have to do with memory; each exactly once."""
    ranks = rank_memories(run)
    return memory_growth(ranks), forked_copies(ranks), memory_pressure(ranks)


def _told(memory: RankMemory, found: Grown, *, several: bool) -> MemoryGrowth:
    phase = memory.phase(found)
    text = f"rank {memory.rank}: {found.text}" if several else found.text
    return MemoryGrowth(
        found.what, "" if phase == BETWEEN else phase, found.growth.since, found.growth.slope, found.growth.low,
        found.growth.high, found.limit, found.limit_epoch, text,
    )  # fmt: skip
