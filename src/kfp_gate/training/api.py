"""For training code of one's own: `launch_training(command=[...])` runs it on the ranks, and this helps it to hold.

    from kfp_gate.training import api

    with api.start(epochs=10) as run:                      # ranks from the environment, or a single process
        run.sanity(lambda: evaluate_two_batches())         # on all ranks; what fails there fails now
        run.conditions(loader, batch=64)                   # what a later comparison must know
        for epoch in range(1, 11):
            with run.epoch(epoch):
                for images, labels in run.batches(loader): # waiting for a batch is the phase "data"
                    loss = criterion(model(images), labels)
                    run.phases.enter("backward")
                    loss.backward()
                    run.phases.enter("optimizer")
                    optimizer.step()
                    run.step_done(images=len(images))
                with run.phases.during("validation"):
                    own_records = evaluate()
            records = run.gather(own_records)              # rank 0 gets all, the others None
            run.log({"map50": 0.4, "class/cone/map50": 0.3}, step=epoch)
            run.memory_line(epoch)
            run.checkpoint(epoch, {"weights.pt": path})
            run.progress(epoch, monitors={"map50": 0.4})

The timeline has the same lines as the worker's, so `kfp-gate diagnose` reads it, and `kfp_gate.observing.loading` tells
the parts of a data set of one's own. It works the same on a laptop without a launcher: one rank, no tracking and no
storage unless they are named, a local folder for what is written. torch is imported only by `gather` on several ranks
and by `start(cuda=True)`.
"""

import logging
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gate.errors import Broken, KfpGateError
from kfp_gate.observing.memory import Memory, find_control_group, memory_line, read_memory
from kfp_gate.observing.phases import Phases
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.delivery import Delivery
from kfp_gate.training.memory_watch import MemoryWatch
from kfp_gate.training.own_steps import OwnSteps, allocator
from kfp_gate.training.progress import PROGRESS, Eta, say
from kfp_gate.training.ranks import Ranks, read_ranks
from kfp_gate.training.stored_steps import fetch, find_latest
from kfp_gate.training.timelines import Timelines
from kfp_gate.training.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Tracker

if TYPE_CHECKING:
    from kfp_gate.evaluation.records import Records

log = logging.getLogger(__name__)


class Run:
    """One rank of a training that is not ours. Make it with `start`."""

    def __init__(
        self, ranks: Ranks, folder: Path, *, epochs: int, tracker: Tracker | None, checkpoints: Checkpoints | None,
        timeline: Timeline, steps: OwnSteps,
    ) -> None:  # fmt: skip
        self.ranks, self.folder, self.epochs, self.timeline = ranks, folder, epochs, timeline
        self._tracker, self._checkpoints, self._steps = tracker, checkpoints, steps
        self._control_group = find_control_group()
        self._memory_watch = MemoryWatch(timeline, epochs=epochs, read=self._memory)
        self._eta: Eta | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone logs and stores."""
        return self.ranks.is_first

    @property
    def phases(self) -> Phases:
        """The clock of a step's phases: `enter` one, or be in one `during` a block. See `kfp_gate.observing.phases`."""
        return self._steps.phases

    def conditions(self, loader: Any = None, **values: Any) -> None:
        """Write once, before the first step, what the training runs under: batch, precision, seed, ... as in
        `kfp_gate.observing.timeline`. torch's loader tells its processes and batch size itself."""
        self._steps.conditions(loader, **values)

    def epoch(self, epoch: int) -> AbstractContextManager[None]:
        """Around an epoch, from 1, and its validation; logs and keeps one phase line at the end."""
        return self._steps.epoch(epoch)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, once through, as its collate function made them; waiting is the phase `data`."""
        return self._steps.batches(loader)

    def step_done(self, *, images: int | None = None) -> None:
        """At the end of a training step: every few seconds a `window` line says where their time went."""
        self._steps.step_done(images=images)

    def log(self, values: Mapping[str, float | None], *, step: int) -> None:
        """Log metrics under any names, from rank 0; None, NaN and infinity are left out and counted. Never raises."""
        if self._tracker is not None:
            self._tracker.log(values, step=step)

    def gather(self, records: "Records") -> "Records | None":
        """Evaluation records of all ranks on rank 0, None elsewhere; every rank must call it.

        Raises:
            Broken: ranks hold the same image, or the process group was not made yet.
        """
        if self.ranks.world_size == 1:
            return records
        import torch.distributed as dist

        from kfp_gate.evaluation.gather import gather_records

        if not dist.is_initialized():
            raise Broken(
                f"no process group on rank {self.ranks.rank} of {self.ranks.world_size}",
                expected="torch.distributed.init_process_group before", where="gather",
                next_step="make the process group before the first gather",
            )  # fmt: skip
        return gather_records(records)

    def memory_line(self, epoch: int) -> str:
        """At an epoch's end: log and keep one memory line; returns it. Warns if a limit is ahead."""
        memory = self._memory_watch.read()
        line = memory_line(epoch, self.epochs, memory)
        self.timeline.write("memory", epoch=epoch, **memory.values(), **self._memory_watch.take())
        log.info("%s", line)
        self._memory_watch.epoch_ends(epoch, memory)
        return line

    def _memory(self, *, children: bool = False, pss: bool = False) -> Memory:
        return read_memory(group=self._control_group, cuda=allocator(), children=children, pss=pss)

    def progress(self, epoch: int, *, monitors: Mapping[str, float | None] | None = None) -> None:
        """Tell the launcher where training is, from rank 0."""
        if self._eta is None:
            self._eta = Eta(self.epochs, epoch)
        if self.is_first:
            say(
                PROGRESS,
                epoch=epoch,
                epochs=self.epochs,
                eta_s=round(self._eta.after(epoch), 1),
                monitors=dict(monitors or {}),
            )

    def sanity(self, check: Callable[[], object]) -> None:
        """Try the path before epoch 1: your own `check` on every rank, then tracking and storage on rank 0.

        Raises:
            Broken: `check` raised; the message says so, and nothing was trained yet.
            InvalidInput, Unavailable: the store refuses or does not answer.
        """
        try:
            check()
        except KfpGateError:
            raise
        except Exception as error:
            raise Broken(
                f"{type(error).__name__}: {error}", expected="the path after an epoch to work",
                where=f"sanity check on rank {self.ranks.rank}", next_step="nothing was trained yet; see the traceback",
            ) from error  # fmt: skip
        if self._checkpoints is not None:
            self._checkpoints.probe()
        if self._tracker is not None and self._tracker.active:
            self._tracker.log({"sanity/reached": 1.0}, step=0)
            if not self._tracker.flush(8.0):
                log.warning("tracking does not answer yet (%s); values are kept", self._tracker.delivery.last_error)

    def checkpoint(self, epoch: int, files: Mapping[str, Path], *, finished: bool = False) -> bool:
        """Upload files as an immutable, complete-or-absent step, in the background, from rank 0.

        Args:
            epoch: from 1.
            files: names in the checkpoint to local files; copied at once, so they may change afterwards.
            finished: the training is over.

        Returns:
            False if it was skipped, since the upload before still runs.
        """
        if self._checkpoints is None:
            return True
        step = self._checkpoints.begin_step(epoch)
        for name, path in files.items():
            target = step / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        return self._checkpoints.commit(epoch, step, finished=finished)

    def latest(self, names: list[str], folder: Path) -> tuple[int, dict[str, Path]] | None:
        """Epoch and verified files of the last complete checkpoint, to resume from; None if there is none.

        Raises:
            Broken: a file is damaged. Unavailable: the store does not answer.
        """
        uri = os.environ.get("KFP_GATE_CHECKPOINT_URI", "") if self._checkpoints is None else self._checkpoints.uri
        step = find_latest(uri, run=os.environ.get("KFP_GATE_RUN_ID", "")) if uri else None
        return (step.epoch, fetch(uri, step, names, folder)) if step is not None else None

    def close(self, *, ok: bool) -> Delivery:
        """Wait for uploads and tracking; says what was not delivered."""
        self._steps.stop(ok=ok)
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._tracker is None:
            return Delivery()
        return self._tracker.close(status="FINISHED" if ok else "FAILED")


