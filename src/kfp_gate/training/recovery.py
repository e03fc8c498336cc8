"""When numbers are not finite: on which rank whatever it is, all of them go back to the last complete epoch."""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfp_gate.training import state as states
from kfp_gate.training.group import Group

if TYPE_CHECKING:
    from kfp_gate.training.course import TrainingCourse
    from kfp_gate.training.trainer import RankTrainer

log = logging.getLogger(__name__)


def is_corrupt(trainer: "RankTrainer", group: Group) -> bool:
    """Whether any rank's loss or weights are not finite. All ranks call it."""
    from ultralytics.utils.torch_utils import unwrap_model

    bad = trainer.loss is not None and not bool(torch.isfinite(trainer.loss).all())
    bad = bad or not all(bool(torch.isfinite(p).all()) for p in unwrap_model(trainer.model).parameters())
    return group.largest(float(bad)) > 0


def go_back(course: "TrainingCourse", trainer: "RankTrainer", reason: str) -> bool:
    """Take up the last complete epoch, on all ranks, all of which call it; False if there is none.

    Args:
        course: of this rank.
        trainer: gets the state; its random numbers go on, since the same ones would lead to the same end.
        reason: for the log and the timeline.
    """
    state = _last_complete(course.last_state, course.folder, course.group)
    if state is None:
        return False
    log.warning("%s; going back to the epoch before", reason)
    course.timeline.write("recover", reason=reason)
    states.restore(trainer, state, randomness=False)
    course.monitors.restore(state["extra"]["monitors"])
    trainer.scheduler.last_epoch = state["epoch"] - 1
    return True


def _last_complete(file: Path, folder: Path, group: Group) -> dict[str, Any] | None:
    """The state as rank 0 alone has it in `file`; `folder` is this rank's, for a copy."""
    if not group.broadcast(file.is_file()):
        return None
    payload = group.broadcast_bytes(file.read_bytes() if group.rank == 0 else b"")
    own = folder / "recover.pt"
    own.write_bytes(payload)
    state: dict[str, Any] = states.read_state(own)
    own.unlink()
    return state
