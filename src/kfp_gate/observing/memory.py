"""What memory a process and its container use: /proc, and control groups of version 1 and 2.

Unknown is None, never zero. Page cache is not a leak: anonymous and shared memory are told apart from file
memory (Linux kernel documentation, admin-guide/cgroup-v2 "memory" and cgroup-v1/memory).
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kfp_gate.observing.kernel_files import read_text
from kfp_gate.observing.processes import Children

UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number where there is no limit."""


@dataclass(frozen=True)
class Memory:
    """Bytes; None where this machine does not tell.

    Attributes:
        rss: resident set of this process; peak: the largest it ever was.
        children: resident sets of its child processes (loader workers); shared pages count in each.
        children_count: how many child processes those are.
        pss, children_pss: proportional sets, in which a page that n processes share counts 1/n in each. Libraries are
            shared with other containers too.
        process_anon, children_anon: anonymous memory that the process, and its children, have mapped; what they share
            after a fork counts in each. (The part of `rss` and `children` that is no file.)
        family_anon: anonymous memory of the process and its children with shared pages once. What it has more than
            `process_anon` are pages that a child copied, or took for itself.
        cgroup: use of the container; limit, peak: its limit and largest use; anon, file, shmem: its parts.
        oom_kills: processes that the kernel killed in the container for want of memory.
        cuda_reserved, cuda_peak, cuda_total: of this process's device, in its allocator.
    """

    rss: int | None = None
    peak: int | None = None
    children: int | None = None
    cgroup: int | None = None
    limit: int | None = None
    cgroup_peak: int | None = None
    anon: int | None = None
    file: int | None = None
    shmem: int | None = None
    oom_kills: int | None = None
    cuda_reserved: int | None = None
    cuda_peak: int | None = None
    cuda_total: int | None = None
    pss: int | None = None
    children_pss: int | None = None
    children_count: int | None = None
    process_anon: int | None = None
    children_anon: int | None = None
    family_anon: int | None = None

    @property
    def held(self) -> int | None:
        """What of the container's use the kernel cannot take back: all but page cache, with shared memory.

        `file` includes `shmem` in the kernel's own counting (cgroup v1 and v2).
        """
        if self.cgroup is None or self.file is None:
            return None
        return self.cgroup - max(self.file - (self.shmem or 0), 0)

    def values(self) -> dict[str, int | None]:
        return asdict(self)


@dataclass(frozen=True)
class ControlGroup:
    """Where a process's memory controller lies.

    Attributes:
        version: 1 or 2.
        folder: its directory.
    """

    version: int
    folder: Path


def find_control_group(root: Path = Path("/"), pid: int | str = "self") -> ControlGroup | None:
    """The memory control group of a process.

    Args:
        root: the file system to look in; tests give a fixture tree.
        pid: the process.

    Returns:
        None where there is no memory controller. Machines that mount version 2 only beside version 1 ("unified")
        have their memory controller in version 1.
    """
    text = read_text(root / f"proc/{pid}/cgroup")
    if text is None:
        return None
    paths = {}
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        paths["" if number == "0" else controllers] = path.strip()
    mount = root / "sys/fs/cgroup"
    for controllers, path in paths.items():
        if "memory" in controllers.split(","):
            found = _below(mount / "memory", path, "memory.usage_in_bytes")
            if found is not None:
                return ControlGroup(1, found)
    if "" in paths:
        for base in (mount, mount / "unified"):
            found = _below(base, paths[""], "memory.current")
            if found is not None:
                return ControlGroup(2, found)
    return None


def read_memory(
    *, root: Path = Path("/"), group: ControlGroup | None = None, pid: int | str = "self",
    cuda: Mapping[str, int] | None = None, children: bool = False, pss: bool = False,
) -> Memory:  # fmt: skip
    """Read once; about 0.1 ms without children.

    Args:
        root: as in `find_control_group`.
        group: as found by it; None: no container numbers.
        pid: the process.
        cuda: `reserved`, `peak` and `total` bytes of the device, where there is one.
        children: add up the resident sets of the child processes too.
        pss: read proportional sets and `family_anon` too: some 10 ms for each GiB that is mapped, and it waits for a
            process that holds its memory map.
    """
    status = _fields(read_text(root / f"proc/{pid}/status"), unit=1024)
    values: dict[str, int | None] = {
        "rss": status.get("VmRSS:"), "peak": status.get("VmHWM:"), "process_anon": status.get("RssAnon:"),
    }  # fmt: skip
    below = Children(os.getpid() if pid == "self" else int(pid), root=root).look() if children else None
    if below is not None:
        told = [_fields(read_text(root / f"proc/{child}/status"), unit=1024) for child in below]
        # One that has ended has no such line.
        alive = [t for t in told if "VmRSS:" in t]
        values |= {"children": sum(t["VmRSS:"] for t in alive), "children_count": len(below)}
        if all("RssAnon:" in t for t in alive):
            values["children_anon"] = sum(t["RssAnon:"] for t in alive)
    if pss:
        own, theirs = _shares(root, [pid]), _shares(root, below)
        values |= {"pss": own["Pss:"], "children_pss": theirs["Pss:"]}
        alone, others = own["Pss_Anon:"], theirs["Pss_Anon:"]
        values["family_anon"] = alone + others if alone is not None and others is not None else None
    if group is not None:
        values |= _version_2(group.folder) if group.version == 2 else _version_1(group.folder)
    if cuda:
        values |= {
            "cuda_reserved": cuda.get("reserved"),
            "cuda_peak": cuda.get("peak"),
            "cuda_total": cuda.get("total"),
        }
    return Memory(**values)


