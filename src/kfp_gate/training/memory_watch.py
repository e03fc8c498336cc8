"""Watches a rank's memory from epoch to epoch, and says before it happens that a limit will be reached."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kfp_gate.observing.memory import Memory
from kfp_gate.observing.memory_growth import NAMES, PHASE_KINDS, Grown, causes, grown, main_phase, phase_kind, series
from kfp_gate.observing.timeline import Timeline

log = logging.getLogger(__name__)

MOVED, MOVED_EPOCHS = 0.25, 5
"""A forecast is told again if it moved by this share of the epochs that were left, or by so many epochs."""

STILL = 3
"""Epochs without growth after which it is said to have ended."""

LARGE = 0.25
"""Where no limit is known: growth by this share since it began is told."""

SHARE, SHARES_S = 0.001, 0.012
"""Proportional sets take at most this share of the time: short epochs go without. Seconds of CPU for each GiB that is
mapped, as measured once; after that the last reading's."""


class MemoryWatch:
    """One per rank; it reads where phases change, which takes about 0.1 ms each time."""

    def __init__(self, timeline: Timeline, *, epochs: int, read: Callable[..., Memory]) -> None:
        """`read` gives the memory now; with `children` and `pss` as `read_memory` takes them."""
        self.timeline, self.epochs, self._read = timeline, epochs, read
        self._history: list[tuple[int, Memory]] = []
        self._phases: list[Mapping[str, Mapping[str, int]]] = []
        self._told: dict[str, Grown] = {}
        self._before: Memory | None = None
        self._start: Memory | None = None
        self._kept: dict[str, dict[str, int]] = {}
        self._shares_cost_s, self._shared_at = 0.0, time.monotonic()
        timeline.on_phase = self.phase_ends

    def phase_ends(self, phase: str, following: str) -> None:
        """What this phase has kept is what there is more of at its end."""
        # Before the first step: what loader processes share with this one when they are forked.
        first = following == "train" and not self._history and self._start is None
        try:
            now = self._read(children=first)
        except RuntimeError:
            # The device may be the reason why the phase ends.
            self._before = None
            return
        if first:
            self._start = now
        if self._before is not None:
            kept = self._kept.setdefault(phase or "other", dict.fromkeys(PHASE_KINDS, 0))
            for kind in PHASE_KINDS:
                a, b = getattr(self._before, kind), getattr(now, kind)
                if a is None or b is None:
                    kept.pop(kind, None)
                elif kind in kept:
                    kept[kind] += b - a
        self._before = now

    def read(self) -> Memory:
        """The reading of an epoch's end: with child processes, and with proportional sets where there is the time."""
        memory = self._read(children=True)
        mapped = (memory.rss or 0) + (memory.children or 0)
        cost_s = max(self._shares_cost_s, SHARES_S * mapped / (1 << 30))
        if time.monotonic() - self._shared_at < cost_s / SHARE:
            return memory
        started = time.thread_time()
        memory = self._read(children=True, pss=True)
        self._shares_cost_s, self._shared_at = time.thread_time() - started, time.monotonic()
        return memory

    def take(self) -> dict[str, Any]:
        """More for an epoch's `memory` line: what each phase kept since the last call, and how memory was at the start.

        Kinds that are unknown are left out.
        """
        kept, self._kept = self._kept, {}
        self._phases.append(kept)
        if self._history or self._start is None:
            return {"by_phase": kept}
        return {"by_phase": kept, "at_start": self._start.values()}

    def epoch_ends(self, epoch: int, memory: Memory) -> None:
        """Take up an epoch's reading; a warning in the log if a limit is ahead, once for each kind.

        Args:
            epoch: its number; one that is done again replaces itself.
            memory: at its end, with child processes.
        """
        self._history = [(e, m) for e, m in self._history if e < epoch] + [(epoch, memory)]
        found = {g.what: g for g in causes(grown(self._history))}
        for what in [w for w in self._told if w not in found and self._stands_still(w)]:
            log.info("%s does not grow any more", NAMES[what])
            del self._told[what]
        for what, now in found.items():
            if self._matters(now, memory) and self._is_news(now, self._told.get(what), epoch):
                self._told[what] = now
                phase = self._phase(now)
                log.warning("%s%s; see docs/oom.md", now.text, f", mainly in the phase {phase}" if phase else "")
                self.timeline.write(
                    "growth", what=what, phase=phase, since=now.growth.since, slope=round(now.growth.slope),
                    low=round(now.growth.low), high=round(now.growth.high), limit=now.limit,
                    limit_epoch=now.limit_epoch, text=now.text,
                )  # fmt: skip

    def _stands_still(self, what: str) -> bool:
        """Whether the last epochs added less than a third of what was foretold: a pace that changes is no end."""
        values = [v for _, v in series(self._history[-1 - STILL :], what)]
        first, last = values[0], values[-1]
        return first is not None and last is not None and last - first < self._told[what].growth.slope * STILL / 3

    def _matters(self, now: Grown, memory: Memory) -> bool:
        if now.limit_epoch is not None:
            return now.limit_epoch <= self.epochs
        rise = now.growth.slope * (now.growth.last - now.growth.since)
        return rise >= LARGE * (now.growth.level - rise)

    def _is_news(self, now: Grown, told: Grown | None, epoch: int) -> bool:
        if told is None:
            return True
        if now.limit_epoch is None or told.limit_epoch is None:
            return now.limit_epoch != told.limit_epoch
        moved = abs(told.limit_epoch - now.limit_epoch)
        return moved > MOVED_EPOCHS or moved > max(MOVED * (told.limit_epoch - epoch), 1)

    def _phase(self, now: Grown) -> str:
        return main_phase(self._phases[-(now.growth.readings - 1) :], phase_kind(now.what), now.growth.slope)
