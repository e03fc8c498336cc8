"""A thread that looks at its process about once a second, and writes one `sample` line each time.

    cpu        cores used by this process since the last sample      cpu_thread   by its busiest thread
    loaders    {"count", "cpu", "cpu_max", "waiting"}: its child processes; waiting = share in state D
    read, written          bytes a second, from and to storage       major_faults  since the last sample
    throttled_periods, throttled_s, pressure_cpu, pressure_io, pressure_memory       of the container
    rss, cgroup, cgroup_peak, anon, file, shmem, oom_kills, cuda_*, gpu_*

Null is unknown; `unknown` says why, once. No paths, no environment, no command lines.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kfp_gate.observing.gpus import Gpu, open_gpu
from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.pressure import read_pressure, read_throttling
from kfp_gate.observing.processes import ProcessReading, child_pids, read_process
from kfp_gate.observing.timeline import Timeline

CLOSE_SAMPLES = 900
"""Samples at the full rate; 5 MB of timeline a day after that."""


class Sampler:
    """Writes `sample` lines to a timeline until it is stopped."""

    def __init__(
        self, timeline: Timeline, *, every_s: float = 1.0, gpu: str | int | None = None,
        cuda: Callable[[], Mapping[str, int] | None] = lambda: None, root: Path = Path("/"),
    ) -> None:  # fmt: skip
        """`gpu` is a UUID or index; `cuda` gives the allocator's bytes, see `read_memory`."""
        self.timeline, self.every_s, self.root, self.cuda = timeline, every_s, root, cuda
        self.group = find_control_group(root)
        self.cost_s = 0.0
        """CPU seconds that sampling itself took."""
        self.count = 0
        self._gpu: Gpu | None
        self._gpu, self._why = open_gpu(gpu)
        self._before: dict[int, ProcessReading] = {}
        self._at = time.monotonic()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kfp-gate-sampler", daemon=True)

    def start(self) -> None:
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self.every_s)

    def look(self) -> dict[str, Any]:
        """One sample; rates are since the last call."""
        now, pid = time.monotonic(), os.getpid()
        seconds = max(now - self._at, 1e-6)
        own = read_process(pid, root=self.root, threads=True)
        children = [r for c in child_pids(pid, root=self.root) if (r := read_process(c, root=self.root)) is not None]
        values: dict[str, Any] = self._own(own, seconds) if own is not None else {}
        values["loaders"] = self._loaders(children, seconds)
        values |= read_throttling(self.group, root=self.root) | read_pressure(self.group, root=self.root)
        memory = read_memory(root=self.root, group=self.group, cuda=self.cuda()).values()
        values |= {k: memory[k] for k in ("rss", "cgroup", "cgroup_peak", "anon", "file", "shmem", "oom_kills",
                                          "cuda_reserved", "cuda_peak")}  # fmt: skip
        if self._gpu is not None:
            values |= self._gpu.read()
        if self.count == 0:
            values["unknown"] = {"gpu": self._why} if self._gpu is None else dict(self._gpu.unknown)
        self._before = {r.pid: r for r in [*([own] if own is not None else []), *children]}
        self._at = now
        return values

    def _own(self, own: ProcessReading, seconds: float) -> dict[str, Any]:
        before = self._before.get(own.pid)
        if before is None:
            return {"cpu": None, "cpu_thread": None, "read": None, "written": None, "major_faults": None}
        busiest = max(
            (s - before.threads_cpu_s.get(t, 0.0) for t, s in own.threads_cpu_s.items()), default=None
        )  # fmt: skip
        return {
            "cpu": round((own.cpu_s - before.cpu_s) / seconds, 3),
            "cpu_thread": round(busiest / seconds, 3) if busiest is not None else None,
            "read": _rate(own.read_bytes, before.read_bytes, seconds),
            "written": _rate(own.written_bytes, before.written_bytes, seconds),
            "major_faults": own.major_faults - before.major_faults,
        }

    def _loaders(self, children: list[ProcessReading], seconds: float) -> dict[str, Any]:
        used = [(c.cpu_s - self._before[c.pid].cpu_s) / seconds for c in children if c.pid in self._before]
        waiting = sum(c.state == "D" for c in children) / len(children) if children else None
        return {
            "count": len(children), "cpu": round(sum(used), 3) if used else None,
            "cpu_max": round(max(used), 3) if used else None, "waiting": waiting,
        }  # fmt: skip

    def _run(self) -> None:
        # A run of days keeps a readable timeline: the first minutes closely, the rest at a fifth of the rate.
        while not self._done.wait(self.every_s if self.count < CLOSE_SAMPLES else 5 * self.every_s):
            started = time.thread_time()
            self.timeline.write("sample", **self.look())
            self.cost_s += time.thread_time() - started
            self.count += 1


def _rate(now: int | None, before: int | None, seconds: float) -> int | None:
    return None if now is None or before is None else round((now - before) / seconds)
