"""A thread that looks at its process about once a second."""

import threading
import time
from pathlib import Path
from typing import Any

from kfp_gate.observing.timeline import Timeline


class Sampler:
    """Writes `sample` lines to a timeline until it is stopped."""

    def __init__(self, timeline: Timeline, *, every_s: float = 1.0, root: Path = Path("/")) -> None:
        self.timeline, self.every_s, self.root = timeline, every_s, root
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kfp-gate-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._done.set()

    def _run(self) -> None:
        while not self._done.wait(self.every_s):
            self.timeline.write("sample", **self._look())

    def _look(self) -> dict[str, Any]:
        return {"cpu_s": time.process_time()}
