"""Which kind of memory grows from epoch to epoch, and when its limit is reached.

Page cache is left out of everything: the kernel takes it back before it kills. What of a container's use it cannot take
back is `Memory.held`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from kfp_gate.observing.growth import Growth, estimate
from kfp_gate.observing.memory import UNLIMITED, Memory, size

NAMES = {
    "rss": "memory of the training process",
    "children": "memory of the loader processes",
    "shmem": "shared memory of the container (/dev/shm)",
    "cuda_reserved": "memory that CUDA reserved",
    "anon": "memory of the container's processes",
    "cgroup": "memory of the container",
    "family_anon": "memory of the training process and its loaders, shared pages once,",
}
"""Kinds, in the order in which they are told: first what a process does, then what the container sees of it."""

PARTS = ("rss", "children", "shmem")
"""What the container's growth is made of, as far as this process sees."""

PHASE_KINDS = ("rss", "anon", "shmem", "cuda_reserved")
"""What is read where one phase ends and the next begins."""

MAINLY = 0.6
"""A phase is named if it keeps at least this share of what is kept in an epoch, and the others nearly nothing."""

KEYS = tuple(f.name for f in fields(Memory))


@dataclass(frozen=True)
class Grown:
    """One kind of memory that grows.

    Attributes:
        what: a key of `NAMES`.
        growth: since when, how fast; bytes an epoch.
        limit: bytes; of the container, or of the device for CUDA; None if there is none or it is unknown.
        limit_epoch: the epoch in which it is reached at this rate; None without a limit.
    """

    what: str
    growth: Growth
    limit: int | None
    limit_epoch: int | None

    @property
    def text(self) -> str:
        """One line for people."""
        line = f"{NAMES[self.what]} grows by {size(round(self.growth.slope))} an epoch since epoch {self.growth.since}"
        if self.limit is None or self.limit_epoch is None:
            return f"{line}; its limit is unknown"
        whose = "the device's" if self.what == "cuda_reserved" else "the container's limit of"
        return f"{line}: {whose} {size(self.limit)} is reached in epoch {self.limit_epoch} at this rate"


def grown(history: Sequence[tuple[int, Memory]]) -> tuple[Grown, ...]:
    """The kinds that grow, in the order of `NAMES`.

    Args:
        history: the memory at the end of each epoch of one process.
    """
    if not history:
        return ()
    found = {what: growth for what in NAMES if (growth := estimate(series(history, what))) is not None}
    return tuple(_forecast(what, growth, found.get("cgroup"), history) for what, growth in found.items())


def causes(found: Sequence[Grown]) -> tuple[Grown, ...]:
    """Those that are worth a word of their own: no shares, and the container only if no part of it explains it."""
    parts = [g for g in found if g.what in PARTS]
    whole = next((g for g in found if g.what == "cgroup"), None) or next((g for g in found if g.what == "anon"), None)
    explained = sum(g.growth.slope for g in parts)
    if whole is not None and explained < whole.growth.slope / 2:
        parts.append(whole)
    return tuple(g for g in found if g in parts or g.what == "cuda_reserved")


def phase_kind(what: str) -> str:
    """The kind of `PHASE_KINDS` that shows the phase of a growth; "" if none does."""
    return what if what in PHASE_KINDS else "anon" if what == "cgroup" else ""


def main_phase(epochs: Sequence[Mapping[str, Mapping[str, int]]], kind: str, slope: float) -> str:
    """The phase in which a growth happens; "" if it is spread, or cannot be told.

    Args:
        epochs: what each phase kept in each epoch, as `MemoryWatch.take` gives it.
        kind: the kind of memory.
        slope: how much of it an epoch keeps, in bytes.
    """
    totals: dict[str, int] = {}
    for epoch in epochs:
        for phase, kept in epoch.items():
            if kind in kept:
                totals[phase] = totals.get(phase, 0) + kept[kind]
    if not totals or not epochs:
        return ""
    each = {phase: total / len(epochs) for phase, total in totals.items()}
    largest = max(each, key=lambda phase: each[phase])
    others = max((abs(v) for phase, v in each.items() if phase != largest), default=0.0)
    return largest if each[largest] >= MAINLY * slope and others <= (1 - MAINLY) * slope else ""


def series(history: Sequence[tuple[int, Memory]], what: str) -> list[tuple[int, float | None]]:
    """One kind by epoch; of the container what the kernel cannot take back."""
    return [(epoch, memory.held if what == "cgroup" else getattr(memory, what)) for epoch, memory in history]


def memory_of(line: Mapping[str, object]) -> Memory:
    """The memory that a `memory` line tells; what is no number of bytes is unknown."""
    values = {k: v for k in KEYS if isinstance(v := line.get(k), int | float) and not isinstance(v, bool)}
    return Memory(**{k: round(v) for k, v in values.items() if 0 <= v < UNLIMITED})


def _forecast(what: str, growth: Growth, container: Growth | None, history: Sequence[tuple[int, Memory]]) -> Grown:
    _, memory = history[-1]
    if what == "cuda_reserved":
        limit = memory.cuda_total
        return Grown(what, growth, limit, growth.reaches(limit) if limit is not None else None)
    limit, used = memory.limit, memory.held if memory.held is not None else memory.cgroup
    if limit is None or used is None:
        return Grown(what, growth, limit, None)
    if container is not None:
        # Other ranks in the same container grow too: its own pace tells.
        return Grown(what, growth, limit, container.reaches(limit))
    # All else stays as it is.
    return Grown(what, growth, limit, growth.reaches(growth.level + limit - used))
