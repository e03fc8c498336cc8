"""What an epoch would take if one thing were different, from what was measured.

The model. An epoch is its steps, and beside them validation, checkpoints and what lies between:

    epoch = steps * step + validation + checkpoint + between

Without loader processes a step is the sum of its phases, and saving x seconds of one saves x seconds of the step
(Amdahl 1967). With loader processes preparation runs beside the step, and what is seen of it is the wait that is left
over: the queue of `loader_queue` is fitted to the measured production of the workers and the measured step, and played
again with the change. A loader that sets the pace gives nothing for a faster device, and a loader that keeps up gives
nothing for faster reads. With several ranks each step ends with the slowest: a rank's own time is its step without what
it waits for others in forward and backward.

A CPU that is shared bounds every change: cores cannot give more seconds a second than there are, so a step takes at
least (CPU seconds of the loader's and the main process) / cores, where these are known.

On a GPU the host only queues work in forward, loss and backward. Their times, and those of transfer and optimizer, are
the device clock's or they are unknown. Less work for the device saves, in each phase, down to what the host needs to
queue it. Where the host takes nearly as long as the device it may be waiting, or be the slower one: a profile window
tells, else there is no row.

Intervals hold 90% and come from drawing the stretches of steps (blocks of about 5 s), and the epochs, again with
replacement, widened for few of them (Hesterberg 2015, "What Teachers Should Know About the Bootstrap", 4.1.1). They say
how sure the measurement is, not how good the model.

Limits: a change is thought to leave everything else as it is. Faster preparation also frees cores for a step on the
same CPU, twice the workers also ask twice as much of the storage, a smaller model also validates faster: none of this
is in the numbers. What cannot be told from the run has no row, and `estimate` says why.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from kfp_gate.diagnosis.findings import PhaseShare, Scenario
from kfp_gate.diagnosis.measured.spread import Draws, interval
from kfp_gate.diagnosis.measured.steady import OPTIMIZER, TRANSFER, Epochs, Floats, number, whole_epochs
from kfp_gate.diagnosis.pacing.all_ranks import Ranks, ranks_of
from kfp_gate.diagnosis.pacing.pace import Pace
from kfp_gate.diagnosis.reading.runs import Run

READS = ("open", "read")
SMALL = 0.01
"""A phase below this share of the epoch has no rows of its own."""

_TITLES = {TRANSFER: "transfer", OPTIMIZER: "optimizer"}


@dataclass(frozen=True)
class Estimate:
    """Seconds of a steady epoch with its 90% interval, the scenarios, and why others are not among them.

    `epoch_s` is None if it is not known how many steps an epoch has. `steps_only`: no epoch has ended, so that
    validation, checkpoints and what lies between are not in it.
    """

    epoch_s: float | None
    low: float | None = None
    high: float | None = None
    scenarios: tuple[Scenario, ...] = ()
    unknown: tuple[str, ...] = ()
    steps_only: bool = False


def phase_shares(run: Run) -> tuple[PhaseShare, ...]:
    """Where a steady step of rank 0 goes: the device's clock where there is one, else the host's.

    The phases do not overlap, and their shares sum to 1. Empty if the run has no steady steps.
    """
    draws = Draws.of(run, 0)
    if draws is None:
        return ()
    step = draws.step
    found = []
    for name in draws.names():
        seconds = draws.phase(name)
        low, high = interval(seconds, draws.blocks)
        point = float(seconds[0])
        # An interval that is widened for few stretches may reach below nothing; a phase does not.
        found.append(PhaseShare(name, point, max(low, 0.0), high, point / float(step[0]) if step[0] else 0.0))
    return tuple(found)


def scenarios(run: Run) -> tuple[float | None, tuple[Scenario, ...]]:
    """Seconds of a steady epoch (None: unknown), and what it would take after one change each. See the module."""
    found = estimate(run)
    return found.epoch_s, found.scenarios


def estimate(run: Run) -> Estimate:
    """As `scenarios`, with the interval of the epoch and the reasons for what is missing."""
    epochs = whole_epochs(run)
    ranks = ranks_of(run, epochs)
    if ranks is None or not epochs.steps:
        what = (
            "no steps after the warm-up were recorded"
            if ranks is None
            else "it is not known how many steps an epoch has"
        )
        return Estimate(None, unknown=(what,))
    table = _Table(run, epochs, ranks)
    rows = tuple(table.rows())
    low, high = table.interval(table.now)
    return Estimate(float(table.now[0]), low, high, rows, tuple(table.unknown), not len(epochs.validation))


class _Table:
    """The rows, one change after another; `unknown` fills while they are made."""

    def __init__(self, run: Run, epochs: Epochs, ranks: Ranks) -> None:
        self.run, self.ranks, self.steps = run, ranks, epochs.steps or 0
        self.unknown: list[str] = []
        self.validation, self.checkpoint = ranks.beside(epochs.validation), ranks.beside(epochs.checkpoint)
        self.waited = ranks.beside(epochs.waited)
        self.outside = self.validation + self.checkpoint + ranks.beside(epochs.between)
        self.now = ranks.step() * self.steps + self.outside

    def rows(self) -> Iterator[Scenario]:
        yield from self._preparation()
        yield from self._compute()
        for name in (TRANSFER, OPTIMIZER):
            yield from self._phase(name)
        for name, seconds in (("validation", self.validation), ("checkpoints", self.checkpoint)):
            if seconds[0] >= SMALL * self.now[0]:
                for word, share in (("halved", 0.5), ("free", 1.0)):
                    yield self._row(f"{name} {word}", self.now - share * seconds)
        if self.waited[0] >= SMALL * self.now[0]:
            waited = np.minimum(self.waited, self.checkpoint)
            yield self._row("no waiting for uploads", self.now - waited, "the rest of the checkpoint stays")
        yield from self._workers()
        if len(self.ranks.paces) > 1:
            name = f"all {len(self.ranks.paces)} ranks as fast as the fastest"
            yield self._row(
                name, self._epoch(self.ranks.evened()), "the fastest: the rank with the least work of its own"
            )

    def interval(self, seconds: Floats) -> tuple[float, float]:
        return interval(seconds, self.ranks.blocks)

    def _row(self, change: str, seconds: Floats, note: str = "") -> Scenario:
        # A change that removes work never costs time: what rounding or a draw says otherwise is not said.
        seconds = np.clip(seconds, 0.0, None)
        low, high = self.interval(seconds)
        if self.ranks.blocks < 2:
            note = "; ".join(filter(None, [note, "spread unknown: a single stretch of steps"]))
        return Scenario(change, float(seconds[0]), max(0.0, low), high, note)

    def _no_row(self, change: str, why: str) -> None:
        reason = f"{change.removesuffix(' halved').removesuffix(' free')}: {why}"
        if reason not in self.unknown:
            self.unknown.append(reason)

    def _epoch(self, step: Floats) -> Floats:
        return step * self.steps + self.outside

    def _preparation(self) -> Iterator[Scenario]:
        if any(pace.workers is None for pace in self.ranks.paces):
            self.unknown.append("preparation: it is not known whether loader processes ran")
            return
        note = self.ranks.preparation_note()
        yield self._row("preparation halved", self._epoch(self.ranks.step(prepared=lambda _: 0.5)), note)
        yield self._row("preparation free", self._epoch(self.ranks.step(prepared=lambda _: 1.0)), note)
        parts = self.ranks.slowest.draws.parts()
        if not parts:
            self.unknown.append("reads and the heaviest part of preparation: the loader's parts were not recorded")
            return
        heaviest = max((p for p in parts if p not in ("other", *READS)), key=lambda p: float(parts[p][0]), default=None)
        groups: dict[str, tuple[str, ...]] = {"reads": READS}
        if heaviest is not None:
            groups[heaviest] = (heaviest,)
        for name, members in groups.items():
            for word, share in (("halved", 0.5), ("free", 1.0)):
                faster = partial(_share_of_parts, members=members, share=share)
                yield self._row(f"{name} {word}", self._epoch(self.ranks.step(prepared=faster)), note)

    def _compute(self) -> Iterator[Scenario]:
        busy = _device_busy(self.run)
        for word, share in (("halved", 0.5), ("free", 1.0)):
            saved = {p.rank: s for p in self.ranks.paces if (s := self.ranks.computing(p, share, busy)) is not None}
            if len(saved) < len(self.ranks.paces):
                self._no_row("device compute", self.ranks.why_no_compute(busy))
            else:
                yield from self._faster(f"device compute {word}", saved)

    def _phase(self, name: str) -> Iterator[Scenario]:
        saved = {p.rank: p.draws.phase(name) for p in self.ranks.paces if p.on_its_clock}
        if len(saved) < len(self.ranks.paces):
            self.unknown.append(f"{_TITLES[name]}: no device clock, and the host's says only how long it queued")
            return
        if max(float(s[0]) for s in saved.values()) * self.steps < SMALL * self.now[0]:
            return
        for word, share in (("halved", 0.5), ("free", 1.0)):
            yield from self._faster(f"{_TITLES[name]} {word}", {k: share * s for k, s in saved.items()})

    def _faster(self, change: str, saved: Mapping[int, Floats]) -> Iterator[Scenario]:
        """Less of what follows the wait for data."""
        if any(p.workers is None for p in self.ranks.paces):
            self._no_row(change, "it is not known whether loader processes ran")
            return
        if any(p.fitted and p.workers and p.loader is None for p in self.ranks.paces):
            self._no_row(change, "the loader keeps up, and how much faster it could go was not recorded")
            return
        step = self.ranks.step(saved=lambda pace: saved[pace.rank])
        yield self._row(change, self._epoch(step), self.ranks.pace_note())

    def _workers(self) -> Iterator[Scenario]:
        found = self.ranks.more_workers()
        if isinstance(found, str):
            self.unknown.append(found)
            return
        step, change, note = found
        yield self._row(change, self._epoch(step), note)


def _share_of_parts(pace: Pace, members: tuple[str, ...], share: float) -> Floats:
    """Share of preparation that goes when `share` of these parts does; (B,)."""
    return share * pace.share_of(members)


def _device_busy(run: Run) -> float | None:
    """Seconds a step in which the device ran kernels, from a profile window of rank 0; None if there was none."""
    for line in reversed(list(run.lines("profile"))):
        busy, steps = number(line.get("device_busy_s")), number(line.get("steps"))
        if busy is not None and steps:
            return busy / steps
    return None
