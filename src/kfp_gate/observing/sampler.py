"""A thread that looks at its process about once a second, and writes one `sample` line each time.

    cpu        cores used by this process since the last sample      cpu_thread   by its busiest thread
    queued     share of the time in which its main thread could run and got no CPU
    loaders    the processes of torch's data loader, told from other children by the name that torch gives them:
               {"count", "cpu", "cpu_max", "read": bytes a second, "waiting": share of the looks that found one in
               uninterruptible sleep (state D), "looks": how many, "queued": as above, the mean over them,
               "blocked": share of the time that they waited for block devices, where the kernel counts that}
    read, written          bytes a second, from and to storage       major_faults  since the last sample
    throttled_periods, throttled_s, pressure_cpu, pressure_io, pressure_memory       of the container
    net_rx, net_tx, disk_read, disk_write                            bytes a second, of the pod and the container
    rss, cgroup, cgroup_peak, anon, file, shmem, oom_kills, cuda_*, gpu_*: see `Memory` and `gpus.READINGS`

Null is unknown; `unknown` says why, once. A `gpu` line says what the device is. No paths, no environment, no command
lines. Samples grow further apart where they would take more than `SHARE` of a core.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kfp_gate.observing.gpu_readings import READINGS
from kfp_gate.observing.gpus import Gpu, open_gpu
from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.network import read_network
from kfp_gate.observing.pressure import read_disk, read_pressure, read_throttling
from kfp_gate.observing.processes import (
    Children,
    ProcessReading,
    accounts_delays,
    loaders_among,
    read_process,
    read_state,
)
from kfp_gate.observing.timeline import Timeline

log = logging.getLogger(__name__)

CLOSE_SAMPLES = 900
"""Samples at the full rate; 15 MB of timeline a day after that, a seventh of it packed."""

SHARE = 0.01
"""The most of a core that sampling may take."""

GLANCES = 4
"""Looks at the loaders' states alone between two samples: one look a second is a coarse measure of waiting."""

WHY = {
    "read": "this process may not read its own input and output counters",
    "throttled_periods": "no CPU controller of a control group is seen here",
    "cgroup": "no memory controller of a control group is seen here",
    "pressure_cpu": "this kernel keeps no pressure stall information",
    "disk_read": "no controller of a control group counts block devices here",
    "net_rx": "no network interface is seen here",
    "queued": "this kernel keeps no scheduler statistics",
}
"""Why a value is null, for those that an environment may withhold; the neighbours of a value go with it."""


