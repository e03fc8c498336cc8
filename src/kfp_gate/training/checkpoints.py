"""Checkpoints in storage: immutable steps, a manifest with digests, and one small pointer written last.

    steps/000003-9f2c41/state.pt          everything a resume needs
    steps/000003-9f2c41/record.json       the training record so far
    steps/000003-9f2c41/best-0.pt         weights of a monitor that was best in this epoch
    steps/000003-9f2c41/manifest.json     name -> key, sha256, bytes; names may point into earlier steps; whose run
    latest.json                           {"step": "steps/000003-9f2c41", "epoch": 3, "manifest_sha256": ...}

A step without a manifest is half an upload and is never read. Uploads run in a thread of their own: training
waits for one only when the next is due, and no longer than a bound.
"""

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

from kfp_gate.errors import Broken, KfpGateError
from kfp_gate.evaluation.model_folder import sha256_of
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import Store, open_store
from kfp_gate.training.redaction import redact
from kfp_gate.training.stored_steps import MANIFEST, POINTER, Step, Stored

log = logging.getLogger(__name__)

KEPT_STEPS = 2
"""A step before the last stays, in case the last one turns out unreadable."""


@dataclass
class Lost:
    """What did not reach storage, for the training record."""

    epochs: list[int] = field(default_factory=list)
    last_error: str = ""


