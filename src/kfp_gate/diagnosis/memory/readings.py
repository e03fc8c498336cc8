"""What each rank recorded of its memory: at the end of each epoch, by phase, and when its first step began."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kfp_gate.diagnosis.amounts import size
from kfp_gate.diagnosis.reading.runs import Line, Run
from kfp_gate.observing.memory import Memory
from kfp_gate.observing.memory_growth import PHASE_KINDS, Grown, grown, main_phase, memory_of, phase_kind

TOO_FAR = 30.0
"""Seconds between two samples beyond which nothing is said of what lies between them."""

BETWEEN = "between phases"
"""What was kept while the phase changed: which one did it was not seen."""

NO_LIMIT = 0.5
"""Urgency at most of what grows towards a limit that nobody knows."""

Kept = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True)
class RankMemory:
    """One rank since its worker was last started; what came before was another process's.

    Attributes:
        rank: its number.
        history: epoch and memory at its end, in order; of an epoch that was done again the later one.
        kept: what each phase kept in each epoch of `history`, by kind, in bytes; unknown kinds are absent.
        start: memory when the first step began, with the shares of the loader processes; None if it was not recorded.
        samples: the sampler's lines.
        epochs: how many epochs the run is to have; None: unknown.
        alone: whether it is the run's only rank, so that its container's memory is its own.
        end: memory when it failed; None if it did not, or did not say.
    """

    rank: int
    history: tuple[tuple[int, Memory], ...]
    kept: tuple[Kept, ...]
    start: Memory | None
    samples: tuple[Line, ...]
    epochs: int | None
    alone: bool = True
    end: Memory | None = None

    @property
    def grown(self) -> tuple[Grown, ...]:
        return grown(self.history)

    def phase(self, growth: Grown) -> str:
        """The phase in which it grows; "" if it is spread, or cannot be told."""
        kept = self.kept[-(growth.growth.readings - 1) :]
        return main_phase(kept, phase_kind(growth.what), growth.growth.slope)

    def by_phase(self, growth: Grown) -> dict[str, float]:
        """Bytes that each phase kept in an epoch while it grew, on average; empty if that was not seen."""
        kind, kept = phase_kind(growth.what), self.kept[-(growth.growth.readings - 1) :]
        phases = {phase for epoch in kept for phase, kinds in epoch.items() if kind in kinds}
        return {p: sum(epoch.get(p, {}).get(kind, 0) for epoch in kept) / len(kept) for p in phases}

    @property
    def last(self) -> Memory:
        """The last reading; all unknown without one."""
        return self.history[-1][1] if self.history else Memory()

    @property
    def limit(self) -> int | None:
        readings = [m for _, m in self.history] + ([self.end] if self.end is not None else [])
        return next((m.limit for m in reversed(readings) if m.limit is not None), None)


def rank_memories(run: Run) -> list[RankMemory]:
    """Every rank that recorded anything."""
    return [_rank_memory(run, rank) for rank in sorted(run.ranks)]


def sums(memory: Memory) -> list[str]:
    """Sums of resident sizes, and with shared pages once, against what the container holds."""
    if memory.rss is None or not memory.children:
        return []
    text = f"resident sizes add up to {size(memory.rss + memory.children)}"
    if memory.pss is not None and memory.children_pss is not None:
        text += f", with shared pages once to {size(memory.pss + memory.children_pss)}"
    return [f"{text}; the container holds {size(memory.held)}" if memory.held is not None else text]


def _rank_memory(run: Run, rank: int) -> RankMemory:
    lines = run.last_attempt(rank)
    by_epoch = {x["epoch"]: x for x in lines if x.get("kind") == "memory" and isinstance(x.get("epoch"), int)}
    told = [by_epoch[e] for e in sorted(by_epoch)]
    samples = tuple(x for x in lines if x.get("kind") == "sample")
    start = next((memory_of(x["at_start"]) for x in told if isinstance(x.get("at_start"), Mapping)), None)
    end = next((memory_of(x) for x in reversed(lines) if x.get("kind") == "failure"), None)
    conditions = next((x for x in lines if x.get("kind") == "conditions"), run.conditions)
    epochs = conditions.get("epochs")
    return RankMemory(
        rank, tuple((x["epoch"], memory_of(x)) for x in told), _kept(told, samples), start, samples,
        int(epochs) if isinstance(epochs, int | float) and math.isfinite(epochs) and epochs > 0 else None,
        len(run.ranks) == 1 and conditions.get("ranks") in (None, 1), end,
    )  # fmt: skip


def _kept(told: Sequence[Line], samples: Sequence[Line]) -> tuple[Kept, ...]:
    """As the worker recorded it at each change of phase; in older timelines from the samples within each phase."""
    if any(isinstance(x.get("by_phase"), Mapping) for x in told):
        return tuple(_numbers(x.get("by_phase")) for x in told)
    ends = [x["mono"] for x in told if isinstance(x.get("mono"), int | float)]
    if len(ends) != len(told) or ends != sorted(ends):
        return ()
    kept: list[dict[str, dict[str, int]]] = [{} for _ in told]
    for before, after in pairwise(samples):
        a, b = before.get("mono"), after.get("mono")
        if not isinstance(a, int | float) or not isinstance(b, int | float) or not 0 < b - a <= TOO_FAR:
            continue
        epoch = bisect_left(ends, b)
        if epoch >= len(ends):
            continue
        # Between two phases one of them, or a third that was too short to be seen, may have done it.
        same = before.get("phase") == after.get("phase")
        phase = kept[epoch].setdefault(str(after.get("phase") or "other") if same else BETWEEN, {})
        for kind in PHASE_KINDS:
            x, y = before.get(kind), after.get(kind)
            if isinstance(x, int | float) and isinstance(y, int | float):
                phase[kind] = phase.get(kind, 0) + round(y - x)
    return tuple(kept)


def _numbers(value: object) -> Kept:
    if not isinstance(value, Mapping):
        return {}
    return {
        str(phase): {
            str(k): round(v) for k, v in kinds.items()
            if isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v)
        }
        for phase, kinds in value.items() if isinstance(kinds, Mapping)
    }  # fmt: skip
