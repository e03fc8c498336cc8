"""A step on all ranks: each ends with the slowest."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kfp_gate.diagnosis.measured.spread import Draws, drawn_medians
from kfp_gate.diagnosis.measured.steady import COMPUTE, DATA, TRANSFER, Epochs, Floats
from kfp_gate.diagnosis.pacing.pace import Pace
from kfp_gate.diagnosis.reading.runs import Run

PLAYED = 6
"""Ranks whose queues are played: the slowest. A change that holds on all ranks makes no other one the slowest."""

BUSY, IDLE = 0.9, 0.5
"""Share of its time that a device computes, above which it, and below which the host, sets the pace."""

QUICK = 0.5
"""Share of the device's time in which the host queues its work, up to which the host surely does not hold it up."""

_QUEUES = ("forward", "backward")
"""Phases in which the host has no reason to wait for the device."""


@dataclass(frozen=True)
class Ranks:
    """All ranks, the slowest first. A step takes as long as the slowest, and `straggling` on top: what differs from
    step to step between the ranks."""

    paces: tuple[Pace, ...]
    straggling: Floats

    @property
    def slowest(self) -> Pace:
        return self.paces[0]

    @property
    def blocks(self) -> int:
        return min(p.draws.blocks for p in self.paces)

    @staticmethod
    def beside(epochs: Floats) -> Floats:
        """(B,) seconds an epoch of what was measured once an epoch."""
        return drawn_medians(epochs)

    def step(
        self, *, prepared: Callable[[Pace], Floats | float] | None = None,
        saved: Callable[[Pace], Floats | float] | None = None, times: int = 1,
    ) -> Floats:  # fmt: skip
        """(B,) seconds of a step after a change on every rank; without one, as measured."""
        if prepared is None and saved is None and times == 1:
            return _largest([p.own for p in self.paces]) + self.straggling
        after = [
            p.changed(prepared(p) if prepared else 0.0, saved(p) if saved else 0.0, times)
            for p in self.paces
            if p.fitted
        ]
        return _largest(after) + self.straggling

    def evened(self) -> Floats:
        """(B,) seconds of a step if every rank had no more work than the one with the least.

        A rank that waits for others has its images ready: what its loader needs for them counts, not what it waits.
        """
        least = np.min([np.maximum(p.own, p.loading) for p in self.paces], axis=0) + self.straggling
        evened: Floats = np.minimum(least, self.step())
        return evened

    def computing(self, pace: Pace, share: float, busy: float | None) -> Floats | None:
        """(B,) seconds a step that less work of forward, loss and backward saves; None: unknown."""
        draws, work = pace.draws, pace.compute
        if not draws.of_rank.cuda:
            return share * work
        if not draws.has_device:
            return None
        if float(draws.host(*_QUEUES)[0]) <= QUICK * float(draws.phase(*_QUEUES)[0]):
            # The loss may wait for results of its own, and then the host's time in it is not that of queueing.
            return _sum(_shorter(draws.phase(p), draws.host(p), share) for p in COMPUTE)
        if busy is None:
            return None
        active = busy / max(1e-12, float(draws.step[0] - draws.phase(DATA)[0]))
        return share * work if active >= BUSY else np.zeros_like(work) if active <= IDLE else None

    def why_no_compute(self, busy: float | None) -> str:
        """Why `computing` gave nothing."""
        if not all(p.on_its_clock for p in self.paces):
            return "no device clock, and the host's says only how long it queued"
        if busy is None:
            return "the host takes as long as the device, and may wait or be the slower one: a profile window tells"
        return "the device is neither busy nor idle for most of its time"

    def more_workers(self) -> tuple[Floats, str, str] | str:
        """(B,) seconds of a step with more loader processes, what was changed, and a note; or why it is unknown."""
        counts = {p.workers for p in self.paces}
        if None in counts:
            return "more loader workers: it is not known whether loader processes ran"
        change = "two loader workers in place of none" if 0 in counts else "twice the loader workers"
        played = [p for p in self.paces if p.fitted]
        pressing = [p for p in played if not p.workers or (p.loader is not None and p.loader.bound)]
        if not all(p.cores_known for p in pressing):
            return f"{change}: it is not known how much CPU they have and need"
        crowded = next((p for p in pressing if p.crowded is not None), None)
        if crowded is not None:
            return f"{change}: {crowded.crowded}"
        after = [p.changed(times=2) if p.workers else p.beside(2) for p in played]
        note = "storage is thought to serve twice as many readers as fast" if 0 not in counts else (
            "passing batches between processes is thought to cost nothing"
        )  # fmt: skip
        return _largest(after) + self.straggling, change, note

    def preparation_note(self) -> str:
        """How preparation and the rest of the step lie to each other, on the slowest rank."""
        pace = self.slowest
        if not pace.workers:
            return "no loader processes: preparation and the rest of the step take turns"
        if pace.loader is None:
            return f"the loader keeps up: at most its wait of {_ms(pace.wait)} a step can go"
        made = float(pace.loader.production[0, 0]) / pace.workers
        times = f"{_ms(np.array([made]))} a batch, the rest of the step {_ms(pace.rest)}"
        loader = pace.loader
        doing = "sets the pace" if loader.bound else "keeps up, but unevenly" if loader.uneven_wait else "keeps up"
        return f"the loader {doing}: {times}"

    def pace_note(self) -> str:
        """Why a faster step may bring nothing."""
        pace = self.slowest
        return self.preparation_note() if pace.workers and pace.loader is not None else ""


