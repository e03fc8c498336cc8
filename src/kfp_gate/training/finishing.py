"""What rank 0 does when the training has ended: model artifact, record, and the end of the MLflow run."""

import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from kfp_gate.data.manifest import Manifest
from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.model_folder import ModelCard, sha256_of, write_model_folder
from kfp_gate.storage import open_store
from kfp_gate.training import profiling
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.course import TrainingCourse
from kfp_gate.training.leaving import Held
from kfp_gate.training.record import versions
from kfp_gate.training.redaction import redact
from kfp_gate.training.stored_steps import RECORD
from kfp_gate.training.tracking import Tracker

log = logging.getLogger(__name__)


def finish(
    course: TrainingCourse, manifests: Mapping[str, Manifest], held: Held, *, out: Path, boxes: BoxReference,
    checkpoint_uri: str,
) -> None:  # fmt: skip
    """Write the model artifact and the record, and close the MLflow run.

    Args:
        course: the training, which has ended.
        manifests: `train` and `val`, whole.
        held: rank 0's tracker and checkpoints.
        out: for `model/` and `training/`.
        boxes: shapes of the training boxes, for the card.
        checkpoint_uri: where what MLflow did not take is kept.

    Raises:
        InvalidInput: the primary monitor never had a value.
    """
    tracker, checkpoints = held.tracker, held.checkpoints
    assert tracker is not None and checkpoints is not None
    record, spec = course.record, course.spec
    primary = spec.monitors[0]
    course.best.save()
    chosen = course.best.path(primary)
    if not chosen.is_file():
        raise InvalidInput(
            f"{primary} had no value in any epoch", expected="at least one epoch with a value", where="monitors",
            next_step="choose a monitor that this val set gives a value for, such as map50_95",
        )  # fmt: skip
    checkpoints.finish()
    record.checkpoints = checkpoints.account()
    tracker.tag(**{
        "kfp_gate.monitors": str([(m["monitor"], m["best"], m["best_epoch"]) for m in record.monitors]),
        "kfp_gate.not_computed": str(record.not_computed),
    })  # fmt: skip
    training = out / "training"
    training.mkdir(parents=True, exist_ok=True)
    record.write(training / RECORD)
    tracker.artifact(training / RECORD)
    # The card names the run.
    tracker.flush(10.0)
    others = {
        m: f"{checkpoints.uri}/{s.key}" for m in spec.monitors[1:]
        if (s := checkpoints.known.get(f"best/{course.best.path(m).name}")) is not None
        # What did not arrive left an older one there.
        and (best := course.best.path(m)).is_file() and sha256_of(best) == s.sha256
    }  # fmt: skip
    card = ModelCard(
        sha256="", classes=record.classes, image_size=spec.image_size, settings=spec.settings(),
        monitors=spec.monitors, chosen_by=primary, manifests=record.manifests, versions=versions(),
        image=os.environ.get("KFP_GATE_IMAGE", ""), run_id=tracker.run_id, other_weights=others,
        image_lock=os.environ.get("KFP_GATE_IMAGE_LOCK", ""), boxes=boxes.to_json(),
    )  # fmt: skip
    card = write_model_folder(out / "model", chosen, card, (m.table for m in manifests.values()))
    log.info("model %s: best %s of epoch %s", card.sha256[:12], primary, record.weights[primary]["epoch"])
    _keep_looks(course, training)
    # Only now: a run that says it finished has its model.
    delivery = tracker.close(status="FINISHED")
    _keep_undelivered(tracker, checkpoints, checkpoint_uri)
    record.tracking = {"uri": redact(tracker.uri), "run_id": tracker.run_id, "summary": delivery.text()}
    record.write(training / RECORD)


def _keep_looks(course: TrainingCourse, training: Path) -> None:
    """Timeline and profile beside the record, since this rank's own folder ends with the pod. After the model: a full
    disk costs them, and no training."""
    profile = course.folder / profiling.FOLDER
    try:
        shutil.copyfile(course.timeline.path, training / "timeline.jsonl")
        if profile.is_dir():
            shutil.copytree(profile, training / profiling.FOLDER, dirs_exist_ok=True)
    except OSError as error:
        log.warning("timeline or profile could not be kept in %s: %s", training, error)


def _keep_undelivered(tracker: Tracker, checkpoints: Checkpoints, checkpoint_uri: str) -> None:
    """Put what the tracking server did not take where it outlives this pod."""
    waiting = tracker.deliver_later()
    if not waiting:
        return
    try:
        key = f"tracking/spool-{checkpoints.token}.jsonl"
        open_store(checkpoint_uri).write(key, "\n".join(waiting).encode())
        log.warning("what tracking did not take is kept: kfp-gate deliver %s/%s", checkpoint_uri, key)
    except KfpGateError as error:
        log.warning("what tracking did not take could not be stored: %s", error.found)
