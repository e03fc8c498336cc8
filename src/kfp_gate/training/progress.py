"""Lines for the launcher on standard output: a prefix and one JSON object."""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

PROGRESS, FAILURE = "KFP_GATE_PROGRESS", "KFP_GATE_FAILURE"


def say(prefix: str, **values: Any) -> None:
    """Write one line at once: a line that waits in a buffer dies with its process."""
    sys.stdout.write(f"{prefix} {json.dumps(values, ensure_ascii=False, default=str)}\n")
    sys.stdout.flush()


@dataclass
class Eta:
    """Seconds to the end, from the epochs of this process alone: a resumed run may be on another machine."""

    epochs: int
    first: int
    started: float = field(default_factory=time.monotonic)

    def after(self, epoch: int) -> float:
        done = epoch - self.first + 1
        return (time.monotonic() - self.started) / max(done, 1) * (self.epochs - epoch)
