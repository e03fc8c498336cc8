"""What a training continues from: its own last checkpoint on a new pod, or another run's, named by `resume_from`."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_gate.errors import Broken, InvalidInput, KfpGateError
from kfp_gate.training import state as states
from kfp_gate.training.best import slot
from kfp_gate.training.group import Group
from kfp_gate.training.record import Record
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.stored_steps import RECORD, STATE, Step, fetch, find_latest, find_steps

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """A state to continue from, the same on all ranks.

    Attributes:
        state: as `kfp_gate.training.state` captured it.
        own: it is this training's own, from an earlier process; else another run's.
        step: rank 0 alone, and only if it is its own: the step in the store that goes on being used.
        best: rank 0 alone: best weights so far, local files.
    """

    state: dict[str, Any]
    own: bool
    step: Step | None = None
    best: Sequence[Path] = ()

    @property
    def epoch(self) -> int:
        return int(self.state["epoch"])

    def has_ended(self, epochs: int) -> bool:
        """Whether nothing is left to train. Another run that stopped early may go on; one's own has ended."""
        return self.epoch >= epochs or (self.own and bool(self.state["extra"]["finished"]))


def find(spec: TrainingSpec, uri: str, *, run: str = "", group: Group, folder: Path, record: Record) -> Resumed | None:
    """Look for a checkpoint, on rank 0 alone, and bring its state to all ranks; every rank calls it.

    Args:
        spec: of this run.
        uri: where this run's own checkpoints lie.
        run: the pipeline run: checkpoints of another one at `uri` are not its own. Empty: all are.
        folder: of this rank; rank 0's gets the files of the checkpoint.
        record: gets what differs from the run that is continued, and its epochs.

    Raises:
        InvalidInput: nothing at `resume_from`, or a checkpoint that this run cannot continue.
        Unavailable: the store does not answer. Broken: no checkpoint there is readable.
    """
    files, step, own, error = dict[str, Path](), None, False, None
    if group.rank == 0:
        try:
            files, step, own = _read(spec, uri, run, folder, record)
        except KfpGateError as caught:
            error = caught
    group.agree("looking for a checkpoint", error)
    payload = group.broadcast_bytes(files[STATE].read_bytes() if files else b"")
    own = bool(group.broadcast(own))
    if not payload:
        return None
    path = folder / "resume.pt"
    path.write_bytes(payload)
    state = states.read_state(path)
    path.unlink()
    record.resumed = {**record.resumed, "epoch": state["epoch"]}
    best = [path for name, path in files.items() if name.startswith("best/")]
    return Resumed(state, own, step if own else None, best)


def _read(
    spec: TrainingSpec, uri: str, run: str, folder: Path, record: Record
) -> tuple[dict[str, Path], Step | None, bool]:
    found = _newest_readable(spec, uri, folder, run)
    own = found is not None
    if not own and not spec.resume_from and (other := find_latest(uri)) is not None:
        log.info(
            "%s holds checkpoints of another run (%s), which are left alone; to continue them, name it as resume_from",
            uri, other.run,
        )  # fmt: skip
    if found is None and spec.resume_from:
        uri = spec.resume_from
        found = _newest_readable(spec, uri, folder)
        if found is None:
            raise InvalidInput(
                "no complete checkpoint", expected="a checkpoint that a training wrote", where=uri,
                next_step="give the checkpoint URI of the earlier run, or leave resume_from empty",
            )  # fmt: skip
    if found is None:
        return {}, None, False
    step, files = found
    _compare(spec, record, states.read_state(files[STATE]), uri, own=own)
    record.adopt(json.loads(files[RECORD].read_text(encoding="utf-8")), spec.monitors)
    record.resumed = {"uri": uri, "step": step.key, **record.resumed}
    log.info("resuming from %s/%s, epoch %d", uri, step.key, step.epoch)
    return files, step, own


def _newest_readable(spec: TrainingSpec, uri: str, folder: Path, run: str = "") -> tuple[Step, dict[str, Path]] | None:
    """The newest step whose files are what its manifest says; a damaged one falls back to the one before."""
    damaged: Broken | None = None
    for step in find_steps(uri, run=run):
        best = [n for n in (f"best/{slot(m)}.pt" for m in spec.monitors) if n in step.files]
        try:
            return step, fetch(uri, step, [STATE, RECORD, *best], folder)
        except Broken as error:
            log.warning("checkpoint %s/%s is damaged and passed over: %s", uri, step.key, error.found)
            damaged = damaged or error
    if damaged is not None:
        raise damaged
    return None


def _compare(spec: TrainingSpec, record: Record, state: dict[str, Any], uri: str, *, own: bool) -> None:
    """Say what differs from the run that is continued; refuse what cannot be continued."""
    extra = state["extra"]
    if extra["settings"].get("probe_steps"):
        raise InvalidInput(
            f"a checkpoint of a probe (probe_steps {extra['settings']['probe_steps']}), which only measured its speed",
            expected="a checkpoint of a training", where=uri,
            next_step="give the checkpoint URI of a training, or leave resume_from empty",
        )  # fmt: skip
    if tuple(extra["classes"]) != record.classes:
        raise InvalidInput(
            f"a checkpoint with the classes {extra['classes'][:10]}", expected=f"{list(record.classes)[:10]}",
            where=uri, next_step="resume with the data set of the first run, or start without resume_from",
        )  # fmt: skip
    differences = {k: {"earlier": a, "now": b} for k, (a, b) in spec.differences(extra["settings"]).items()}
    for name, digest in record.manifests.items():
        if extra["manifests"].get(name) != digest:
            differences[f"{name} manifest"] = {"earlier": extra["manifests"].get(name), "now": digest}
    if own and any(k.endswith(" manifest") for k in differences):
        raise InvalidInput(
            "checkpoints of a training on other data", expected="the checkpoints of this training",
            where=uri, next_step="give this training a checkpoint URI of its own, or name that one as resume_from",
        )  # fmt: skip
    record.resumed["differences"] = differences
    for name, values in differences.items():
        log.info("resume: %s was %r and is now %r", name, values["earlier"], values["now"])
