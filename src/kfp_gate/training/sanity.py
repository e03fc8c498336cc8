"""The sanity pass: what fails after the first epoch, or after the last, fails in the first minute instead.

A few validation images go through the whole path on every rank: prediction, gathering, metrics, the lookup of every
monitored name, best selection, early stopping, metric names and a real call to the tracking server, and a checkpoint
that is written, uploaded, read back and compared. Training afterwards is bit for bit what it would have been without.
"""

import copy
import logging
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfp_gate import metric_names
from kfp_gate.errors import Broken, InvalidInput, KfpGateError
from kfp_gate.evaluation.predict import Detector
from kfp_gate.storage import open_store
from kfp_gate.training import state as states
from kfp_gate.training import weights
from kfp_gate.training.group import PeerFailed
from kfp_gate.training.redaction import redact

if TYPE_CHECKING:
    from kfp_gate.training.course import TrainingCourse
    from kfp_gate.training.trainer import RankTrainer
    from kfp_gate.training.validation import Values

log = logging.getLogger(__name__)


class SanityPass:
    """One run of the path. `part` is what is being tried, for the message."""

    def __init__(self, course: "TrainingCourse") -> None:
        self.course, self.part = course, ""
        self.seconds: dict[str, float] = {}
        self._since = 0.0

    def run(self, trainer: "RankTrainer") -> dict[str, Any]:
        """Try everything on all ranks.

        Returns:
            Seconds by part, the number of images, and remarks such as a tracking server that does not answer.

        Raises:
            InvalidInput, Unavailable, Broken: on all ranks, naming the part that broke.
        """
        course, started = self.course, time.perf_counter()
        random = states.pack_random(trainer)
        pending = dict(trainer.optimizer.state_dict()["state"])
        error: BaseException | None = None
        remarks: list[str] = []
        count = course.spec.sanity_batches * course.validation.settings.batch * course.group.size
        indexes = course.validation.sample(count, course.spec.monitors)
        try:
            self._begin("prediction, gathering and metrics")
            values = course.validation.run(trainer.ema.ema, only=indexes)
            self._begin("checkpoint: taking the state")
            captured = states.capture(trainer, trainer.start_epoch, extra={"sanity": True})
            try:
                if course.group.rank == 0:
                    remarks = self._on_first(trainer, values, captured)
            except Exception as caught:
                error = caught
            # The part that failed is known on rank 0 alone.
            self.part = str(course.group.broadcast(self.part))
            course.group.agree(f"sanity pass: {self.part}", error)
        except PeerFailed:
            raise
        except KfpGateError as caught:
            raise _in_part(caught, self.part) from caught
        except Exception as caught:
            raise Broken(
                f"{type(caught).__name__}: {caught}", expected="this part of the path to work",
                where=f"sanity pass before epoch 1: {self.part}",
                next_step="nothing was trained yet; see the traceback in this rank's failure file",
            ) from caught  # fmt: skip
        finally:
            states.unpack_random(trainer, random)
        self._begin("")
        assert pending.keys() == trainer.optimizer.state_dict()["state"].keys()
        total = time.perf_counter() - started
        log.info("sanity pass: %d images through the whole path in %.1f s", len(indexes), total)
        for remark in remarks:
            log.warning("sanity pass: %s", remark)
        parts = {k: round(v, 3) for k, v in self.seconds.items()}
        return {"images": len(indexes), "seconds": round(total, 3), "parts": parts, "remarks": remarks}

    def _on_first(self, trainer: "RankTrainer", values: "Values", captured: dict[str, Any] | None) -> list[str]:
        course, remarks = self.course, []
        self._begin("lookup of the monitored names")
        course.monitors.look_up(values)
        self._begin("best selection and early stopping")
        monitors = copy.deepcopy(course.monitors)
        observation = monitors.observe(trainer.start_epoch + 1, values)
        monitors.restore(monitors.state())
        if not math.isfinite(observation.fitness):
            raise Broken(
                f"fitness {observation.fitness}", expected="a finite fitness", where="monitors",
                next_step="report this with the monitors of the spec",
            )  # fmt: skip
        self._begin("metric names")
        _check_names(list(values))
        self._begin("tracking")
        remarks += self._tracking(values)
        self._begin("checkpoint: writing weights and state")
        assert captured is not None
        folder = course.folder / "sanity"
        folder.mkdir(parents=True, exist_ok=True)
        state, model = folder / "state.pt", folder / "model.pt"
        states.write_state(captured, state)
        model.write_bytes(weights.weights_bytes(trainer, epoch=0))
        if course.checkpoints is not None:
            self._begin("checkpoint: upload")
            state, model = self._round_trip(state), self._round_trip(model)
        self._begin("checkpoint: reading it back")
        _compare(states.read_state(state), captured)
        if Detector.load(model).classes != course.validation.manifest.classes:
            raise Broken(
                "weights that carry other classes", expected="the classes of the manifests", where="weights file",
                next_step="report this",
            )  # fmt: skip
        for path in folder.iterdir():
            path.unlink()
        return remarks

    def _tracking(self, values: "Values") -> list[str]:
        tracker = self.course.tracker
        if tracker is None or not tracker.active:
            return []
        shown = {f"sanity/{n}": values[n] for n in self.course.spec.monitors}
        tracker.log({**shown, "sanity/images": float(len(values))}, step=0)
        if not tracker.flush(8.0):
            # An outage is never a reason not to train; the spool has the values.
            return [f"tracking does not answer: {tracker.delivery.last_error or 'no answer yet'}; values are kept"]
        # Parameters of a run that is continued cannot change any more; that they are refused hurts nobody.
        refused = sorted(n for n in shown if metric_names.to_mlflow(n) in tracker.delivery.refused)
        if refused:
            raise Broken(
                f"the tracking server refused {refused}", expected="names that it accepts",
                where=redact(tracker.uri), next_step="report this with the metric names and the server's version",
            )  # fmt: skip
        return []

    def _round_trip(self, path: Path) -> Path:
        checkpoints = self.course.checkpoints
        assert checkpoints is not None
        store, key = open_store(checkpoints.uri), f"sanity-{checkpoints.token}/{path.name}"
        back = path.with_name(f"back-{path.name}")
        store.upload(path, key)
        try:
            store.download(key, back)
        finally:
            store.delete(key)
        if back.read_bytes() != path.read_bytes():
            raise Broken(
                f"{back.stat().st_size} other bytes", expected="the bytes that were uploaded",
                where=f"{checkpoints.uri}/{key}", next_step="check the store: it does not return what is written to it",
            )  # fmt: skip
        return back

    def _begin(self, part: str) -> None:
        now = time.perf_counter()
        if self.part:
            self.seconds[self.part] = now - self._since
        self.part, self._since = part, now


