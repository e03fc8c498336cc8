"""What a few steps do, operation by operation: torch's profiler with a schedule, and what its events add up to.

No stacks and no memory events: they cost more than the steps. Times are taken from the profiler's own events, since
`key_averages` builds a Python object an event and would hold a training for seconds.
"""

import gzip
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

TOP = 20
NO_KERNELS = ("Memcpy", "Memset")
"""How the names of device activities begin that are no kernels."""

_PLACES = re.compile(rb'"(traceName|host_name)": "(?:[^"\\]|\\.)*"')


@dataclass(frozen=True)
class OpTimes:
    """Sums over the recorded steps.

    Attributes:
        ops: the operations with the most host time of their own: `name`, `calls`, `cpu_s`, and `device_s` of the
            kernels that they started (None without a GPU).
        kernels: number of kernels that ran; None without a GPU.
        top_kernels: the kernels and copies with the most device time: `name`, `calls`, `device_s`; None without a GPU.
        device_busy_s: how long at least one kernel or copy ran; None without a GPU.
    """

    ops: list[dict[str, Any]]
    kernels: int | None = None
    top_kernels: list[dict[str, Any]] | None = None
    device_busy_s: float | None = None


class OpTrace:
    """Records `steps` steps after one that only warms the profiler up. Call `step` after each of them."""

    def __init__(self, steps: int, *, cuda: bool) -> None:
        # Else the profiler's library tells its stages on standard error; upstream sets 5, which still tells two.
        os.environ["KINETO_LOG_LEVEL"] = "6"
        self._cuda = cuda
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])],
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1), with_stack=False, profile_memory=False,
            record_shapes=False,
        )  # fmt: skip

    def start(self) -> None:
        """Begin, with the step that warms up."""
        self._profile.start()

    def step(self) -> None:
        """A step ended."""
        self._profile.step()

    def stop(self) -> None:
        """End, whatever was recorded."""
        self._profile.stop()

    def times(self) -> OpTimes:
        """What was recorded; after `stop`."""
        results = self._profile.profiler.kineto_results if self._profile.profiler is not None else None
        return op_times(results.events() if results is not None else (), cuda=self._cuda)

    def write(self, path: Path) -> None:
        """Write the trace, gzipped, for Perfetto or chrome://tracing.

        Raises:
            OSError: the disk is full. Nothing stays behind.
        """
        plain, part = path.with_suffix(".plain"), path.with_suffix(".part")
        try:
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as lines, gzip.open(part, "wb", 3) as packed:
                for line in lines:
                    # The machine's name and the place of this file are nobody's business.
                    packed.write(
                        _PLACES.sub(rb'"\1": ""', line) if b'"traceName"' in line or b'"host_' in line else line
                    )
            part.replace(path)
        except RuntimeError as error:
            raise OSError(f"the trace could not be written: {str(error).splitlines()[0]}") from error
        finally:
            plain.unlink(missing_ok=True)
            part.unlink(missing_ok=True)


def op_times(events: Iterable[Any], *, cuda: bool) -> OpTimes:
    """Add up the profiler's events.

    Args:
        events: of torch's kineto result.
        cuda: whether there was a device to record.
    """
    host: dict[int, list[tuple[int, int, str, int]]] = {}
    started: dict[int, int] = {}
    kernels: dict[str, list[int]] = {}
    busy: list[tuple[int, int]] = []
    for event in events:
        name, begin, length = event.name(), event.start_ns(), event.duration_ns()
        if name.startswith("ProfilerStep#"):
            continue
        if event.device_type() == torch.autograd.DeviceType.CPU:
            if not event.is_async():
                host.setdefault(event.start_thread_id(), []).append((begin, -length, name, event.correlation_id()))
        elif not event.is_user_annotation():
            sums = kernels.setdefault(name, [0, 0])
            sums[0] += 1
            sums[1] += length
            busy.append((begin, begin + length))
            if (link := event.linked_correlation_id()) > 0:
                started[link] = started.get(link, 0) + length
    ops = _own_times(host, started)
    top = sorted(ops.items(), key=lambda item: (-item[1][1], item[0]))[:TOP]
    shown = [
        {"name": n, "calls": c, "cpu_s": round(s / 1e9, 6), "device_s": round(d / 1e9, 6) if cuda else None}
        for n, (c, s, d) in top
    ]
    if not cuda:
        return OpTimes(shown)
    heavy = sorted(kernels.items(), key=lambda item: (-item[1][1], item[0]))[:TOP]
    return OpTimes(
        shown, sum(c for n, (c, _) in kernels.items() if not n.startswith(NO_KERNELS)),
        [{"name": n, "calls": c, "device_s": round(s / 1e9, 6)} for n, (c, s) in heavy],
        round(_covered(busy) / 1e9, 6),
    )  # fmt: skip


def _own_times(
    host: Mapping[int, list[tuple[int, int, str, int]]], started: Mapping[int, int]
) -> dict[str, tuple[int, int, int]]:
    """Name to calls, nanoseconds without the operations inside, and nanoseconds of the kernels it started."""
    found: dict[str, list[int]] = {}
    for rows in host.values():
        # An operation stands before those that lie inside of it.
        rows.sort()
        inside: list[tuple[int, str]] = []
        for begin, minus, name, number in rows:
            while inside and inside[-1][0] <= begin:
                inside.pop()
            if inside:
                found[inside[-1][1]][1] += minus
            sums = found.setdefault(name, [0, 0, 0])
            sums[0] += 1
            sums[1] -= minus
            sums[2] += started.get(number, 0)
            inside.append((begin - minus, name))
    return {n: (c, max(0, s), d) for n, (c, s, d) in found.items()}


def _covered(spans: list[tuple[int, int]]) -> int:
    """Length of the union."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total
