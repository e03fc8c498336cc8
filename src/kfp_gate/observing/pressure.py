"""How much a container was held back: CPU throttling of its control group, and pressure stall information.

`cpu.stat` and `cpu.pressure` of cgroup v2 (Linux admin-guide/cgroup-v2), `cpu/cpu.stat` of v1, /proc/pressure where
the container has none of its own. Unknown is None.
"""

from pathlib import Path

from kfp_gate.observing.memory import ControlGroup


def read_throttling(group: ControlGroup | None, *, root: Path = Path("/")) -> dict[str, float | None]:
    """Periods in which the CPU quota ran out, and seconds that were waited for it, since the container's start."""
    values = {}
    if group is not None and group.version == 2:
        values = _pairs(group.folder / "cpu.stat")
    elif group is not None:
        for folder in _version_1_folders(root):
            values = _pairs(folder / "cpu.stat")
            if values:
                break
    waited = values.get("throttled_usec")
    seconds = waited / 1e6 if waited is not None else None
    if seconds is None and "throttled_time" in values:
        seconds = values["throttled_time"] / 1e9
    return {"throttled_periods": values.get("nr_throttled"), "throttled_s": seconds}


def read_pressure(group: ControlGroup | None, *, root: Path = Path("/")) -> dict[str, float | None]:
    """Share of the last 10 s (0..1) in which some task waited for CPU, IO or memory."""
    found: dict[str, float | None] = {}
    for kind in ("cpu", "io", "memory"):
        own = group.folder / f"{kind}.pressure" if group is not None and group.version == 2 else None
        value = _some(own) if own is not None else None
        found[f"pressure_{kind}"] = value if value is not None else _some(root / "proc/pressure" / kind)
    return found


def _version_1_folders(root: Path) -> list[Path]:
    text = _text(root / "proc/self/cgroup") or ""
    folders = []
    for line in text.splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if "cpu" in controllers.split(","):
            for mount in (controllers, "cpu", "cpu,cpuacct"):
                folders += [root / "sys/fs/cgroup" / mount / path.strip("/"), root / "sys/fs/cgroup" / mount]
    return folders


def _some(path: Path) -> float | None:
    for line in (_text(path) or "").splitlines():
        if line.startswith("some"):
            for part in line.split():
                if part.startswith("avg10="):
                    return float(part.removeprefix("avg10=")) / 100
    return None


def _pairs(path: Path) -> dict[str, float]:
    found = {}
    for line in (_text(path) or "").splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[1].isdigit():
            found[parts[0]] = float(parts[1])
    return found


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
