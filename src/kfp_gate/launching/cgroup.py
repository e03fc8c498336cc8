"""What the kernel says about the memory of this container: cgroup v2, and v1 where it still runs.

The counters belong to the whole container, not to one process. Anything unreadable is None, never 0.
"""

from dataclasses import dataclass
from pathlib import Path

UNLIMITED = 1 << 60
"""cgroup v1 writes "no limit" as a huge page-rounded number; anything above this is no limit."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one cgroup, and how many processes the kernel killed in it for lack of memory."""

    use: int | None = None
    limit: int | None = None
    peak: int | None = None
    anon: int | None = None
    shmem: int | None = None
    kernel: int | None = None
    file: int | None = None
    oom_kills: int | None = None


def read_memory(root: Path = Path("/")) -> Memory:
    """The memory counters of the cgroup this process is in. `root` is / but for tests."""
    folder, version = _folder(root)
    if folder is None:
        return Memory()
    if version == 2:
        stat = _table(folder / "memory.stat")
        return Memory(
            use=_number(folder / "memory.current"),
            limit=_number(folder / "memory.max"),
            peak=_number(folder / "memory.peak"),
            anon=stat.get("anon"),
            shmem=stat.get("shmem"),
            kernel=stat.get("kernel"),
            file=stat.get("file"),
            oom_kills=_table(folder / "memory.events").get("oom_kill"),
        )
    stat = _table(folder / "memory.stat")
    limit = _number(folder / "memory.limit_in_bytes")
    return Memory(
        use=_number(folder / "memory.usage_in_bytes"),
        limit=None if limit is None or limit >= UNLIMITED else limit,
        peak=_number(folder / "memory.max_usage_in_bytes"),
        anon=stat.get("total_rss", stat.get("rss")),
        shmem=stat.get("total_shmem", stat.get("shmem")),
        kernel=_number(folder / "memory.kmem.usage_in_bytes"),
        file=stat.get("total_cache", stat.get("cache")),
        oom_kills=_table(folder / "memory.oom_control").get("oom_kill"),
    )


def _folder(root: Path) -> tuple[Path | None, int]:
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return None, 0
    paths = {fields[1]: fields[2] for line in lines if len(fields := line.split(":", 2)) == 3}
    # v1 first: on a hybrid host the v2 tree exists but the memory controller is in v1.
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            # Without a cgroup namespace the path is the host's and not visible here: the mount's root is ours.
            for folder in (mount / "memory" / path.lstrip("/"), mount / "memory"):
                if (folder / "memory.usage_in_bytes").exists():
                    return folder, 1
    if "" in paths:
        for folder in (mount / paths[""].lstrip("/"), mount):
            if (folder / "memory.current").exists():
                return folder, 2
    return None, 0


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max" is no limit, and a missing file is an older kernel
        return None


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    return {fields[0]: int(fields[1]) for line in lines if len(fields := line.split()) == 2 and fields[1].isdigit()}
