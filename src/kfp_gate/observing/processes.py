"""What processes do, from /proc (proc(5)): CPU, state, waiting, bytes read and written, page faults. Unknown is None.

A saturated single thread hides in a mean over threads, so the busiest thread is reported beside the total.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")

LOADER_NAME = "pt_data_worker"
"""How torch names the main thread of a process of its data loader (`torch/utils/data/_utils/worker.py`)."""

RESCAN = 10
"""How many looks pass before threads that had no children are asked again."""


@dataclass(frozen=True)
class ProcessReading:
    """Counters of one process since its start.

    Attributes:
        pid: process id.
        parent: process id of what started it.
        name: of its main thread, at most 15 bytes; never its command line.
        state: R running, S sleeping, D waiting for a disk or a network file system, Z ended.
        cpu_s: CPU seconds of all threads.
        threads_cpu_s: CPU seconds by thread id; empty where not asked for.
        read_bytes, written_bytes: from and to storage; None where /proc/<pid>/io may not be read.
        major_faults: page faults that needed storage.
        queued_s: seconds in which its main thread could run and got no CPU; None without scheduler statistics.
        blocked_s: seconds in which it waited for block devices; None unless the kernel accounts for delays.
    """

    pid: int
    parent: int
    name: str
    state: str
    cpu_s: float
    threads_cpu_s: dict[int, float]
    read_bytes: int | None
    written_bytes: int | None
    major_faults: int
    queued_s: float | None = None
    blocked_s: float | None = None


def loaders_among(readings: Iterable[ProcessReading | None]) -> list[ProcessReading]:
    """The processes of torch's data loader. What a loader starts itself inherits its name, and is none."""
    named = {r.pid: r for r in readings if r is not None and r.name == LOADER_NAME}
    return [r for r in named.values() if r.parent not in named]


def read_process(
    pid: int, *, root: Path = Path("/"), threads: bool = False, delays: bool = False
) -> ProcessReading | None:
    """Read one process; None if it is gone. About 0.04 ms, and 0.01 ms per thread.

    Args:
        pid: the process.
        root: the file system to look in.
        threads: read each thread's CPU seconds too.
        delays: whether `accounts_delays` holds.
    """
    base = f"{root}/proc/{pid}"
    found = _stat(f"{base}/stat")
    if found is None:
        return None
    name, fields = found
    io = _io(f"{base}/io")
    scheduler = _scheduler(f"{base}/schedstat")
    by_thread = {}
    if threads:
        try:
            for task in os.listdir(f"{base}/task"):  # noqa: PTH208  # a Path per thread and second costs more than the reading
                seconds = _thread_cpu(f"{base}/task/{task}")
                if seconds is not None:
                    by_thread[int(task)] = seconds
        except OSError:
            by_thread = {}
    queued = scheduler[1] if scheduler is not None else None
    blocked = int(fields[39]) / TICKS if delays else None
    return ProcessReading(
        pid, int(fields[1]), name, fields[0].decode(), _cpu(fields), by_thread, io.get("read_bytes"),
        io.get("write_bytes"), int(fields[9]), queued, blocked,
    )  # fmt: skip


def read_state(pid: int, *, root: Path = Path("/")) -> str | None:
    """The state alone; None if the process is gone. About 0.01 ms."""
    found = _stat(f"{root}/proc/{pid}/stat")
    return found[1][0].decode() if found is not None else None


def accounts_delays(root: Path = Path("/")) -> bool:
    """Whether the kernel counts how long a process waits for block devices (off by default since Linux 5.14)."""
    return (_read(f"{root}/proc/sys/kernel/task_delayacct") or b"").strip() == b"1"


class Children:
    """The processes below one process, found again and again at little cost.

    A child stands in the list of the thread that started it, and a training has dozens of threads, of which one or two
    start anything: the others are asked once in `RESCAN` looks.
    """

    def __init__(self, pid: int, *, root: Path = Path("/")) -> None:
        self.pid, self.root = pid, root
        self._looks = 0
        self._parents: set[str] = set()

    def look(self) -> list[int] | None:
        """Process ids of all descendants; None where the kernel does not list children (as in some sandboxes)."""
        everywhere = self._looks % RESCAN == 0
        self._looks += 1
        base = f"{self.root}/proc/{self.pid}/task"
        if everywhere:
            try:
                self._parents = {f"{base}/{name}" for name in os.listdir(base)}  # noqa: PTH208  # as above
            except OSError:
                return None
        own = f"{base}/{self.pid}"
        found, parents, readable = [], set(), False
        for task in {own, *self._parents}:
            text = _read(f"{task}/children")
            readable = readable or text is not None
            pids = [int(p) for p in (text or b"").split()]
            if pids:
                parents.add(task)
                found += pids
        if not readable:
            return None
        self._parents = parents
        # A server that forks the loaders stands between.
        for pid in found:
            text = _read(f"{self.root}/proc/{pid}/task/{pid}/children")
            found += [int(p) for p in (text or b"").split()]
        return found


def _stat(path: str) -> tuple[str, list[bytes]] | None:
    text = _read(path)
    if text is None:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    start, end = text.find(b"("), text.rfind(b")")
    fields = text[end + 2 :].split()
    if start < 0 or len(fields) < 13:
        return None
    return text[start + 1 : end].decode(errors="replace"), fields


def _cpu(fields: list[bytes]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS


def _thread_cpu(folder: str) -> float | None:
    # Nanoseconds where the scheduler keeps them; ticks of 10 ms otherwise.
    scheduler = _scheduler(f"{folder}/schedstat")
    if scheduler is not None:
        return scheduler[0]
    found = _stat(f"{folder}/stat")
    return _cpu(found[1]) if found is not None else None


def _scheduler(path: str) -> tuple[float, float] | None:
    """Seconds on a CPU and seconds in the queue for one."""
    parts = (_read(path) or b"").split()
    return (int(parts[0]) / 1e9, int(parts[1]) / 1e9) if len(parts) >= 2 else None


def _io(path: str) -> dict[str, int]:
    found = {}
    for line in (_read(path) or b"").splitlines():
        key, _, value = line.partition(b": ")
        if value.isdigit():
            found[key.decode()] = int(value)
    return found


def _read(path: str) -> bytes | None:
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return os.read(handle, 1 << 16)
    except OSError:
        return None
    finally:
        os.close(handle)
