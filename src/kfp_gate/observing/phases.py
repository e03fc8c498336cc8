"""Where the time of a training step goes.

A step's time is cut at the moments where one phase ends and the next begins, so phases never overlap and their
sum is the time between the first and the last cut. Host clock: on a GPU the host's forward only queues work, so
device times come from a `DeviceClock` beside it and are reported under `device`, never mixed with these.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

DATA, TRANSFER, FORWARD = "data", "transfer", "forward"
LOSS, BACKWARD, OPTIMIZER = "loss", "backward", "optimizer"
VALIDATION, CHECKPOINT, OTHER = "validation", "checkpoint", "other"
STEP_PHASES = (DATA, TRANSFER, FORWARD, LOSS, BACKWARD, OPTIMIZER)
ALL_PHASES = (*STEP_PHASES, VALIDATION, CHECKPOINT, OTHER)


class DeviceClock(Protocol):
    """Marks on the device's own stream; resolved later, so that a step never waits for its own timing."""

    def mark(self, phase: str) -> None: ...
    def so_far(self) -> Mapping[str, float]:
        """Seconds by phase since the clock's start, of what the device has finished; never waits."""
        ...

    def settle(self) -> None:
        """Wait until the device has come to the last mark: for the time between epochs."""
        ...

    def collect(self) -> Mapping[str, float]:
        """Seconds by phase since the last call. Waits for the device: for the time between epochs."""
        ...


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds by phase since the last reset, the number of steps, and the device's seconds where it has a clock."""

    seconds: Mapping[str, float]
    steps: int
    device: Mapping[str, float] | None = None

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


class Phases:
    """A clock that is always in exactly one phase."""

    def __init__(self, device: DeviceClock | None = None) -> None:
        self.device = device
        self.on_change: Callable[[str], None] | None = None
        """Told of every cut, with the phase that begins; for the ranges of a profiler."""
        self.current = OTHER
        self.steps = 0
        self._since = time.perf_counter()
        self._seconds = dict.fromkeys(ALL_PHASES, 0.0)

    def enter(self, phase: str) -> None:
        """The current phase ends here and `phase` begins."""
        now = time.perf_counter()
        self._seconds[self.current] += now - self._since
        self._since, self.current = now, phase
        if self.device is not None:
            self.device.mark(phase)
        if self.on_change is not None:
            self.on_change(phase)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in `phase` for a block and return to the earlier one."""
        before = self.current
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def step_done(self) -> None:
        self.steps += 1

    def so_far(self) -> dict[str, float]:
        """Seconds by phase since the last `take`, without starting again."""
        self.enter(self.current)
        return dict(self._seconds)

    def spent(self, phase: str) -> float:
        """Seconds in a phase since the last `take`, without the stretch that is running now."""
        return self._seconds[phase]

    def device_so_far(self) -> dict[str, float] | None:
        """The device's seconds by phase since its start, as far as it is done; None without a device clock."""
        return dict(self.device.so_far()) if self.device is not None else None

    def settle(self) -> None:
        """Let the device come to where the host is."""
        if self.device is not None:
            self.device.settle()

    def take(self) -> PhaseTimes:
        """The times since the last call, and start again."""
        self.enter(self.current)
        times = PhaseTimes(dict(self._seconds), self.steps, self.device.collect() if self.device is not None else None)
        self._seconds = dict.fromkeys(ALL_PHASES, 0.0)
        self.steps = 0
        return times


def phase_line(epoch: int, epochs: int, times: PhaseTimes) -> str:
    """The phase line of the log.

    >>> phase_line(3, 12, PhaseTimes({"data": 1.0, "forward": 3.0}, 4))
    'phases epoch 3/12: data 1.0 s (25%), forward 3.0 s (75%); 4 steps, 1.00 s each'
    """
    total = times.total
    shares = ", ".join(f"{name} {s:.1f} s ({s / total:.0%})" for name, s in times.seconds.items() if s > 0.0005)
    in_steps = sum(times.seconds.get(p, 0.0) for p in STEP_PHASES)
    each = f"{in_steps / times.steps:.2f} s each" if times.steps else "no steps"
    return f"phases epoch {epoch}/{epochs}: {shares or 'nothing timed'}; {times.steps} steps, {each}"
