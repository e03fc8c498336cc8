"""Where the time goes inside one job, by parts that may lie inside each other.

    parts = Parts()
    with parts.during("decode"):
        with parts.during("read"):      # counts as "read" and not as "decode"
            ...
    parts.take()                        # {"decode": PartTime(wall_s=..., cpu_s=..., calls=1, threads=1), "read": ...}

Each moment of a thread belongs to the innermost part that is open in it, so parts never count twice and their sum is
the time that was spent. Wall and CPU seconds are kept apart: a part that waits has little CPU. A part costs about
two microseconds. Imports no framework.
"""

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import NamedTuple, Protocol


class PartTime(NamedTuple):
    """Sums over the threads in which a part ran: seconds, CPU seconds, number of entries; and how many threads."""

    wall_s: float
    cpu_s: float
    calls: int
    threads: int = 1


class _Thread:
    """What one thread has open, innermost last, and since when."""

    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.known: dict[str, _Part] = {}
        self.open: list[_Part] = []
        self.wall = self.cpu = 0.0


class _Part:
    """A part in one thread: enter and leave it as often as you like."""

    __slots__ = ("calls", "cpu", "of", "wall")

    def __init__(self, of: _Thread) -> None:
        self.of, self.wall, self.cpu, self.calls = of, 0.0, 0.0, 0

    def __enter__(self) -> None:
        of, wall, cpu = self.of, time.perf_counter(), time.thread_time()
        if of.open:
            outer = of.open[-1]
            outer.wall += wall - of.wall
            outer.cpu += cpu - of.cpu
        of.open.append(self)
        of.wall, of.cpu = wall, cpu
        self.calls += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        of, wall, cpu = self.of, time.perf_counter(), time.thread_time()
        of.open.pop()
        self.wall += wall - of.wall
        self.cpu += cpu - of.cpu
        of.wall, of.cpu = wall, cpu


class Parts:
    """The parts of one job, in all threads that work on it."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._threads: list[_Thread] = []
        self._lock = threading.Lock()

    def during(self, name: str) -> _Part:
        """A context in which the time of this thread belongs to `name`."""
        try:
            of = self._local.of
        except AttributeError:
            of = self._begin()
        part = of.known.get(name)
        if part is None:
            part = of.known[name] = _Part(of)
        return part  # type: ignore[no-any-return]  # threading.local has no types

    def take(self) -> dict[str, PartTime]:
        """The sums of all threads since the last call, and start again. What is open now counts when it is left."""
        found: dict[str, PartTime] = {}
        with self._lock:
            for of in self._threads:
                for name, part in list(of.known.items()):
                    if not part.calls and not part.wall:
                        continue
                    before = found.get(name, PartTime(0.0, 0.0, 0, 0))
                    found[name] = PartTime(
                        before.wall_s + part.wall, before.cpu_s + part.cpu, before.calls + part.calls,
                        before.threads + 1,
                    )  # fmt: skip
                    part.wall, part.cpu, part.calls = 0.0, 0.0, 0
            self._threads = [of for of in self._threads if of.thread.is_alive()]
        return found

    def _begin(self) -> _Thread:
        of = self._local.of = _Thread()
        with self._lock:
            self._threads.append(of)
        return of


class PartTimer(Protocol):
    """What can be told when a part of a job begins and ends."""

    def during(self, name: str) -> AbstractContextManager[None]: ...


class Untimed:
    """Stands where nobody asks for parts."""

    _nothing = nullcontext()

    def during(self, name: str) -> AbstractContextManager[None]:
        return self._nothing


def add(sums: dict[str, list[float]], more: dict[str, PartTime]) -> None:
    """Add parts to `[wall_s, cpu_s, calls]` by name, in place."""
    for name, part in more.items():
        total = sums.setdefault(name, [0.0, 0.0, 0])
        total[0] += part.wall_s
        total[1] += part.cpu_s
        total[2] += part.calls
