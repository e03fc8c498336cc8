"""The launcher's sign of life: a small object beside the checkpoints, written while it follows a job.

A pipeline that is terminated gives its step less than a second, so nobody can rely on the job being deleted.
The ranks therefore look at this object and end themselves when it is older than a stated bound. A store that
cannot be read says nothing about the launcher: only a beat that was read and does not change counts as stale.
Age is measured on the reader's own clock, from when it first saw this beat, so that clocks that differ between
nodes cannot end a healthy run.
"""

import logging
import secrets
import time
from collections.abc import Callable

from kfp_gate.errors import KfpGateError
from kfp_gate.storage import Store, open_store

KEY = "launcher-heartbeat"
BEAT_SECONDS = 30.0
BOUND_SECONDS = 1800.0
"""How long ranks go on without a new beat: long enough for a launcher's pod to be rescheduled and restarted."""

log = logging.getLogger(__name__)


class Beat:
    """Writes the sign of life, at most once each `BEAT_SECONDS`. A failed write is logged and tried again."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.store: Store | None = None
        self.next_at = 0.0

    def beat(self) -> None:
        if not self.uri or time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + BEAT_SECONDS
        try:
            self.store = self.store or open_store(self.uri)
            self.store.write(KEY, f"{time.time():.0f} {secrets.token_hex(8)}\n".encode())
        except KfpGateError as error:
            log.warning("heartbeat not written to %s: %s", self.uri, error.found)


class Watch:
    """Reads the sign of life from a rank and calls back once when it is stale."""

    def __init__(self, uri: str, bound_seconds: float = BOUND_SECONDS, poll_seconds: float | None = None) -> None:
        self.uri = uri
        self.bound = bound_seconds
        self.poll = min(BEAT_SECONDS, bound_seconds / 4) if poll_seconds is None else poll_seconds
        self.store: Store | None = None
        self.seen = b""
        self.fresh_at = time.monotonic()

    def stale(self) -> bool:
        """Whether the beat was read and has been the same for longer than the bound."""
        try:
            self.store = self.store or open_store(self.uri)
            beat = self.store.read(KEY)
        except KfpGateError:
            # Unreadable or missing: no statement. The clock starts anew, so that the first good read after
            # a long outage of the store does not end the run.
            self.fresh_at = time.monotonic()
            return False
        if beat != self.seen:
            self.seen, self.fresh_at = beat, time.monotonic()
        return time.monotonic() - self.fresh_at > self.bound

    def run(self, on_stale: Callable[[str], None]) -> None:
        while not self.stale():
            time.sleep(self.poll)
        on_stale(f"the launcher gave no sign of life for {self.bound:.0f} s")
