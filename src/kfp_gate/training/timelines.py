"""Every rank's timeline leaves its pod while training runs.

    checkpoint_uri/timelines/<run token>/rank<k>.jsonl.gz      about once a minute, and after epochs
    MLflow run, training/timeline-rank0.jsonl.gz, record.json  rank 0, every few minutes; all ranks' at the end

A thread of its own packs the lines that are new and writes the whole object again; no step waits for it, and a store
that is down costs one line in the log. What a run of weeks writes stays bounded: the first lines and the last ones
are kept, and the larger the object is, the less often it is sent.
"""

import gzip
import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_gate.errors import KfpGateError
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import Store, open_store
from kfp_gate.training.record import Record
from kfp_gate.training.tracking import Tracker

if TYPE_CHECKING:
    from kfp_gate.training.group import Group

log = logging.getLogger(__name__)

EVERY_S, LEAST_S, AWAY_S = 60.0, 15.0, 600.0
"""How often the object is written; the least time between two; and between two tries at a store that is down."""

ARTIFACT_S = 300.0
"""The least time between two uploads to the tracking server, which keeps every byte it is sent."""

PACE, ARTIFACT_PACE = 32 << 10, 8 << 10
"""Bytes a second that go to the store, and to the tracking server, at most on average."""

PACKED_BYTES, SHARED_BYTES, TOGETHER_BYTES = 32 << 20, 4 << 20, 32 << 20
"""The most that is kept of a timeline; that goes of one to rank 0 through the process group; and of all together,
compressed to a tenth."""

PIECE = 4 << 20
"""Bytes that are read, and compressed, at a time."""

TRACK_S = 60.0
"""How long the other ranks' timelines may take to the tracking server: those ranks wait meanwhile."""