def ranks_of(run: Run, epochs: Epochs) -> Ranks | None:
    """The ranks of a run; None if no rank has steady steps."""
    drawn = [d for r in sorted(run.ranks) if (d := Draws.of(run, r)) is not None]
    if not drawn:
        return None
    nodes = [d.of_rank.node for d in drawn]
    idle = sum((drawn_medians(e) for e in (epochs.validation, epochs.checkpoint, epochs.between)), np.zeros(1))
    paces = []
    for draws, waited in zip(drawn, _waits_for_ranks(drawn), strict=True):
        wait = draws.wait()
        rest = np.clip(draws.step - wait - waited, 0.0, None)
        compute = np.clip(draws.phase(*COMPUTE) - waited, 0.0, None)
        paces.append(Pace(draws, max(1, epochs.steps or 0), idle, wait, rest, compute, nodes.count(draws.of_rank.node)))
    paces.sort(key=lambda p: -float(p.own[0]))
    paces = [replace(p, fitted=i < PLAYED) for i, p in enumerate(paces)]
    step = np.mean([d.step for d in drawn], axis=0)
    straggling = np.clip(step - _largest([p.own for p in paces]), 0.0, None) if len(paces) > 1 else 0 * step
    return Ranks(tuple(paces), straggling)


def _waits_for_ranks(drawn: Sequence[Draws]) -> list[Floats]:
    """(B,) seconds a step that each rank waits for others, which its clock counts as forward and backward.

    Gradients are exchanged in backward: the last rank waits least, so the shortest backward is all work. Buffers are
    sent by rank 0 as forward begins: where it comes later than another rank, that one's forward is longer by as much.
    """
    shortest = np.min([d.phase("backward") for d in drawn], axis=0)
    first = drawn[0]
    found = []
    for draws in drawn:
        later = first.phase(DATA, TRANSFER) - draws.phase(DATA, TRANSFER)
        longer = draws.phase("forward") - first.phase("forward")
        found.append(draws.phase("backward") - shortest + np.clip(np.minimum(later, longer), 0.0, None))
    return found


def _shorter(device: Floats, host: Floats, share: float) -> Floats:
    """(B,) seconds saved where a share of the device's work goes and the host queues it as before."""
    return np.clip(device - np.maximum((1 - share) * device, host), 0.0, None)


def _sum(of_phases: Iterable[Floats]) -> Floats:
    total: Floats = np.sum(list(of_phases), axis=0)
    return total


def _largest(of_ranks: Sequence[Floats]) -> Floats:
    largest: Floats = np.max(of_ranks, axis=0)
    return largest


def _ms(seconds: Floats) -> str:
    return f"{1000 * float(seconds[0]):.3g} ms"
