"""What processes do, from /proc (proc(5)): CPU, state, bytes read and written, page faults. Unknown is None.

A saturated single thread hides in a mean over threads, so the busiest thread is reported beside the total.
"""

import os
from dataclasses import dataclass
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class ProcessReading:
    """Counters of one process since its start.

    Attributes:
        pid: process id.
        state: R running, S sleeping, D waiting for a disk or a network file system, Z ended.
        cpu_s: CPU seconds of all threads.
        threads_cpu_s: CPU seconds by thread id; empty where not asked for.
        read_bytes, written_bytes: from and to storage; None where /proc/<pid>/io may not be read.
        major_faults: page faults that needed storage.
    """

    pid: int
    state: str
    cpu_s: float
    threads_cpu_s: dict[int, float]
    read_bytes: int | None
    written_bytes: int | None
    major_faults: int


def read_process(pid: int, *, root: Path = Path("/"), threads: bool = False) -> ProcessReading | None:
    """Read one process; None if it is gone. About 0.05 ms, and as much again per thread."""
    base = f"{root}/proc/{pid}"
    fields = _stat(f"{base}/stat")
    if fields is None:
        return None
    io = _io(f"{base}/io")
    by_thread = {}
    if threads:
        try:
            for name in os.listdir(f"{base}/task"):  # noqa: PTH208  # a Path per thread and second costs more than the reading
                values = _stat(f"{base}/task/{name}/stat")
                if values is not None:
                    by_thread[int(name)] = _cpu(values)
        except OSError:
            by_thread = {}
    return ProcessReading(
        pid, fields[0], _cpu(fields), by_thread, io.get("read_bytes"), io.get("write_bytes"), int(fields[9])
    )


def child_pids(pid: int, *, root: Path = Path("/")) -> list[int]:
    """Children of all threads of a process: loader workers."""
    found = []
    try:
        for name in os.listdir(f"{root}/proc/{pid}/task"):  # noqa: PTH208  # as above
            with open(f"{root}/proc/{pid}/task/{name}/children", encoding="ascii") as handle:  # noqa: PTH123  # as above
                found += [int(p) for p in handle.read().split()]
    except OSError:
        return found
    return found


def _stat(path: str) -> list[str] | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as handle:  # noqa: PTH123  # as above
            text = handle.read()
    except OSError:
        return None
    # The name stands in parentheses and may hold spaces and parentheses itself.
    return text[text.rfind(")") + 2 :].split()


def _cpu(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / TICKS


def _io(path: str) -> dict[str, int]:
    try:
        with open(path, encoding="ascii") as handle:  # noqa: PTH123  # as above
            return {k: int(v) for k, _, v in (line.partition(": ") for line in handle)}
    except (OSError, ValueError):
        return {}
