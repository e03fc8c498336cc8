"""The launcher's sign of life, written while it follows a job; the ranks end themselves when it stops."""

import logging
import time

from kfp_gate.errors import KfpGateError
from kfp_gate.training import heartbeat

EVERY_SECONDS = 30.0

log = logging.getLogger(__name__)


class Beats:
    """Writes the heartbeat beside the checkpoints, at most once in 30 s. A failed write is logged and tried again."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self.next_at = 0.0

    def beat(self) -> None:
        if time.monotonic() < self.next_at:
            return
        self.next_at = time.monotonic() + EVERY_SECONDS
        try:
            heartbeat.beat(self.uri)
        except (KfpGateError, OSError) as error:
            log.warning("heartbeat not written to %s: %s", self.uri, getattr(error, "found", error))
