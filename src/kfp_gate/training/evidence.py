"""What a rank leaves behind when it dies: one JSON file, in its folder and in storage.

    failure-rank<k>.json   kind, message, traceback, last log lines, memory, versions, settings, phase, peer

Kinds: `user` (an input to change), `broken`, `memory`, `peer` (another rank failed first), `terminated`,
`unavailable`. Secrets are removed: values of environment variables are not written at all, and texts are
searched for what looks like credentials.
"""

import json
import logging
import sys
import threading
import traceback
from collections import deque
from datetime import datetime
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput, KfpGateError, Unavailable
from kfp_gate.training.group import PeerFailed
from kfp_gate.training.redaction import redact

LAST_LINES = 100
EXIT_OK, EXIT_BROKEN, EXIT_USER, EXIT_MEMORY, EXIT_TERMINATED = 0, 1, 2, 137, 143


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception: nothing on the way may take it for a failure of its own."""


class LastLines(logging.Handler):
    """Keeps the last log lines for the evidence."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=LAST_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


def kind_of(error: BaseException) -> str:
    """The kind of a failure."""
    if isinstance(error, PeerFailed):
        return "peer"
    if isinstance(error, Terminated):
        return "terminated"
    if isinstance(error, InvalidInput):
        return "user"
    if isinstance(error, Unavailable):
        return "unavailable"
    return "memory" if is_out_of_memory(error) else "broken"


def exit_code(error: BaseException) -> int:
    """The exit code that tells a launcher which of these it was."""
    codes = {"user": EXIT_USER, "memory": EXIT_MEMORY, "terminated": EXIT_TERMINATED}
    return codes.get(kind_of(error), EXIT_BROKEN)


def is_out_of_memory(error: BaseException) -> bool:
    """MemoryError, the device's allocator, or a failed allocation that torch reports as a RuntimeError."""
    seen: BaseException | None = error
    while seen is not None:
        text = str(seen).lower()
        if isinstance(seen, MemoryError) or type(seen).__name__ == "OutOfMemoryError":
            return True
        if isinstance(seen, RuntimeError | OSError) and any(
            t in text
            for t in (
                "out of memory",
                "can't allocate memory",
                "cannot allocate memory",
                "bus error",
                "by signal: killed",
            )
        ):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def describe(error: BaseException, *, thread: int | None = None) -> dict[str, Any]:
    """Kind, message and traceback.

    Args:
        error: what was raised.
        thread: a thread whose stack to show too: where the main thread hung, when the watch ends the process.
    """
    text = str(error) or type(error).__name__
    values: dict[str, Any] = {
        "kind": kind_of(error), "error": type(error).__name__, "message": redact(text),
        "traceback": redact("".join(traceback.format_exception(error))), "exit_code": exit_code(error),
        "peer": error.peer if isinstance(error, PeerFailed) else None,
    }  # fmt: skip
    frame = sys._current_frames().get(thread) if thread is not None else None
    if frame is not None:
        values["hung_at"] = redact("".join(traceback.format_stack(frame)))
    return values


def write_failure(path: Path, **values: Any) -> str:
    """Write a failure file; returns its text. A full disk loses the file, not the text."""
    head = {"time": datetime.now().astimezone().isoformat(), "thread": threading.current_thread().name}
    text = json.dumps({**head, **values}, ensure_ascii=False, indent=1, default=str)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError:
        logging.getLogger(__name__).warning("the failure file could not be written to %s", path)
    return text


def message_of(error: BaseException) -> str:
    """What the user sees last: our own message whole, others by type and text."""
    return redact(str(error) if isinstance(error, KfpGateError) else f"{type(error).__name__}: {error}")
