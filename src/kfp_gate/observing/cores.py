"""How many CPU cores a process may use: those it may run on, and what its control group's quota leaves of them.

`cpu.max` of cgroup v2 (Linux admin-guide/cgroup-v2), `cpu.cfs_quota_us` and `cpu.cfs_period_us` of v1. A container
sees all cores of its node and is still held to its quota.
"""

import os
from pathlib import Path

from kfp_gate.observing.kernel_files import read_text


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Cores' worth of CPU time that the tightest quota on the way up allows; None if there is none or none is told."""
    found = []
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0":
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / m for m in (controllers, "cpu", "cpu,cpuacct")]
        else:
            continue
        for mount in mounts:
            # In a container without a cgroup namespace /proc names the host's path, while the mount shows only its own.
            place = mount / path.strip("/")
            for folder in [p for p in (place, *place.parents) if p == mount or mount in p.parents]:
                cores = _version_2(folder) if number == "0" else _version_1(folder)
                if cores is not None:
                    found.append(cores)
    return min(found, default=None)


def _version_2(folder: Path) -> float | None:
    parts = (read_text(folder / "cpu.max") or "").split()
    if len(parts) != 2 or not all(p.isdigit() for p in parts) or int(parts[1]) == 0:
        return None
    return int(parts[0]) / int(parts[1])


def _version_1(folder: Path) -> float | None:
    quota, period = (read_text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
    try:
        return int(quota) / int(period) if int(quota) > 0 and int(period) > 0 else None
    except ValueError:
        return None
