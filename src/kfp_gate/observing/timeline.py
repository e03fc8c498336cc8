"""The timeline of a process: JSON lines, one per observation, written as they happen.

    {"kind": "epoch", "time": "2026-01-02T03:04:05.678+00:00", "mono": 12.345, "run": "ab12", "rank": 0,
     "node": "pod-0", "gpu": null, "phase": "", "epoch": 3, ...}

Times are of the moment when a line is written, with their zone; `mono` is the process's own clock. The kinds:

    start       a process begins: pid, versions, ranks
    conditions  once per process, before its first step, and again if a batch that is too large for the GPU is halved:
                manifests, classes, train_images, val_images, steps_per_epoch, epochs, batch (over all ranks),
                rank_batch, ranks, workers (loader processes as started), prefetch (batches a worker), pin_memory,
                precision, image_size, device, gpu_name, cpus, cpu_quota (cores), memory_limit, monitors, stop_on,
                patience, min_delta, min_epochs, seed, base_model, sample_every_s, settings
    gpu         the device, once: uuid, name, mig, driver, unknown {reading: reason}
    window      a stretch of steps, without gap or overlap: epoch, batches [first, last], steps, images,
                warmup (one of the first steps of the process), input ("usual", "prepared"), profiled,
                seconds {phase: s} of the host's clock, of phases that do not overlap,
                device {phase: s} that the device finished meanwhile, null without a device clock,
                each [[data_s, total_s], ...] of at most 32 of the steps, bytes of image tensors,
                loader {batches, bytes read from files, parts {part: [wall_s, cpu_s, calls]}, ready}: sums over the
                loader processes that made these batches, each moment in one part; `ready` is the mean number of
                batches that waited when the training asked for the next; null where it is not known
    phases      an epoch's seconds {phase: s}, steps, device {phase: s}
    validation  an epoch's: seconds, images of this rank, parts {part: s}, threads (load, forward and suppress are
                summed over them)
    checkpoint  epoch, ok, seconds (training stood still), waited_s (of it: for an earlier upload)
    upload      in the background: epoch, ok, seconds, bytes
    memory      an epoch's, see `kfp_gate.observing.memory.Memory`; by_phase {phase: {kind: bytes
                kept}}; the first one has at_start, the same values when its first step began
    sample      about once a second, see `kfp_gate.observing.sampler`
    epoch       rank 0: values, losses
    growth      memory that grows towards its limit, when the log says so: what, phase, since, slope, low, high
                (bytes an epoch), limit, limit_epoch, text
    probe, profile      see `kfp_gate.training.probe` and `kfp_gate.training.profiling`
    sanity, resume, recover (an epoch is done again), stop, failure, end

Readers must tolerate kinds and keys that they do not know, a last line that was cut, several starts in one file, and
values that are null: null is "unknown", never zero. Between two lines nothing was seen: that is a gap, not a pause.
"""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any


class Timeline:
    """A file that grows by one line per observation; safe to write from several threads."""

    def __init__(self, path: Path, **identity: Any) -> None:
        """`identity` (run, rank, node, gpu, ...) is on every line."""
        self.path, self.identity = path, identity
        self._phase = ""
        self.on_phase: Callable[[str, str], None] | None = None
        """Called where a phase ends and the next begins, with both names."""
        self._lock = threading.Lock()
        self._lost = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._cut = _ends_in_a_line(path)
        """Whether the file ends within a line: a full disk, or the end of an earlier process, cut it."""

    @property
    def phase(self) -> str:
        """What the process does: on every line."""
        return self._phase

    @phase.setter
    def phase(self, name: str) -> None:
        if self.on_phase is not None:
            self.on_phase(self._phase, name)
        self._phase = name

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
                    # What was cut stays alone: it must not take this line with it.
                    handle.write(("\n" if self._cut else "") + line + "\n")
                self._lost, self._cut = 0, False
            except OSError:
                self._lost, self._cut = self._lost + 1, True


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


def _ends_in_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as handle:
            handle.seek(-1, os.SEEK_END)
            return handle.read(1) != b"\n"
    except OSError:
        # None yet, or empty.
        return False


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