@contextmanager
def start(
    *, epochs: int, folder: Path | str = "kfp-gate-run", tracking_uri: str = "", experiment: str = "kfp-gate",
    checkpoint_uri: str = "", upload_bound_s: float = 120.0, cuda: bool = False,
) -> Iterator[Run]:  # fmt: skip
    """A run for this process.

    Args:
        epochs: for the lines and the time left.
        folder: for what this process writes itself.
        tracking_uri: MLflow; empty: MLFLOW_TRACKING_URI, else no tracking.
        experiment: MLflow experiment.
        checkpoint_uri: path or s3://; empty: KFP_GATE_CHECKPOINT_URI, else no storage.
        upload_bound_s: the longest wait for an upload that still runs.
        cuda: this process computes on torch's current CUDA device: phases are measured there too.

    Raises:
        InvalidInput: an environment that contradicts itself.
    """
    ranks, place = read_ranks(), Path(folder)
    own = place / f"rank{ranks.rank}"
    own.mkdir(parents=True, exist_ok=True)
    run_id = os.environ.get("KFP_GATE_RUN_ID", "")
    timeline = Timeline(own / "timeline.jsonl", run=run_id, rank=ranks.rank, node=socket.gethostname())
    uri = checkpoint_uri or os.environ.get("KFP_GATE_CHECKPOINT_URI", "")
    tracker = checkpoints = None
    if ranks.is_first:
        tags = {PIPELINE_RUN_TAG: run_id, ROLE_TAG: "training"}
        tracker = Tracker(
            uri=tracking_uri, experiment=experiment, spool=own / "tracking-spool.jsonl",
            tags={k: v for k, v in tags.items() if v},
        )  # fmt: skip
        if uri:
            checkpoints = Checkpoints(
                uri, own / "uploads", bound_s=upload_bound_s, run=run_id, timeline=timeline
            )  # fmt: skip
    timelines = None
    if uri:
        timelines = Timelines(
            timeline, uri, _token(run_id, ranks), rank=ranks.rank, folder=own / "tracked", tracker=tracker
        )  # fmt: skip
    steps = OwnSteps(timeline, ranks, epochs=epochs, cuda=cuda, timelines=timelines)
    run = Run(ranks, place, epochs=epochs, tracker=tracker, checkpoints=checkpoints, timeline=timeline, steps=steps)
    try:
        yield run
    except BaseException:
        run.close(ok=False)
        raise
    run.close(ok=True)


def _token(run_id: str, ranks: Ranks) -> str:
    """The same on all ranks of one start, without a word between them; another one for each start, as far as that
    can be told."""
    if ranks.world_size == 1:
        return secrets.token_hex(3)
    started = (run_id, ranks.address, str(ranks.port), os.environ.get("TORCHELASTIC_RESTART_COUNT", ""))
    return sha256(" ".join(started).encode()).hexdigest()[:6]
