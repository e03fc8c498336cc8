"""What a rank's output tells while it runs: progress, memory, traceback, last lines. Bounded, however long it runs."""

import json
import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kfp_gate.launching.rank import END_PREFIX

PROGRESS_PREFIX = "KFP_GATE_PROGRESS "
FAILURE_PREFIX = "KFP_GATE_FAILURE "
MACHINE_PREFIX = "KFP_GATE_"
MACHINE_PREFIXES = (END_PREFIX, FAILURE_PREFIX)
"""Lines for the launcher alone; what they say reaches the user in other words."""

MEMORY_KEYS = ("cgroup_use", "cgroup_bytes", "rss")
"""Where a progress record may say how many bytes are in use, best first."""

KEPT_LINES = 40
KEPT_EPOCHS = 400
MAX_LINE = 4000
"""Characters of a line that are kept as evidence; the stream itself shows the whole line."""

TRACEBACK = "Traceback (most recent call last):"
TRACEBACK_LINES = 40
_measured = re.compile(r"\b(memory|phases) epoch \d+/\d+: ")
_container_use = re.compile(r"memory epoch (\d+)/\d+: .*container ([\d.]+) (MiB|GiB)")
_torch_prefix = re.compile(r"^\[(?:default|rank)\d+\]:? ?")


@dataclass
class WorkerLines:
    """The running summary of one rank's output. Feed it every line once, in order."""

    last: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))
    progress: dict[str, Any] = field(default_factory=dict)
    memory: str = ""
    phase: str = ""
    end: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, Any] = field(default_factory=dict)
    traceback: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    growth: list[tuple[float, float]] = field(default_factory=list)
    _open: list[str] | None = None

    def feed(self, line: str) -> None:
        if line.startswith(MACHINE_PREFIX):
            if line.startswith(END_PREFIX):
                self.end = _json(line.removeprefix(END_PREFIX)) or self.end
            elif line.startswith(PROGRESS_PREFIX):
                self.progress = _json(line.removeprefix(PROGRESS_PREFIX)) or self.progress
            elif line.startswith(FAILURE_PREFIX):
                self.failure = _json(line.removeprefix(FAILURE_PREFIX)) or self.failure
            return
        if len(line) > MAX_LINE:
            line = line[:MAX_LINE]
        if not line or line.isspace():
            return
        self.last.append(line)
        # Nearly all lines end here, after a few plain searches: a million lines must cost seconds, not minutes.
        if self._open is None and not any(word in line for word in TELLING_WORDS):
            return
        plain = _torch_prefix.sub("", line)
        if measured := _measured.search(plain):
            if measured[1] == "memory":
                self.memory = plain[measured.start() :]
                if use := _container_use.match(self.memory):
                    self._grow(float(use[1]), float(use[2]) * (1 << 30 if use[3] == "GiB" else 1 << 20))
            else:
                self.phase = plain[measured.start() :]
        if len(self.marks) < 20 and (mark := next((name for name, rule in MARKS if rule.search(plain)), None)):
            self.marks.append(mark)
        self._traceback(plain)

    def _grow(self, epoch: float, use: float) -> None:
        self.growth.append((epoch, use))
        if len(self.growth) > KEPT_EPOCHS:
            # Every second point of the older half goes: the first epochs stay, the memory stays bounded.
            half = len(self.growth) // 2
            self.growth = self.growth[:half:2] + self.growth[half:]

    def _traceback(self, line: str) -> None:
        if line.startswith(TRACEBACK):
            self._open = [line]
        elif self._open is not None:
            if len(self._open) >= TRACEBACK_LINES:
                # The innermost frames say most: the outer ones give way, but for the heading.
                del self._open[1:3]
            self._open.append(line)
            if not line.startswith((" ", "\t")):
                self.traceback, self._open = self._open, None

    @property
    def exception(self) -> str:
        """The last line of the last traceback, such as `ValueError: no such class`."""
        return self.traceback[-1] if self.traceback else ""


MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("gpu-out-of-memory", re.compile(r"CUDA out of memory|OutOfMemoryError|CUDNN_STATUS_ALLOC_FAILED")),
    (
        "collective-timeout",
        re.compile(r"collective operation timeout|Timed out waiting \d+ms for|WorkNCCL\(.*[Tt]imeout"),
    ),
    (
        "peer-lost",
        re.compile(
            r"Connection closed by peer|ncclRemoteError|remote process exited or there was a network error"
            r"|Connection reset by peer|Broken pipe|recvValue failed|Failed to recv, got 0 bytes"
        ),
    ),
    (
        "child-killed",
        re.compile(r"DataLoader worker \(pid.*\) is killed by signal: Killed|exited unexpectedly.*signal 9"),
    ),
    (
        "shm",
        re.compile(r"unable to (?:allocate|mmap|write).*shared memory|bus error|No space left on device.*shm", re.I),
    ),
)
"""Texts of the libraries we stand on that name a cause, in the order in which they are tried."""

TELLING_WORDS = (
    "Traceback", " epoch ", "out of memory", "OutOfMemory", "ALLOC_FAILED", "imeout", "imed out", "by peer", "nccl",
    "network error", "Broken pipe", "recv", "killed by", "signal 9", "shared memory", "us error", "No space left",
)  # fmt: skip
"""At least one of them is in every line that `MARKS`, the measurements and tracebacks are looked for in."""


class ProgressReport:
    """One line a minute from rank 0's progress: epoch, the monitored value, time left."""

    def __init__(self, say: Callable[[str], None], every_seconds: float = 60.0) -> None:
        self.say = say
        self.every = every_seconds
        self.next_at = 0.0
        self.said: dict[str, Any] = {}

    def update(self, lines: WorkerLines, now: float) -> None:
        """Say where training is, if there is news and a minute has passed. `now` is in seconds, monotonic."""
        if lines.progress and lines.progress is not self.said and now >= self.next_at:
            self.said = lines.progress
            self.next_at = now + self.every
            self.say(progress_text(lines.progress))


def progress_text(progress: dict[str, Any]) -> str:
    """`epoch 3 of 12, about 41 s left` from a progress record; unknown parts are left out."""
    parts = []
    if "epoch" in progress:
        parts.append(f"epoch {progress['epoch']}" + (f" of {progress['epochs']}" if "epochs" in progress else ""))
    monitors = progress.get("monitors")
    for name, value in monitors.items() if isinstance(monitors, dict) else ():
        if _is_number(value):
            parts.append(f"{name} {value:.4g}")
    eta = progress.get("eta_s")
    if isinstance(eta, int | float) and _is_number(eta):
        parts.append(f"about {_span(eta)} left")
    return "progress: " + (", ".join(parts) or "running")


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) != float("inf")
    )


def _json(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
