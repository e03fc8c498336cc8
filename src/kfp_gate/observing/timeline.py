"""The timeline of a process: JSON lines, one per observation, written as they happen.

    {"kind": "epoch", "time": "2026-01-02T03:04:05.678+00:00", "mono": 12.345, "run": "ab12", "rank": 0,
     "node": "pod-0", "phase": "", "epoch": 3, ...}

Kinds written here: `start`, `epoch`, `memory`, `phases`, `window` (a stretch of steps), `sample` (the sampler's),
`checkpoint`, `upload`, `sanity`, `resume`, `stop`, `failure`, `end`. Readers must tolerate kinds and keys that
they do not know, a last line that was cut, and values that are null: null is "unknown", never zero.
"""

import json
import math
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any


class Timeline:
    """A file that grows by one line per observation; safe to write from several threads."""

    def __init__(self, path: Path, **identity: Any) -> None:
        """`identity` (run, rank, node, ...) is on every line."""
        self.path, self.identity = path, identity
        self.phase = ""
        self._lock = threading.Lock()
        self._lost = 0
        path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line. A full disk costs lines, never the training: what was lost is said in the next line."""
        head = {"kind": kind, "time": datetime.now().astimezone().isoformat(timespec="milliseconds"),
                "mono": round(time.monotonic(), 4), **self.identity, "phase": self.phase}  # fmt: skip
        with self._lock:
            if self._lost:
                head["lines_lost"] = self._lost
            line = json.dumps(_plain({**head, **values}), ensure_ascii=False, separators=(",", ":"))
            try:
                with self.path.open("a", encoding="utf-8") as handle:
                    handle.write(line + "\n")
                self._lost = 0
            except OSError:
                self._lost += 1


def read_timeline(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a timeline; a line that was cut by the end of its process is left out."""
    with path.open(encoding="utf-8", errors="replace") as handle:
        for line in handle:
            try:
                value = json.loads(line)
            except ValueError:
                continue
            if isinstance(value, dict):
                yield value


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: both become null, which readers take as unknown."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, bool | int | str) or value is None:
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
