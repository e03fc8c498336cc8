"""Control groups of version 1 for one training: a CPU quota, a memory limit."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PERIOD_US = 100_000
CPU, MEMORY = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup/memory")


def own(mount: Path, controller: str) -> Path | None:
    """The group of this process below a mount; None where there is no such controller, or none may be made in it."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for place in (mount / path.strip("/"), mount):
            if controller in controllers.split(",") and place.is_dir() and os.access(place, os.W_OK):
                return place
    return None


@contextmanager
def control_groups(*, cores: float = 0, memory: int = 0) -> Iterator[list[Path]]:
    """Groups with these limits while the block runs; a process joins by writing its id into their `cgroup.procs`.

    Raises:
        OSError: no such controller here, or not the right to make a group.
    """
    made: list[Path] = []
    try:
        if cores:
            made.append(_new(own(CPU, "cpu"), {
                "cpu.cfs_period_us": PERIOD_US, "cpu.cfs_quota_us": round(cores * PERIOD_US)
            }))  # fmt: skip
        if memory:
            made.append(_new(own(MEMORY, "memory"), {"memory.limit_in_bytes": memory}))
        yield made
    finally:
        for folder in made:
            _remove(folder)


def _new(parent: Path | None, values: dict[str, int]) -> Path:
    if parent is None:
        raise OSError("no control group of version 1 that may be divided here")
    folder = parent / f"planted-{os.getpid()}"
    folder.mkdir()
    for name, value in values.items():
        (folder / name).write_text(str(value), encoding="ascii")
    return folder


def _remove(folder: Path) -> None:
    """Loader processes outlive a training that ended without a word by some seconds: they go with the group."""
    for _ in range(50):
        with suppress(OSError, ValueError):
            for pid in (folder / "cgroup.procs").read_text(encoding="ascii").split():
                os.kill(int(pid), signal.SIGKILL)
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.1)


def join(folders: list[str]) -> None:
    """Put this process, with all its threads, into groups."""
    for folder in folders:
        (Path(folder) / "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