def memory_line(epoch: int, epochs: int, memory: Memory) -> str:
    """The memory line of the log; what is unknown is left out.

    >>> memory_line(3, 12, Memory(rss=2 << 30, peak=3 << 30, cgroup=4 << 30, limit=16 << 30))
    'memory epoch 3/12: rss 2.00 GiB, peak 3.00 GiB; container 4.00 GiB of 16.00 GiB'
    """
    parts = [f"rss {size(memory.rss)}, peak {size(memory.peak)}"]
    if memory.children:
        parts[0] += f", loader processes {size(memory.children)}"
    if memory.cgroup is not None:
        text = f"container {size(memory.cgroup)} of {size(memory.limit) if memory.limit else 'no limit'}"
        if memory.cgroup_peak is not None:
            text += f", peak {size(memory.cgroup_peak)}"
        if memory.anon is not None:
            text += f" (anon {size(memory.anon)}, file {size(memory.file)}, shm {size(memory.shmem)})"
        if memory.oom_kills:
            text += f", {memory.oom_kills} killed for memory"
        parts.append(text)
    if memory.cuda_reserved is not None:
        parts.append(
            f"CUDA reserved {size(memory.cuda_reserved)}, peak {size(memory.cuda_peak)} of {size(memory.cuda_total)}"
        )
    return f"memory epoch {epoch}/{epochs}: {'; '.join(parts)}"


def size(value: int | None) -> str:
    """Bytes for people; "unknown" for None."""
    if value is None:
        return "unknown"
    return f"{value / (1 << 30):.2f} GiB" if value >= 1 << 30 else f"{value / (1 << 20):.0f} MiB"


def _version_2(folder: Path) -> dict[str, int | None]:
    stat = _fields(read_text(folder / "memory.stat"))
    events = _fields(read_text(folder / "memory.events"))
    return {
        "cgroup": _number(folder / "memory.current"), "limit": _limit(folder, "memory.max"),
        "cgroup_peak": _number(folder / "memory.peak"), "anon": stat.get("anon"), "file": stat.get("file"),
        "shmem": stat.get("shmem"), "oom_kills": events.get("oom_kill"),
    }  # fmt: skip


def _version_1(folder: Path) -> dict[str, int | None]:
    stat = _fields(read_text(folder / "memory.stat"))
    control = _fields(read_text(folder / "memory.oom_control"))
    return {
        "cgroup": _number(folder / "memory.usage_in_bytes"), "limit": _limit(folder, "memory.limit_in_bytes"),
        "cgroup_peak": _number(folder / "memory.max_usage_in_bytes"), "anon": stat.get("total_rss", stat.get("rss")),
        "file": stat.get("total_cache", stat.get("cache")), "shmem": stat.get("total_shmem", stat.get("shmem")),
        "oom_kills": control.get("oom_kill"),
    }  # fmt: skip


def _limit(folder: Path, name: str) -> int | None:
    """The tightest limit on the way up: a pod's limit may sit above the container's group."""
    limits = []
    for place in (folder, *folder.parents):
        value = _number(place / name)
        if value is not None and value < UNLIMITED:
            limits.append(value)
        elif not (place / name).exists() and limits:
            break
        if place.name == "cgroup":
            break
    return min(limits, default=None)


def _below(mount: Path, path: str, marker: str) -> Path | None:
    # In a container without a cgroup namespace /proc names the host's path, while the mount shows only its own.
    for candidate in (mount / path.lstrip("/"), mount):
        if (candidate / marker).exists():
            return candidate
    return None


def _shares(root: Path, pids: Sequence[int | str] | None) -> dict[str, int | None]:
    """Sums of smaps_rollup over processes; None as soon as one may not be read, or its kernel does not tell.

    One that has ended, or is about to, holds nothing.
    """
    keys = ("Pss:", "Pss_Anon:")
    totals: dict[str, int | None] = dict.fromkeys(keys, 0 if pids is not None else None)
    for pid in pids or ():
        try:
            text = (root / f"proc/{pid}/smaps_rollup").read_text(encoding="utf-8", errors="replace")
        except OSError:
            if "VmRSS:" in _fields(read_text(root / f"proc/{pid}/status")):
                return dict.fromkeys(keys)
            continue
        found = _fields(text, unit=1024)
        for key in keys:
            total, more = totals[key], found.get(key)
            totals[key] = total + more if total is not None and more is not None else None
    return totals


def _fields(text: str | None, *, unit: int = 1) -> dict[str, int]:
    found: dict[str, int] = {}
    for line in (text or "").splitlines():
        parts: list[Any] = line.split()
        if len(parts) >= 2 and parts[1].isdigit():
            found[parts[0]] = int(parts[1]) * (unit if len(parts) > 2 else 1)
    return found


def _number(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.isdigit() else None