def _check_names(names: list[str]) -> None:
    keys: dict[str, str] = {}
    for name in names:
        key = metric_names.to_mlflow(name)
        if key in keys:
            raise InvalidInput(
                f"{name!r} and {keys[key]!r} would be the same metric", expected="distinct class names",
                where="metric names", next_step="rename one of the classes",
            )  # fmt: skip
        keys[key] = name


def _compare(found: Any, expected: Any, where: str = "state") -> None:
    """Raise Broken unless both are equal, tensors bit by bit."""
    same = True
    if isinstance(expected, torch.Tensor):
        same = isinstance(found, torch.Tensor) and found.dtype == expected.dtype and torch.equal(found, expected)
        # NaN is unequal to itself, and never belongs into a state at this point either.
    elif isinstance(expected, dict):
        same = isinstance(found, dict) and list(found) == list(expected)
        if same:
            for key in expected:
                _compare(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list | tuple):
        same = isinstance(found, list | tuple) and len(found) == len(expected)
        if same:
            for index, value in enumerate(expected):
                _compare(found[index], value, f"{where}[{index}]")
    else:
        same = found == expected
    if not same:
        raise Broken(
            f"{where} is not what was written", expected="the state that was written", where="checkpoint",
            next_step="report this with the versions of torch in the record",
        )  # fmt: skip


def _in_part(error: KfpGateError, part: str) -> KfpGateError:
    return type(error)(
        error.found, expected=error.expected, where=f"sanity pass before epoch 1: {part}; {error.where}",
        next_step=error.next_step, problems=error.problems,
    ) if not isinstance(error, PeerFailed) else error  # fmt: skip


def check_images(trainer: "RankTrainer", wanted: Sequence[Path]) -> None:
    """Refuse to train on fewer images than there are: upstream drops images and labels that it does not like, with a
    line in the log at most.

    Raises:
        InvalidInput: naming the first of those that were dropped.
    """
    count = len(trainer.train_loader.dataset)
    if count != len(wanted):
        present = {Path(f).name for f in trainer.train_loader.dataset.im_files}
        missing = [p for p in wanted if p.name not in present][:20]
        raise InvalidInput(
            f"{len(wanted) - count} of {len(wanted)} train images were dropped by the loader: "
            + ", ".join(m.name for m in missing),
            expected="images that decode, at least 10 pixels wide and high", where="train set",
            next_step="repair or remove these images, and split again",
        )  # fmt: skip
