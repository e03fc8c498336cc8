"""What sets the pace of a step, on one rank and on all: measured means put together so that a part can be changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kfp_gate.diagnosis.loader_queue import LONGEST, Loader, fit, play
from kfp_gate.diagnosis.runs import Run
from kfp_gate.diagnosis.spread import Draws, drawn_medians
from kfp_gate.diagnosis.steady import COMPUTE, DATA, TRANSFER, Epochs, Floats

PLAYED = 6
"""Ranks whose queues are played: the slowest. A change that holds on all ranks makes no other one the slowest."""

USUAL_PREFETCH = 2
"""torch's default, where the run does not say."""

BUSY, IDLE = 0.9, 0.5
"""Share of its time that a device computes, above which it, and below which the host, sets the pace."""


@dataclass(frozen=True)
class Pace:
    """One rank's step: what it waits for data, and the rest of its own work.

    Attributes:
        wait: (B,) seconds. Without loader processes this is preparation itself.
        rest: (B,) seconds of its own, without waiting for other ranks.
        compute: (B,) seconds of its own forward, loss and backward.
        loader: None without loader processes, or if it keeps up and its production is unknown.
    """

    draws: Draws
    steps: int
    idle: Floats
    wait: Floats
    rest: Floats
    compute: Floats
    ranks_on_node: int = 1
    fitted: bool = True

    @property
    def rank(self) -> int:
        return self.draws.of_rank.rank

    @property
    def workers(self) -> int | None:
        return self.draws.of_rank.workers

    @property
    def on_its_clock(self) -> bool:
        """Whether phases after the wait are known as work, not as the time that it took to queue it."""
        return not self.draws.of_rank.cuda or self.draws.has_device

    @property
    def own(self) -> Floats:
        return self.wait + self.rest

    @cached_property
    def pattern(self) -> Floats:
        return self.draws.patterns(min(self.steps, LONGEST))

    @cached_property
    def parts(self) -> dict[str, Floats]:
        return self.draws.parts()

    @cached_property
    def loader(self) -> Loader | None:
        if not self.workers or not self.fitted:
            return None
        made = np.sum(list(self.parts.values()), axis=0) if self.parts else None
        return fit(
            self.rest[:, None] * self.pattern, self.own, made, workers=self.workers, ahead=self._ahead,
            steps=self.steps, idle=self.idle,
        )  # fmt: skip

    @property
    def _ahead(self) -> int:
        return self.draws.of_rank.prefetch or USUAL_PREFETCH

    def share_of(self, members: Sequence[str]) -> Floats:
        """(B,) share of preparation that these loader parts take."""
        chosen = np.sum([self.parts[m] for m in members if m in self.parts] or [np.zeros_like(self.wait)], axis=0)
        whole = np.sum(list(self.parts.values()), axis=0) if self.workers else self.wait
        share: Floats = np.clip(np.divide(chosen, whole, out=np.zeros_like(whole), where=whole > 0), 0.0, 1.0)
        return share

    def changed(self, prepared: Floats | float = 0.0, saved: Floats | float = 0.0, times: int = 1) -> Floats:
        """(B,) seconds of its own with a share of preparation gone, seconds of the rest gone, more workers."""
        rest = np.clip(self.rest - saved, 0.0, None)
        kept = 1.0 - np.broadcast_to(np.asarray(prepared, dtype=float), rest.shape)
        if not self.workers:
            return self.wait * kept + rest
        if self.loader is None:
            # It keeps up, so that only its wait can go.
            return self.wait * kept / times + rest
        played = play(
            self.loader.production * kept[:, None] * self.loader.uneven, rest[:, None] * self.pattern,
            workers=self.workers * times, ahead=self._ahead, steps=self.steps, idle=self.idle,
        )  # fmt: skip
        left = np.where(self.loader.left_s > 0, self.loader.left_s * kept, self.loader.left_s)
        bound = self._cpu_bound(kept, rest)
        # Bounded by what was measured: cores that gave it once can give it again.
        return np.maximum(played / self.steps + left, np.minimum(bound, self.own) if bound is not None else 0.0)

    def beside(self, workers: int) -> Floats:
        """(B,) seconds of its own if preparation ran in loader processes; now it has none."""
        played = play(
            self.wait[:, None], self.rest[:, None] * self.pattern, workers=workers, ahead=USUAL_PREFETCH,
            steps=self.steps, idle=self.idle,
        )  # fmt: skip
        bound = self._cpu_bound(np.ones_like(self.rest), self.rest)
        return np.maximum(played / self.steps, bound if bound is not None else 0.0)

    @property
    def cores_known(self) -> bool:
        return self._cpu_bound(np.ones_like(self.rest), self.rest) is not None

    def _cpu_bound(self, kept: Floats, rest: Floats) -> Floats | None:
        """(B,) seconds below which the cores cannot get through a step's CPU seconds; None: unknown."""
        steps = self.draws.of_rank
        if steps.cores is None:
            return None
        demand = np.zeros_like(rest)
        if self.workers:
            cpu = self.draws.parts(cpu=True)
            if not cpu:
                return None
            demand = demand + np.sum(list(cpu.values()), axis=0) * kept
        if not steps.cuda:
            # A host that waits for its GPU spins: that is no demand.
            if steps.main_cores is None:
                return None
            share = np.divide(rest, self.rest, out=np.ones_like(rest), where=self.rest > 0)
            demand = demand + steps.main_cores * self.draws.step * share
        bound: Floats = demand * self.ranks_on_node / steps.cores
        return bound


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
        """(B,) seconds of a step if every rank had no more work than the one with the least."""
        least: Floats = np.min([p.own for p in self.paces], axis=0) + self.straggling
        return least

    def computing(self, pace: Pace, share: float, busy: float | None) -> Floats | None:
        """(B,) seconds a step that less work of forward, loss and backward saves; None: unknown."""
        draws, work = pace.draws, pace.compute
        if not draws.of_rank.cuda:
            return share * work
        if not draws.has_device:
            return None
        queued = draws.host(*COMPUTE)
        if queued[0] <= 0.5 * work[0]:
            return np.clip(work - np.maximum((1 - share) * work, queued), 0.0, None)
        # The host may wait inside these phases, and then its time says nothing about queueing.
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
        return f"the loader {'sets the pace' if pace.loader.bound else 'keeps up'}: {times}"

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


def _largest(of_ranks: Sequence[Floats]) -> Floats:
    largest: Floats = np.max(of_ranks, axis=0)
    return largest


def _ms(seconds: Floats) -> str:
    return f"{1000 * float(seconds[0]):.3g} ms"
