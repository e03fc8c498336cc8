"""The launcher's heartbeat: a small object beside the checkpoints, written by whoever follows the training.

    heartbeat.json   {"time": <seconds since 1970>}

A launcher whose step was ended has no second to delete its job, so the job ends itself when the heartbeat is older
than a bound. A store that does not answer, or an object that cannot be read, is not a stale heartbeat; an object
that was never there means that nobody promised one.
"""

import json
import logging
import threading
import time
from collections.abc import Callable

from kfp_gate.errors import KfpGateError
from kfp_gate.storage import Store, open_store

log = logging.getLogger(__name__)

KEY = "heartbeat.json"


class Heartbeat:
    """Reads the heartbeat; `stale()` has the reason to end, or ""."""

    def __init__(self, uri: str, *, bound_s: float) -> None:
        self.bound_s = bound_s
        self.store: Store = open_store(uri)
        self._last: float | None = None
        self._seen_at = time.monotonic()
        self._done = threading.Event()

    def watch(self, on_stale: Callable[[str], None]) -> None:
        """Look a few times per bound, in a thread; call `on_stale` once with the reason."""

        def run() -> None:
            while not self._done.wait(min(60.0, max(0.2, self.bound_s / 4))):
                reason = self.stale()
                if reason:
                    on_stale(reason)
                    return

        threading.Thread(target=run, name="kfp-gate-heartbeat", daemon=True).start()

    def close(self) -> None:
        self._done.set()

    def stale(self) -> str:
        """Why this training should end; "" while the launcher lives or nothing can be said.

        The bound runs from when a *new* beat was last seen on this machine's clock, so that clocks that differ between
        machines end nothing.
        """
        try:
            beat = float(json.loads(self.store.read(KEY))["time"])
        except (KfpGateError, OSError, ValueError, KeyError, TypeError) as error:
            log.debug("no heartbeat to read: %s", error)
            # The bound starts anew: the first beat read after a long outage of the store may be one from before it.
            self._seen_at = time.monotonic()
            return ""
        now = time.monotonic()
        if beat != self._last:
            self._last, self._seen_at = beat, now
            return ""
        silent = now - self._seen_at
        return f"the launcher's heartbeat has not changed for {silent:.0f} s" if silent > self.bound_s else ""


def beat(uri: str) -> None:
    """Write a beat, as a launcher does.

    Raises:
        InvalidInput, Unavailable: the store refuses or does not answer.
    """
    open_store(uri).write(KEY, json.dumps({"time": time.time()}).encode())
