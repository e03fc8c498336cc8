"""Memory pressure: the kernel takes pages back that are needed again, or kills."""

from collections.abc import Sequence
from statistics import fmean
from typing import TypeGuard

from kfp_gate.diagnosis.amounts import share, size
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.memory.readings import RankMemory
from kfp_gate.observing.memory import Memory

NEAR = 0.8
"""Share of the limit below which a container has room."""


def memory_pressure(ranks: Sequence[RankMemory]) -> Finding | Unjudged:
    """Whether processes waited for memory: the kernel took pages back that were needed again."""
    kills = max((_kills(r) for r in ranks), default=0)
    readings = [(r, [s["pressure_memory"] for s in r.samples if _is_number(s.get("pressure_memory"))]) for r in ranks]
    rank, pressure = max(readings, key=lambda pair: fmean(pair[1]) if pair[1] else -1.0, default=(None, []))
    fullest = [(h / limit, h, limit) for r in ranks if (limit := r.limit) for h in _held(r)]
    top = max(fullest, default=None)
    if not pressure and not kills and (top is None or top[0] >= NEAR):
        unseen = ["memory pressure: no pressure stall information"]
        unseen += ["use of the container against its limit"] if top is None else []
        return Unjudged("memory_pressure", tuple(unseen))
    weight = 1.0 if kills else fmean(pressure) if pressure else 0.0
    faults = _faults(rank) if rank is not None else None
    evidence: list[str] = []
    against: list[str] = []
    missing: list[str] = []
    if pressure:
        waited = fmean(pressure)
        (evidence if waited > 0.01 else against).append(f"some process waited for memory {share(waited)} of the time")
    else:
        missing.append("memory pressure: no pressure stall information")
    if kills:
        evidence.append(f"the kernel killed {kills} process{'es' * (kills > 1)} of the container for want of memory")
    if top is not None:
        text = f"the container holds up to {size(top[1])} of {size(top[2])} ({share(top[0])}), without page cache"
        (evidence if top[0] >= NEAR else against).append(text)
    else:
        missing.append("use of the container against its limit")
    if faults is None:
        missing.append("page faults that needed storage")
    elif faults >= 1:
        evidence.append(f"{faults:.0f} page faults a second needed storage")
    else:
        against.append("hardly a page fault needed storage")
    loaders = any(((s.get("loaders") or {}).get("count") or 0) > 0 for r in ranks for s in r.samples)
    title = f"processes wait for memory {share(weight)} of the time" if pressure and not kills else (
        "the kernel killed processes for want of memory" if kills else "the container has room")  # fmt: skip
    return Finding(
        "memory_pressure", title, weight, tuple(evidence), tuple(against),
        next_check="raise memory_per_node by a quarter" + (", or lower workers by half" if loaders else "")
        + ": the pressure must fall with the same data",
        refuted_by="the same pressure with twice the memory: then others on the node take it",
        missing=tuple(missing),
        detail={"advice": "Raise memory_per_node" + (", or lower workers" if loaders else ""),
                "pressure": fmean(pressure) if pressure else None,
                "kills": kills, "held": top[1] if top else None, "limit": top[2] if top else None},
    )  # fmt: skip


def _held(rank: RankMemory) -> list[int]:
    found = [memory.held for memory in _told(rank) if memory.held is not None]
    for s in rank.samples:
        cgroup, file, shmem = s.get("cgroup"), s.get("file"), s.get("shmem")
        if _is_number(cgroup) and _is_number(file):
            found.append(round(cgroup - max(file - (shmem if _is_number(shmem) else 0), 0)))
    return found


def _told(rank: RankMemory) -> list[Memory]:
    """What the ends of epochs tell, and the end: a run that dies of it mostly does so before its first epoch ends."""
    return [memory for _, memory in rank.history] + ([rank.end] if rank.end is not None else [])


def _kills(rank: RankMemory) -> int:
    counts: list[int] = [round(s["oom_kills"]) for s in rank.samples if _is_number(s.get("oom_kills"))]
    for memory in _told(rank):
        if memory.oom_kills is not None:
            counts.append(memory.oom_kills)
    return max(counts) - min(counts) if counts else 0


def _faults(rank: RankMemory) -> float | None:
    """Major page faults a second of the training process."""
    counted = [s for s in rank.samples if _is_number(s.get("major_faults")) and _is_number(s.get("mono"))]
    if len(counted) < 2 or counted[-1]["mono"] <= counted[0]["mono"]:
        return None
    return float(sum(s["major_faults"] for s in counted[1:]) / (counted[-1]["mono"] - counted[0]["mono"]))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
