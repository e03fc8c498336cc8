"""Stretches of training steps, as `window` lines of the timeline.

A stretch lasts some seconds, and each of the first steps of a process stands alone: compilation, warm-up and caches
are no steady state. Every step of an epoch is in exactly one line.
"""

import time
from typing import Any

from kfp_gate.observing.loading import Made
from kfp_gate.observing.phases import DATA, OTHER, Phases
from kfp_gate.observing.timeline import Timeline

WINDOW_S = 5.0
"""How often a stretch of steps is written to the timeline."""

CLOSE_WINDOWS, FAR_WINDOW_S = 180, 30.0
"""Stretches at the full rate; a run of days writes longer ones after that, and its timeline stays readable."""

WARM_STEPS = 3
"""Steps of a process that are kept apart."""

KEPT_STEPS = 32
"""Steps of a stretch whose own times are written."""

USUAL, PREPARED = "usual", "prepared"


class Windows:
    """The windows of one process; always between `begin` and `end` of an epoch."""

    def __init__(self, timeline: Timeline, phases: Phases) -> None:
        self.timeline, self.phases = timeline, phases
        self.input, self.profiled, self.warm = USUAL, False, False
        self.count = 0
        """Windows that were written."""
        self._taken = self._epoch = self._next = 0
        self._images: int | None = 0
        self._moved: int | None = 0
        self._batches = self._bytes = 0
        self._since = self._waited = 0.0
        self._start()

    @property
    def taken(self) -> int:
        """Steps of this process so far."""
        return self._taken

    def begin(self, epoch: int, batch: int) -> None:
        """An epoch begins with this batch, counted over all epochs from 0."""
        self._epoch, self._next = epoch, batch
        self._start()
        self.phases.enter(DATA)
        self._since = time.perf_counter()

    def step(self, *, images: int | None, moved: int | None, made: Made | None, ready: int | None) -> float:
        """A step is done, and the wait for the next batch begins; returns its seconds.

        Args:
            images: of the step.
            moved: bytes of the tensors that went to the device.
            made: how the batch was made; None: unknown.
            ready: batches that the loader has ready now; None: unknown.
        """
        self.phases.step_done()
        self.phases.enter(DATA)
        now, waited = time.perf_counter(), self.phases.spent(DATA)
        seconds = now - self._since
        self._each.append((waited - self._waited, seconds))
        self._since, self._waited = now, waited
        self._images = None if images is None or self._images is None else self._images + images
        self._moved = None if moved is None or self._moved is None else self._moved + moved
        if made is not None:
            self._batches += 1
            self._bytes += made.bytes
            for name, values in made.parts.items():
                total = self._parts.setdefault(name, [0.0, 0.0, 0])
                for i, value in enumerate(values):
                    total[i] += value
        if ready is not None:
            self._ready.append(ready)
        self._taken += 1
        self._next += 1
        if self._taken <= WARM_STEPS:
            self._write(warmup=True)
        elif now - self._began >= (WINDOW_S if self.count < CLOSE_WINDOWS else FAR_WINDOW_S):
            self._write()
        return seconds

    def switch(self, *, input: str = USUAL, profiled: bool = False, warm: bool = False) -> None:
        """The steps from here on get their batches elsewhere, are watched closely, or are no steady state yet: a new
        stretch begins, now."""
        self._write()
        self.input, self.profiled, self.warm = input, profiled, warm

    def end(self) -> None:
        """The epoch's steps are over. Waits for the device, which is about to be asked for a result anyway."""
        self.phases.enter(OTHER)
        self.phases.settle()
        self._write()

    def _start(self) -> None:
        self._began = time.perf_counter()
        self._first = self._next
        self._host, self._device = self.phases.so_far(), self.phases.device_so_far()
        self._since, self._waited = self._began, self.phases.spent(DATA)
        self._each: list[tuple[float, float]] = []
        self._images, self._moved = 0, 0
        self._batches = self._bytes = 0
        self._parts: dict[str, list[float]] = {}
        self._ready: list[int] = []

    def _write(self, *, warmup: bool = False) -> None:
        if not self._each:
            self._start()
            return
        host, device = self.phases.so_far(), self.phases.device_so_far()
        self.timeline.write(
            "window", epoch=self._epoch, batches=[self._first, self._next - 1], steps=len(self._each),
            images=self._images, warmup=warmup or self.warm, input=self.input, profiled=self.profiled,
            seconds=_grown(self._host, host), device=_grown(self._device or {}, device) if device is not None else None,
            each=[[round(d, 5), round(t, 5)] for d, t in evenly(self._each, KEPT_STEPS)], bytes=self._moved,
            loader=self._loader(),
        )  # fmt: skip
        self.count += 1
        self._start()

    def _loader(self) -> dict[str, Any] | None:
        if not self._batches:
            return None
        return {
            "batches": self._batches, "bytes": self._bytes,
            "parts": {n: [round(w, 5), round(c, 5), int(k)] for n, (w, c, k) in self._parts.items()},
            "ready": round(sum(self._ready) / len(self._ready), 2) if self._ready else None,
        }  # fmt: skip


def evenly(items: list[tuple[float, float]], count: int) -> list[tuple[float, float]]:
    """At most `count` of the items, evenly spread from the first to the last.

    >>> evenly([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)], 3)
    [(0, 0), (2, 2), (4, 4)]
    """
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def _grown(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    return {k: round(s - before.get(k, 0.0), 6) for k, s in now.items() if s - before.get(k, 0.0) > 5e-7}