class Checkpoints:
    """Writes the checkpoints of one process. Only rank 0 has one."""

    def __init__(
        self, uri: str, folder: Path, *, bound_s: float, run: str = "", timeline: Timeline | None = None
    ) -> None:
        """`folder` holds the files until they are uploaded; `bound_s` is the longest wait for an upload; `run` is the
        pipeline run, written into each step; `timeline` gets a line for each upload."""
        self.uri, self.folder, self.bound_s, self.run = uri, folder, bound_s, run
        self.store: Store = open_store(uri)
        self.timeline = timeline
        self.token = secrets.token_hex(3)
        self.known: dict[str, Stored] = {}
        self.lost = Lost()
        self.waited_s = 0.0
        self.uploaded_epoch = 0
        self._thread: threading.Thread | None = None
        self._steps: list[Step] = []
        self._retry: tuple[int, Path, bool] | None = None
        self._last: tuple[int, Path, bool] | None = None

    def probe(self) -> float:
        """Write, read and delete a small object; returns the seconds it took.

        Raises:
            InvalidInput, Unavailable: the store refuses or does not answer.
            Broken: it returns something else than was written.
        """
        started, key, text = time.perf_counter(), f"probe-{self.token}", secrets.token_bytes(64)
        self.store.write(key, text)
        found = self.store.read(key)
        self.store.delete(key)
        if found != text:
            raise Broken(
                f"{len(found)} other bytes", expected="the bytes that were just written", where=f"{self.uri}/{key}",
                next_step="check the store: it does not return what is written to it",
            )  # fmt: skip
        return time.perf_counter() - started

    def begin_step(self, epoch: int) -> Path:
        """An empty local folder for the files of a step."""
        folder = self.folder / f"{epoch:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit(self, epoch: int, folder: Path, *, finished: bool = False, wait: bool = False) -> bool:
        """Upload a step's folder in the background; `wait` for its end.

        Returns:
            False if an earlier upload still runs after the bound: this step is then skipped, and said. The last step
            of a training is kept for `finish`.
        """
        self._join(self.bound_s)
        if self._thread is not None:
            self._lose(epoch, f"the upload before was still running after {self.bound_s:g} s")
            if finished:
                self._last = (epoch, folder, finished)
                return False
            self._keep_best(folder)
            shutil.rmtree(folder, ignore_errors=True)
            return False
        if self._retry is not None and self._retry[1] != folder:
            self._keep_best(self._retry[1])
            self._retry = None
        self._take_kept(folder)
        self._thread = threading.Thread(
            target=self._upload, args=(epoch, folder, finished), name="kfp-gate-upload", daemon=True
        )
        self._thread.start()
        if wait:
            self._join(None if self.bound_s == 0 else max(self.bound_s, 600))
        return True

    def account(self) -> dict[str, Any]:
        """Where the checkpoints are, and what did not get there, for the record."""
        return {
            "uri": self.uri, "uploaded_epoch": self.uploaded_epoch, "lost_epochs": list(self.lost.epochs),
            "last_error": self.lost.last_error, "waited_s": round(self.waited_s, 3),
        }  # fmt: skip

    def finish(self) -> None:
        """Wait for the last upload; upload what had to wait for it, or try once more what failed last."""
        self._join(max(self.bound_s, 600))
        waiting, self._last = self._last or self._retry, None
        if waiting is not None:
            epoch, folder, finished = waiting
            self.commit(epoch, folder, finished=finished, wait=True)

    def adopt(self, step: Step) -> None:
        """Continue from a step of the same store: its files may be pointed at."""
        self._steps.append(step)
        self.known.update({k: v for k, v in step.files.items() if k.startswith("best/")})
        self.uploaded_epoch = step.epoch

    def bring(self, files: Sequence[Path]) -> None:
        """Best weights from another store: the next step brings them here, unless it has better ones."""
        for path in files:
            (self.folder / "kept").mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, self.folder / "kept" / path.name)

    def _keep_best(self, folder: Path) -> None:
        """Best weights of a step that did not arrive: the next step brings them, unless it has better ones."""
        kept = self.folder / "kept"
        for path in sorted((folder / "best").glob("*")):
            kept.mkdir(parents=True, exist_ok=True)
            shutil.move(path, kept / path.name)

    def _take_kept(self, folder: Path) -> None:
        for path in sorted((self.folder / "kept").glob("*")):
            (folder / "best").mkdir(exist_ok=True)
            if not (folder / "best" / path.name).exists():
                shutil.move(path, folder / "best" / path.name)
            else:
                path.unlink()

    def _join(self, timeout: float | None) -> None:
        if self._thread is None:
            return
        started = time.perf_counter()
        self._thread.join(timeout)
        self.waited_s += time.perf_counter() - started
        if not self._thread.is_alive():
            self._thread = None

    def _upload(self, epoch: int, folder: Path, finished: bool) -> None:
        started, sent = time.perf_counter(), [0]
        try:
            step = self._put(epoch, folder, finished, sent)
        except Exception as error:
            self._tell(epoch, started, sent[0], ok=False)
            # Whatever a store's client raises: a thread that dies in silence would lose the step without a word.
            self._lose(epoch, redact(str(error).splitlines()[0]) if str(error) else type(error).__name__)
            self._retry = (epoch, folder, finished)
            return
        self._tell(epoch, started, sent[0], ok=True)
        self._retry = None
        self.uploaded_epoch = epoch
        if epoch in self.lost.epochs:
            self.lost.epochs.remove(epoch)
        shutil.rmtree(folder, ignore_errors=True)
        self._forget(step)

    def _tell(self, epoch: int, started: float, sent: int, *, ok: bool) -> None:
        if self.timeline is not None:
            seconds = round(time.perf_counter() - started, 4)
            self.timeline.write("upload", epoch=epoch, ok=ok, seconds=seconds, bytes=sent)

    def _put(self, epoch: int, folder: Path, finished: bool, sent: list[int]) -> Step:
        key = f"steps/{epoch:06d}-{self.token}"
        files = dict(self.known)
        for path in sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST):
            name = path.relative_to(folder).as_posix()
            stored = Stored(f"{key}/{name}", sha256_of(path), path.stat().st_size)
            self.store.upload(path, stored.key)
            sent[0] += stored.bytes
            files[name] = stored
            if name.startswith("best/"):
                self.known[name] = stored
        manifest = json.dumps(
            {"epoch": epoch, "finished": finished, "run": self.run, "files": {n: vars(s) for n, s in files.items()}},
            ensure_ascii=False, indent=1, sort_keys=True,
        ).encode()  # fmt: skip
        self.store.write(f"{key}/{MANIFEST}", manifest)
        pointer = {"step": key, "epoch": epoch, "finished": finished, "manifest_sha256": sha256(manifest).hexdigest()}
        self.store.write(POINTER, json.dumps(pointer).encode())
        return Step(key, epoch, files, finished, self.run)

    def _forget(self, step: Step) -> None:
        self._steps.append(step)
        kept, dropped = self._steps[-KEPT_STEPS:], self._steps[:-KEPT_STEPS]
        needed = {s.key for k in kept for s in k.files.values()}
        for old in dropped:
            gone = [s.key for s in old.files.values() if s.key not in needed]
            try:
                # The manifest first: what is left of the step can then no longer be taken for a whole one.
                if not any(k.startswith(f"{old.key}/") for k in needed):
                    self.store.delete(f"{old.key}/{MANIFEST}")
                for key in gone:
                    self.store.delete(key)
            except KfpGateError as error:
                log.warning("an old checkpoint was not removed: %s", error.found)
        self._steps = kept

    def _lose(self, epoch: int, why: str) -> None:
        if epoch not in self.lost.epochs:
            self.lost.epochs.append(epoch)
        self.lost.last_error = why
        log.warning("the checkpoint of epoch %d did not reach %s: %s. Training goes on.", epoch, self.uri, why)