class Sampler:
    """Writes `sample` lines to a timeline until it is stopped."""

    def __init__(
        self, timeline: Timeline, *, every_s: float = 1.0, gpu: str | int | None = None,
        cuda: Callable[[], Mapping[str, int] | None] = lambda: None, root: Path = Path("/"), pid: int | None = None,
    ) -> None:  # fmt: skip
        """`gpu` is a UUID or index; `cuda` gives the allocator's bytes, see `read_memory`; `pid` is this process."""
        self.timeline, self.every_s, self.root, self.cuda = timeline, every_s, root, cuda
        self.group = find_control_group(root)
        self.cost_s = 0.0
        """CPU seconds that sampling itself took."""
        self.count = 0
        self._pid = pid or os.getpid()
        self._wants_gpu = gpu is not None
        self._gpu: Gpu | None
        self._gpu, self._why = open_gpu(gpu)
        self._children = Children(self._pid, root=root)
        self._delays = accounts_delays(root)
        self._before: dict[int, ProcessReading] = {}
        self._totals: dict[str, tuple[int, int] | None] = {}
        self._loader_pids: list[int] = []
        self._states: list[str] = []
        self._at = time.monotonic()
        self._failed = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kfp-gate-sampler", daemon=True)

    def start(self) -> None:
        self.introduce()
        self.look()
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self.every_s)

    def introduce(self) -> None:
        """Write the `gpu` line, if this process uses one: what it is, and what it does not tell."""
        if self._gpu is not None:
            self.timeline.write("gpu", **self._gpu.describe())
        elif self._wants_gpu:
            self.timeline.write("gpu", uuid=None, name=None, mig=None, driver=None, unknown={"gpu": self._why})
            log.warning("the GPU's readings are unknown: %s", self._why)

    def write(self) -> None:
        """One `sample` line."""
        values = self.look()
        unknown = self._unknown(values) if self.count == 0 else {}
        if self._gpu is not None:
            unknown |= self._gpu.news()
            if "gpu" in unknown:
                log.warning("the GPU's readings are unknown from now on: %s", unknown["gpu"])
        if unknown:
            values["unknown"] = unknown
        self.timeline.write("sample", **values)
        self.count += 1

    def glance(self) -> None:
        """Look at the loaders' states alone; the next sample tells how many waited."""
        self._states += [s for pid in self._loader_pids if (s := read_state(pid, root=self.root)) is not None]

    def look(self) -> dict[str, Any]:
        """One sample; rates are since the last call, and null in the first."""
        now = time.monotonic()
        seconds = max(now - self._at, 1e-6)
        own = read_process(self._pid, root=self.root, threads=True, delays=self._delays)
        pids = self._children.look()
        loaders = loaders_among(read_process(c, root=self.root, delays=self._delays) for c in pids or ())
        self._loader_pids = [r.pid for r in loaders]
        self._states += [r.state for r in loaders]
        values = self._own(own, seconds)
        values["loaders"] = self._loaders(loaders if pids is not None else None, seconds)
        values |= read_throttling(self.group, root=self.root) | read_pressure(self.group, root=self.root)
        values |= self._traffic(seconds)
        memory = read_memory(root=self.root, group=self.group, cuda=self.cuda()).values()
        values |= {k: memory[k] for k in ("rss", "cgroup", "cgroup_peak", "anon", "file", "shmem", "oom_kills",
                                          "cuda_reserved", "cuda_peak")}  # fmt: skip
        if self._gpu is not None:
            values |= self._gpu.read()
        elif self._wants_gpu:
            values |= dict.fromkeys(READINGS)
        self._before = {r.pid: r for r in [own, *loaders] if r is not None}
        self._states = []
        self._at = now
        return values

    def _own(self, own: ProcessReading | None, seconds: float) -> dict[str, Any]:
        before = self._before.get(self._pid)
        if own is None or before is None:
            return dict.fromkeys(("cpu", "cpu_thread", "queued", "read", "written", "major_faults"))
        busiest = max((s - before.threads_cpu_s.get(t, 0.0) for t, s in own.threads_cpu_s.items()), default=None)
        return {
            "cpu": round((own.cpu_s - before.cpu_s) / seconds, 3),
            "cpu_thread": round(busiest / seconds, 3) if busiest is not None else None,
            "queued": _share(own.queued_s, before.queued_s, seconds),
            "read": _rate(own.read_bytes, before.read_bytes, seconds),
            "written": _rate(own.written_bytes, before.written_bytes, seconds),
            "major_faults": own.major_faults - before.major_faults,
        }

    def _loaders(self, loaders: list[ProcessReading] | None, seconds: float) -> dict[str, Any]:
        names = ("count", "cpu", "cpu_max", "waiting", "looks", "read", "queued", "blocked")
        if loaders is None:
            return dict.fromkeys(names)
        pairs = [(r, self._before[r.pid]) for r in loaders if r.pid in self._before]
        used = [(now.cpu_s - before.cpu_s) / seconds for now, before in pairs]
        states = self._states
        return {
            "count": len(loaders),
            "cpu": round(sum(used), 3) if used else None,
            "cpu_max": round(max(used), 3) if used else None,
            "waiting": round(states.count("D") / len(states), 3) if states else None,
            "looks": len(states),
            "read": _sum(_rate(now.read_bytes, before.read_bytes, seconds) for now, before in pairs),
            "queued": _mean(_share(now.queued_s, before.queued_s, seconds) for now, before in pairs),
            "blocked": _mean(_share(now.blocked_s, before.blocked_s, seconds) for now, before in pairs),
        }

    def _traffic(self, seconds: float) -> dict[str, int | None]:
        totals = {"net": read_network(self.root), "disk": read_disk(self.group, root=self.root)}
        values: dict[str, int | None] = {}
        for name, parts in (("net", ("net_rx", "net_tx")), ("disk", ("disk_read", "disk_write"))):
            now, before = totals[name], self._totals.get(name)
            for i, part in enumerate(parts):
                values[part] = _rate(now[i], before[i], seconds) if now is not None and before is not None else None
        self._totals = totals
        return values

    def _unknown(self, values: Mapping[str, Any]) -> dict[str, str]:
        found = {k: why for k, why in WHY.items() if values.get(k) is None}
        if values["loaders"]["count"] is None:
            found["loaders"] = "this kernel does not list the children of a process"
        if not self._delays:
            found["loaders.blocked"] = "this kernel does not account for delays"
        if not self._wants_gpu:
            found["gpu"] = self._why
        return found

    def _run(self) -> None:
        period = self.every_s
        while True:
            spent = 0.0
            for look in (*[self.glance] * GLANCES, self.write):
                if self._done.wait(period / (GLANCES + 1)):
                    return
                started = time.thread_time()
                self._try(look)
                spent += time.thread_time() - started
            self.cost_s += spent
            # A run of days keeps a readable timeline: the first minutes closely, the rest at a fifth of the rate.
            period = max(self.every_s if self.count < CLOSE_SAMPLES else 5 * self.every_s, spent / SHARE)

    def _try(self, look: Callable[[], None]) -> None:
        try:
            look()
        except Exception as error:
            # Whatever a machine answers, it must not end the thread: the training has no other eye.
            if not self._failed:
                log.warning("a sample failed: %s: %s", type(error).__name__, error)
            self._failed = True


def _rate(now: int | None, before: int | None, seconds: float) -> int | None:
    """Bytes a second; a counter that went back began anew."""
    return None if now is None or before is None or now < before else round((now - before) / seconds)


def _share(now: float | None, before: float | None, seconds: float) -> float | None:
    return None if now is None or before is None or now < before else round(min((now - before) / seconds, 1.0), 3)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return round(sum(known) / len(known), 3) if known else None
