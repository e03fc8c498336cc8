"""A CUDA device as a rank sees it: phase times on its own stream, by events, so that nothing ever waits in a step for
its own timing; and its allocator's bytes."""

from collections import deque

import torch

KEPT = 512
"""Marks that may wait for the device before the finished ones are added up: bounds their memory."""


class CudaClock:
    """A `kfp_gate.observing.phases.DeviceClock`. A phase lasts from its mark to the next one."""

    def __init__(self) -> None:
        self._marks: deque[tuple[str, torch.cuda.Event]] = deque()
        self._seconds: dict[str, float] = {}
        self._collected: dict[str, float] = {}

    def mark(self, phase: str) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((phase, event))
        if len(self._marks) > KEPT:
            self._add_up()

    def so_far(self) -> dict[str, float]:
        """Seconds by phase since the start, of what the device has finished; never waits."""
        self._add_up()
        return dict(self._seconds)

    def settle(self) -> None:
        """Wait for the last mark."""
        if self._marks:
            self._marks[-1][1].synchronize()

    def collect(self) -> dict[str, float]:
        """Seconds by phase since the last call. Waits for the device: call it between epochs."""
        self.settle()
        self._add_up()
        found = {k: s - self._collected.get(k, 0.0) for k, s in self._seconds.items()}
        self._collected = dict(self._seconds)
        return {k: s for k, s in found.items() if s > 0}

    def _add_up(self) -> None:
        while len(self._marks) > 1 and self._marks[1][1].query():
            phase, begin = self._marks.popleft()
            milliseconds = begin.elapsed_time(self._marks[0][1])
            self._seconds[phase] = self._seconds.get(phase, 0.0) + milliseconds / 1000


def cuda_memory() -> dict[str, int] | None:
    """The allocator's bytes on this rank's device; None without one, or if it does not answer any more."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    try:
        device = torch.cuda.current_device()
        return {
            "reserved": torch.cuda.memory_reserved(device), "peak": torch.cuda.max_memory_reserved(device),
            "total": torch.cuda.get_device_properties(device).total_memory,
        }  # fmt: skip
    except RuntimeError:
        # A lost device may be the very reason for asking.
        return None
