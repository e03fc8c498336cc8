"""How far a long step is, with rate and time left: to a callback, or to the log at most every five seconds."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0

REPORT_EVERY_S = 0.1
"""A callback hears of progress at most this often, and of the last item always."""


@dataclass(frozen=True)
class Progress:
    """One report: `done` of `total` items of `stage`, items per second, seconds left (None before the first item)."""

    stage: str
    done: int
    total: int
    rate: float
    eta_s: float | None


Reporter = Callable[[Progress], None]


class Meter:
    """Counts the items of one stage and reports.

    Args:
        stage: what is counted, for instance "reading images".
        total: how many there are.
        reporter: called with each report; None writes log lines instead.
    """

    def __init__(self, stage: str, total: int, reporter: Reporter | None = None) -> None:
        self.stage, self.total, self.reporter = stage, total, reporter
        self.done = 0
        self.started = self.logged = time.monotonic()
        self.reported = 0.0

    def add(self, items: int = 1) -> None:
        self.done += items
        now = time.monotonic()
        rate = self.done / max(now - self.started, 1e-9)
        progress = Progress(self.stage, self.done, self.total, rate, (self.total - self.done) / rate if rate else None)
        if self.reporter is not None:
            if now - self.reported >= REPORT_EVERY_S or self.done >= self.total:
                self.reported = now
                self.reporter(progress)
        elif now - self.logged >= LOG_EVERY_S:
            self.logged = now
            log.info("%s: %d of %d, %.0f/s, %s left", self.stage, self.done, self.total, rate, _clock(progress.eta_s))


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"