class Packed:
    """A growing file, compressed piece by piece: no line is compressed twice."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pieces: list[bytes] = []
        self._read = 0
        self._lock = threading.Lock()

    def grow(self) -> bool:
        """Take in the whole lines that are new; whether there were any."""
        grown = False
        with self._lock:
            while fresh := self._fresh():
                grown = True
                self._read += len(fresh)
                self._pieces = _within([*self._pieces, gzip.compress(fresh, 6, mtime=0)], PACKED_BYTES)
        return grown

    @property
    def size(self) -> int:
        """Bytes of all that is kept."""
        with self._lock:
            return sum(map(len, self._pieces))

    def content(self, bound: int = PACKED_BYTES) -> bytes:
        """A gzip file of the first piece and as many of the last ones as fit."""
        with self._lock:
            return b"".join(_within(self._pieces, bound))

    def _fresh(self) -> bytes:
        try:
            with self.path.open("rb") as handle:
                handle.seek(self._read)
                found = handle.read(PIECE)
        except OSError:
            return b""
        return found[: found.rfind(b"\n") + 1]


class Timelines:
    """The way out of one rank's timeline."""

    def __init__(
        self, timeline: Timeline, uri: str, token: str, *, rank: int, folder: Path, tracker: Tracker | None = None
    ) -> None:
        """`uri` of the store, `token` of the run there; `folder` for files on their way to `tracker`, rank 0's."""
        self.uri, self.key = uri, f"timelines/{token}/rank{rank}.jsonl.gz"
        self.rank, self.folder, self.tracker = rank, folder, tracker
        self.packed = Packed(timeline.path)
        self.failures = 0
        self.cost_s = 0.0
        """CPU seconds that packing and sending took."""
        self._store: Store | None = None
        self._record = b""
        self._said = self._refused = False
        self._sent_at = self._artifact_at = self._track_until = -1e9
        self._wake, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kfp-gate-timelines", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def epoch_ends(self, record: Record | None = None) -> None:
        """Something is worth sending; `record` is taken as it is now."""
        if record is not None and self._artifact_is_due():
            self._record = json.dumps(record.values(), ensure_ascii=False, indent=1, default=str).encode()
        self._wake.set()

    def content(self) -> bytes:
        """The timeline up to now, gzip."""
        self.packed.grow()
        return self.packed.content()

    def stop(self, timeout_s: float = 10.0) -> None:
        """Send what is left, and wait for that no longer than this; less where the store did not answer before."""
        self._done.set()
        self._wake.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s if not self.failures else timeout_s / 4)
            # Whatever it hangs in, nothing more is sent that others would wait for.
            self._refused = self._refused or self._thread.is_alive()
        self._track_until = time.monotonic() + TRACK_S

    def _run(self) -> None:
        last = False
        while not last:
            paced = self.packed.size / PACE
            self._wake.wait(AWAY_S if self.failures else max(EVERY_S, paced))
            self._wake.clear()
            least = AWAY_S if self.failures else max(LEAST_S, paced)
            # Before anything is sent: `stop` may come while that is under way, and its lines go too.
            last = self._done.is_set()
            if last or time.monotonic() - self._sent_at >= least:
                started = time.thread_time()
                self._send()
                self.cost_s += time.thread_time() - started

    def _send(self) -> None:
        self._sent_at = time.monotonic()
        if self.packed.grow() or self.failures:
            self._to_store()
        if self.tracker is not None and self._artifact_is_due():
            self._artifact_at = time.monotonic()
            self._to_tracker(self.tracker)

    def _to_store(self) -> None:
        try:
            if self._store is None:
                self._store = open_store(self.uri)
            self._store.write(self.key, self.packed.content())
            self.failures = 0
        except Exception as error:
            # Whatever a store's client raises: a record of the training is never worth the training.
            if not self._said:
                what = error.found if isinstance(error, KfpGateError) else type(error).__name__
                log.warning("the timeline of rank %d does not reach storage (%s). Training goes on.", self.rank, what)
            self._said = True
            self.failures += 1

    def _artifact_is_due(self) -> bool:
        # A run that is not open yet, or a server that is away, is tried with a later object.
        if self.tracker is None or not self.tracker.ready:
            return False
        least = max(ARTIFACT_S, self.packed.size / ARTIFACT_PACE)
        return self._done.is_set() or time.monotonic() - self._artifact_at >= least

    def track(self, rank: int, packed: bytes) -> None:
        """After `stop`: send the timeline of another rank to the tracking server too, unless that has refused one, or
        all of them take too long."""
        if self.tracker is not None and not self._refused and time.monotonic() < self._track_until:
            self._refused = not self._file(self.tracker, f"timeline-rank{rank}.jsonl.gz", packed)

    def _to_tracker(self, tracker: Tracker) -> None:
        sent = self._file(tracker, f"timeline-rank{self.rank}.jsonl.gz", self.packed.content())
        if self._record and not self._done.is_set():
            sent = sent and self._file(tracker, "record.json", self._record)
        self._refused = not sent

    def _file(self, tracker: Tracker, name: str, content: bytes) -> bool:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        except OSError:
            return False
        return tracker.send_file(self.folder / name)


def share(timelines: Timelines, group: "Group", folder: Path) -> None:
    """Stop, and put the other ranks' timelines beside rank 0's, into `folder` there: their pods are gone soon."""
    timelines.stop()
    bound = min(SHARED_BYTES, TOGETHER_BYTES // max(1, group.size - 1))
    for rank in range(1, group.size):
        own = timelines.packed.content(bound) if rank == group.rank else b""
        packed = group.broadcast_bytes(own, source=rank)
        if group.rank == 0:
            file = folder / f"timeline-rank{rank}.jsonl"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file.write_bytes(gzip.decompress(packed))
            except OSError as error:
                log.warning("the timeline of rank %d could not be written: %s", rank, error)
                # Its half would take the room that the model needs.
                file.unlink(missing_ok=True)
            timelines.track(rank, packed)


def ends_of(path: Path, bound: int) -> bytes:
    """The whole lines at a file's beginning and end that fit, a seventh of them at the beginning."""
    with path.open("rb") as handle:
        if path.stat().st_size <= bound:
            return handle.read()
        first = handle.read(bound // 7)
        handle.seek(len(first) - bound, os.SEEK_END)
        last = handle.read(bound - len(first))
    return first[: first.rfind(b"\n") + 1] + last[last.find(b"\n") + 1 :]


def _within(pieces: list[bytes], bound: int) -> list[bytes]:
    kept: list[bytes] = []
    left = bound - len(pieces[0]) if pieces else 0
    for piece in reversed(pieces[1:]):
        if len(piece) > left:
            break
        kept.append(piece)
        left -= len(piece)
    return [*pieces[:1], *reversed(kept)]
