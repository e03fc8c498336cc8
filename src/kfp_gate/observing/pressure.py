"""How much a container was held back: CPU throttling, its disk traffic, and pressure stall information.

`cpu.stat`, `io.stat` and `*.pressure` of cgroup v2 (Linux admin-guide/cgroup-v2); `cpu.stat` and
`blkio.throttle.io_service_bytes` of v1; /proc/pressure where the container has none of its own. Unknown is None.
"""

from collections.abc import Iterator
from pathlib import Path

from kfp_gate.observing.kernel_files import read_text
from kfp_gate.observing.memory import ControlGroup

DISK_FILES = (
    "blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_service_bytes",
    "blkio.bfq.io_service_bytes_recursive", "blkio.bfq.io_service_bytes",
)  # fmt: skip


def read_throttling(group: ControlGroup | None, *, root: Path = Path("/")) -> dict[str, float | None]:
    """Periods in which the CPU quota ran out, and seconds that were waited for it, since the container's start.

    Of the group on the way up that was throttled most; the seconds are summed over the cores that stood still.
    """
    periods, seconds = [], []
    for folder in _cpu_folders(group, root):
        values = _pairs(folder / "cpu.stat")
        if "nr_throttled" in values:
            periods.append(values["nr_throttled"])
        if "throttled_usec" in values:
            seconds.append(values["throttled_usec"] / 1e6)
        elif "throttled_time" in values:
            seconds.append(values["throttled_time"] / 1e9)
    return {"throttled_periods": max(periods, default=None), "throttled_s": max(seconds, default=None)}


def read_disk(group: ControlGroup | None, *, root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes that the container read from and wrote to block devices since its start; None if it is not counted."""
    if group is None:
        return None
    devices: dict[str, list[int]] = {}
    if group.version == 2:
        text = read_text(group.folder / "io.stat")
        if text is None:
            return None
        for line in text.splitlines():
            device, *pairs = line.split()
            values = dict(p.split("=", 1) for p in pairs if "=" in p)
            if values.get("rbytes", "").isdigit() and values.get("wbytes", "").isdigit():
                devices[device] = [int(values["rbytes"]), int(values["wbytes"])]
    else:
        text = next(
            (t for f in _folders_1("blkio", root) for n in DISK_FILES if (t := read_text(f / n)) is not None), None
        )
        if text is None:
            return None
        for line in text.splitlines():
            parts = line.split()
            if len(parts) == 3 and parts[1] in ("Read", "Write") and parts[2].isdigit():
                devices.setdefault(parts[0], [0, 0])[parts[1] == "Write"] += int(parts[2])
    # What goes through a device mapper is counted there and at the disk below it.
    kept = [v for d, v in devices.items() if not _is_stacked(root / "sys/dev/block" / d)]
    return sum(v[0] for v in kept), sum(v[1] for v in kept)


def read_pressure(group: ControlGroup | None, *, root: Path = Path("/")) -> dict[str, float | None]:
    """Share of the last 10 s (0..1) in which some task waited for CPU, IO or memory."""
    found: dict[str, float | None] = {}
    for kind in ("cpu", "io", "memory"):
        own = group.folder / f"{kind}.pressure" if group is not None and group.version == 2 else None
        value = _some(own) if own is not None else None
        found[f"pressure_{kind}"] = value if value is not None else _some(root / "proc/pressure" / kind)
    return found


def _cpu_folders(group: ControlGroup | None, root: Path) -> Iterator[Path]:
    """The group that holds the CPU controller, and those above it that can be seen."""
    if group is None:
        return
    first = group.folder if group.version == 2 else next(_folders_1("cpu", root), None)
    top = root / "sys/fs/cgroup"
    if first is None:
        return
    yield first
    for folder in first.parents:
        # The mount of a version 1 controller, or the root of version 2, is the last one.
        if not folder.is_relative_to(top) or not (folder / "cpu.stat").exists():
            return
        yield folder


def _folders_1(controller: str, root: Path) -> Iterator[Path]:
    """Where a controller of version 1 may lie: first this process's own group, then what the mount shows."""
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controller in controllers.split(","):
            for mount in dict.fromkeys((controllers, controller, "cpu,cpuacct")):
                base = root / "sys/fs/cgroup" / mount
                for folder in dict.fromkeys((base / path.strip().strip("/"), base)):
                    if folder.is_dir():
                        yield folder


def _is_stacked(device: Path) -> bool:
    try:
        return any((device / "slaves").iterdir())
    except OSError:
        return False


def _some(path: Path) -> float | None:
    for line in (read_text(path) or "").splitlines():
        if line.startswith("some"):
            for part in line.split():
                if part.startswith("avg10="):
                    return float(part.removeprefix("avg10=")) / 100
    return None


def _pairs(path: Path) -> dict[str, float]:
    found = {}
    for line in (read_text(path) or "").splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[1].isdigit():
            found[parts[0]] = float(parts[1])
    return found
