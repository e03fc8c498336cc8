"""Memory that grows from epoch to epoch: how urgent it is, what keeps it, what to look at next."""

from collections.abc import Sequence

from kfp_gate.diagnosis.amounts import interval, size
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.memory.forked_copies import copies_gained
from kfp_gate.diagnosis.memory.readings import BETWEEN, NO_LIMIT, RankMemory, sums
from kfp_gate.observing.growth import FEWEST, WARMUP
from kfp_gate.observing.memory_growth import PARTS, Grown, causes

PHASES = {"validate": "validation", "train": "the training steps", "checkpoint": "writing checkpoints",
          "other": "the time between epochs", "sanity": "the sanity pass"}  # fmt: skip

COPIED = 0.5
"""Copies in loader processes that make up this share of the container's growth explain it."""

NEXT = {
    "validate": "trace one validation's allocations (tracemalloc, 1 frame): what it still holds after it has ended "
    "names the line that keeps predictions or results over epochs",
    "train": "trace the allocations of 50 steps (tracemalloc, 1 frame) and compare with the next 50: losses kept with "
    "their graph, lists that are never emptied, a cache of images",
    "checkpoint": "run two epochs with checkpoints off: if it is level then, states or uploads are kept",
    "children": "set workers to 0 for five epochs: growth that moves into the training process is the data set's, "
    "growth that ends is the loader processes'",
    "shmem": "list /dev/shm in the container: segments of ended loaders, or batches that are kept",
    "cuda_reserved": "compare torch.cuda.memory_allocated with memory_reserved each epoch: if only the second grows, "
    "it is fragmentation by changing shapes; if both do, tensors are kept",
    "": "run five epochs without validation, then without checkpoints: the part without which it is level keeps it",
}


def memory_growth(ranks: Sequence[RankMemory]) -> Finding | Unjudged:
    """Whether memory grows from epoch to epoch, and whether its limit is reached before the run ends."""
    epochs = max((len(r.history) for r in ranks), default=0)
    if epochs < FEWEST + WARMUP:
        return Unjudged("memory_growth", (f"memory at the end of {FEWEST + WARMUP} epochs: {epochs} were recorded",))
    known = [r for r in ranks if any(m.rss is not None or m.held is not None for _, m in r.history)]
    if not known:
        return Unjudged("memory_growth", ("memory of the process and of its container: this machine does not tell",))
    found = [(r, g) for r in known for g in causes(r.grown)]
    leaks = [(r, g) for r, g in found if g.what in PARTS or copies_gained(r, g.growth.since) < COPIED * _gain(g)]
    # What is copied from the parent ends when all is copied: a cause of its own.
    copied, found = len(leaks) < len(found), leaks
    if not found:
        told = "what the container gains is copies of the parent's memory in the loader processes"
        return Finding(
            "memory_growth", "no memory grows from epoch to epoch", 0.0, against=(told,) if copied else (),
            missing=_missing(known), detail={"epochs": epochs},
        )  # fmt: skip
    rank, worst = max(found, key=lambda pair: (_urgency(*pair), pair[1].growth.slope))
    phase = rank.phase(worst)
    where = PHASES.get(phase, f"the phase {phase}") if phase and phase != BETWEEN else ""
    title = worst.text + (f"; it is kept by {where}" if where else "")
    evidence = [
        f"{interval(worst.growth.low, worst.growth.high, size)} an epoch (90% interval), over {worst.growth.readings} "
        "epochs",
        *(f"{'rank ' + str(r.rank) + ': ' if len(ranks) > 1 else ''}{g.text}" for r, g in found if g is not worst),
        *_by_phase(rank, worst),
    ]
    evidence += sums(rank.last)
    against = []
    last = rank.epochs
    if worst.limit_epoch is not None and last is not None and worst.limit_epoch > last:
        against.append(f"the run ends before, with epoch {last}")
    if worst.limit is None:
        against.append("no limit is known")
    key = phase if phase in NEXT and worst.what in ("rss", "anon", "cgroup") else worst.what
    return Finding(
        "memory_growth", title, _urgency(rank, worst), tuple(evidence), tuple(against),
        next_check=NEXT.get(key, NEXT[""]), refuted_by="the same memory level over as many epochs of a longer run",
        missing=_missing([rank]),
        detail={
            "advice": _advice(worst, where), "what": worst.what, "phase": phase, "since": worst.growth.since,
            "slope": worst.growth.slope, "limit": worst.limit, "limit_epoch": worst.limit_epoch, "rank": rank.rank,
        },
    )  # fmt: skip


def _urgency(rank: RankMemory, growth: Grown) -> float:
    """1 if the limit is reached before the last epoch, a quarter if in twice as many; else how much is growth."""
    if growth.limit_epoch is None:
        return min(NO_LIMIT, _gain(growth) / max(growth.growth.level, 1.0))
    last = rank.epochs or growth.growth.last
    return min(1.0, (last / growth.limit_epoch) ** 2)


def _gain(growth: Grown) -> float:
    return growth.growth.slope * (growth.growth.last - growth.growth.since)


def _advice(growth: Grown, where: str) -> str:
    place = f" in {where}" if where else ""
    return f"Find what is kept{place} from epoch to epoch; more memory only moves the epoch"


def _by_phase(rank: RankMemory, growth: Grown) -> list[str]:
    each = {p: v for p, v in rank.by_phase(growth).items() if abs(v) >= growth.growth.slope / 100}
    if not each:
        return []
    parts = [f"{size(v)} in {PHASES.get(p, p)}" for p, v in sorted(each.items(), key=lambda item: -item[1])]
    return [f"an epoch keeps {', '.join(parts)}"]


def _missing(ranks: Sequence[RankMemory]) -> tuple[str, ...]:
    if all(m.held is None for r in ranks for _, m in r.history):
        return ("memory of the container: no memory controller of a control group was seen",)
    if all(r.limit is None for r in ranks):
        return ("limit of the container: none is set, or it is not readable",)
    return ()
