"""For training code of one's own: `launch_training(command=[...])` runs it on the ranks, and this helps it to hold.

    from kfp_gate.training import api

    with api.start(epochs=10) as run:                      # ranks from the environment, or a single process
        run.sanity(lambda: evaluate_two_batches())         # on all ranks; what fails there fails now
        for epoch in range(1, 11):
            train()
            records = run.gather(own_records)              # rank 0 gets all, the others None
            run.log({"map50": 0.4, "class/cone/map50": 0.3}, step=epoch)
            run.memory_line(epoch)
            run.checkpoint(epoch, {"weights.pt": path})
            run.progress(epoch, monitors={"map50": 0.4})

It works the same on a laptop without a launcher: one rank, no tracking and no storage unless they are named, a local
folder for what is written. Only `gather` imports torch, and only when there are several ranks.
"""

import logging
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_gate.errors import Broken, KfpGateError
from kfp_gate.observing.memory import find_control_group, memory_line, read_memory
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.checkpoints import Checkpoints, fetch, find_latest
from kfp_gate.training.progress import PROGRESS, Eta, say
from kfp_gate.training.ranks import Ranks, read_ranks
from kfp_gate.training.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Delivery, Tracker

if TYPE_CHECKING:
    from kfp_gate.evaluation.records import Records

log = logging.getLogger(__name__)


class Run:
    """One rank of a training that is not ours. Make it with `start`."""

    def __init__(
        self, ranks: Ranks, folder: Path, *, epochs: int, tracker: Tracker | None, checkpoints: Checkpoints | None
    ) -> None:
        self.ranks, self.folder, self.epochs = ranks, folder, epochs
        self.timeline = Timeline(
            folder / f"rank{ranks.rank}" / "timeline.jsonl", run=os.environ.get("KFP_GATE_RUN_ID", ""), rank=ranks.rank,
            node=socket.gethostname(),
        )  # fmt: skip
        self._tracker, self._checkpoints = tracker, checkpoints
        self._control_group = find_control_group()
        self._eta: Eta | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone logs and stores."""
        return self.ranks.is_first

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
        """Log and keep one memory line; returns it."""
        memory = read_memory(group=self._control_group, cuda=_cuda(), children=True)
        line = memory_line(epoch, self.epochs, memory)
        self.timeline.write("memory", epoch=epoch, **memory.values())
        log.info("%s", line)
        return line

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
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._tracker is None:
            return Delivery()
        return self._tracker.close(status="FINISHED" if ok else "FAILED")


@contextmanager
def start(
    *, epochs: int, folder: Path | str = "kfp-gate-run", tracking_uri: str = "", experiment: str = "kfp-gate",
    checkpoint_uri: str = "", upload_bound_s: float = 120.0,
) -> Iterator[Run]:  # fmt: skip
    """A run for this process.

    Args:
        epochs: for the lines and the time left.
        folder: for what this process writes itself.
        tracking_uri: MLflow; empty: MLFLOW_TRACKING_URI, else no tracking.
        experiment: MLflow experiment.
        checkpoint_uri: path or s3://; empty: KFP_GATE_CHECKPOINT_URI, else no storage.
        upload_bound_s: the longest wait for an upload that still runs.

    Raises:
        InvalidInput: an environment that contradicts itself.
    """
    ranks, place = read_ranks(), Path(folder)
    own = place / f"rank{ranks.rank}"
    own.mkdir(parents=True, exist_ok=True)
    uri = checkpoint_uri or os.environ.get("KFP_GATE_CHECKPOINT_URI", "")
    tracker = checkpoints = None
    if ranks.is_first:
        tags = {PIPELINE_RUN_TAG: os.environ.get("KFP_GATE_RUN_ID", ""), ROLE_TAG: "training"}
        tracker = Tracker(
            uri=tracking_uri, experiment=experiment, spool=own / "tracking-spool.jsonl",
            tags={k: v for k, v in tags.items() if v},
        )  # fmt: skip
        run_id = os.environ.get("KFP_GATE_RUN_ID", "")
        checkpoints = Checkpoints(uri, own / "uploads", bound_s=upload_bound_s, run=run_id) if uri else None
    run = Run(ranks, place, epochs=epochs, tracker=tracker, checkpoints=checkpoints)
    try:
        yield run
    except BaseException:
        run.close(ok=False)
        raise
    run.close(ok=True)


def _cuda() -> dict[str, int] | None:
    # A framework other than torch has no allocator to ask, and importing torch for it would cost seconds.
    import sys

    if "torch" not in sys.modules:
        return None
    from kfp_gate.training.device_clock import cuda_memory

    return cuda_memory()
