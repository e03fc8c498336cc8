"""What to make of a kill: which limit, which kind of memory, one process or many copies, growth or a step.

`docs/oom.md` explains each statement and what follows from it.
"""

import re
from collections.abc import Sequence

from kfp_gate.launching.worker_lines import WorkerLines

MIB = 1024 * 1024
NEAR = 0.95
"""A peak above this share of the limit means that the limit was what stopped the container."""

_part = re.compile(r"(rss|loader processes|container) ([\d.]+) (MiB|GiB)")
"""The parts of `observing.memory.memory_line` that are compared here."""


def memory_evidence(lines: WorkerLines) -> list[str]:
    """The observations that a rank's end line and its last memory line allow, in the order of `docs/oom.md`."""
    found = []
    memory = {key: value for key, value in lines.end.get("memory", {}).items() if isinstance(value, int)}
    limit, peak = memory.get("limit"), memory.get("cgroup_peak")
    if limit and peak:
        share = peak / limit
        verdict = (
            "the container's own limit was reached" if share >= NEAR else "the container's own limit was not reached"
        )
        found.append(f"peak {_mib(peak)} of {_mib(limit)} ({share:.0%}): {verdict}")
    elif peak:
        found.append(f"peak {_mib(peak)}, no limit set on the container: the node's memory is the constraint")
    shares = [f"{name} {_mib(memory[name])}" for name in ("anon", "shmem", "file") if name in memory]
    if {"cgroup", "anon", "file"} <= set(memory):
        # In both versions of cgroups `file` holds the shared memory; what is left is the kernel's own.
        shares.append(f"kernel and other {_mib(max(0, memory['cgroup'] - memory['anon'] - memory['file']))}")
    if shares:
        found.append("memory when the worker had ended: " + ", ".join(shares))
    if lines.memory:
        found.append(f"last memory line: {lines.memory}")
        found += copies_evidence(lines.memory)
    if lines.phase:
        found.append(f"last phase line: {lines.phase}")
    found += growth_evidence(lines.growth)
    return found


def copies_evidence(memory_line: str) -> list[str]:
    """Whether the processes' sizes add up to more than the container holds: pages that forked copies share."""
    values = {name: float(number) * (1024 if unit == "GiB" else 1) for name, number, unit in _part.findall(memory_line)}
    total, use = values.get("rss", 0.0) + values.get("loader processes", 0.0), values.get("container")
    if not use or "loader processes" not in values:
        return []
    sums = f"the processes' resident sizes add up to {total:.0f} MiB, the container holds {use:.0f} MiB"
    if total > 1.2 * use:
        return [f"{sums}: forked copies share pages now, and each page that one writes to becomes memory of its own"]
    return [f"{sums}: the processes hold memory of their own"]


def growth_evidence(growth: Sequence[tuple[float, float]]) -> list[str]:
    """Bytes per epoch over the second half of the run, by least squares: a leak grows, a step does not."""
    points = list(growth)[len(growth) // 2 :]
    if len(points) < 3:
        return []
    n = len(points)
    mean_x = sum(x for x, _ in points) / n
    mean_y = sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if not spread:
        return []
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    if abs(slope) < 0.01 * mean_y:
        return [f"memory was steady over the last {n} epochs (below 1% an epoch): look for one large step, not a leak"]
    return [f"memory changed by {slope / MIB:+.1f} MiB an epoch over the last {n} epochs"]


def _mib(value: int) -> str:
    return f"{value / MIB:.0f} MiB"
