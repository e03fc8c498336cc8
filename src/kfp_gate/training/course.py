"""The course of a training around its steps: validation, monitors, checkpoints, records, and when to end.

One object per rank, driven by the few joints of `kfp_gate.training.trainer`. What rank 0 decides is told to all.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gate.observing.memory import ControlGroup, Memory, memory_line, read_memory
from kfp_gate.observing.phases import CHECKPOINT, OTHER, VALIDATION, Phases, phase_line
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training import recovery, weights
from kfp_gate.training import state as states
from kfp_gate.training.best import BestWeights
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.close_look import CloseLook, Reproduce
from kfp_gate.training.conditions import conditions
from kfp_gate.training.device_clock import cuda_memory
from kfp_gate.training.group import Group
from kfp_gate.training.memory_watch import MemoryWatch
from kfp_gate.training.monitors import Monitors, Observation
from kfp_gate.training.progress import PROGRESS, Eta, say
from kfp_gate.training.record import Record
from kfp_gate.training.sanity import SanityPass, check_images
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.stored_steps import RECORD, STATE
from kfp_gate.training.timelines import Timelines
from kfp_gate.training.tracking import Tracker
from kfp_gate.training.validation import Validation, Values

if TYPE_CHECKING:
    from kfp_gate.training.trainer import RankTrainer

log = logging.getLogger(__name__)

MANY_VALUES = 500
"""Values an epoch beyond which the timeline keeps only the overall ones, the monitors, and the classes' map50_95."""


class TrainingCourse:
    """See the module."""

    def __init__(
        self, spec: TrainingSpec, *, group: Group, validation: Validation, folder: Path, timeline: Timeline,
        phases: Phases, record: Record, tracker: Tracker | None, checkpoints: Checkpoints | None,
        train_images: Sequence[Path], control_group: ControlGroup | None, resume: dict[str, Any] | None,
        whole: Mapping[str, int] | None = None, reproduce: Reproduce | None = None,
    ) -> None:  # fmt: skip
        """`tracker` and `checkpoints` are rank 0's; `resume` is a state, the same on all ranks; `whole` is the number
        of train and val images of the manifests, of which a probe sees a part."""
        self.spec, self.group, self.validation, self.folder = spec, group, validation, folder
        self.timeline, self.phases, self.record = timeline, phases, record
        self.tracker, self.checkpoints, self.train_images = tracker, checkpoints, tuple(train_images)
        self.control_group, self.resume = control_group, resume
        self.monitors = Monitors(spec)
        self.best = BestWeights(folder / "best", record)
        self.last_state = folder / STATE
        self.look = CloseLook(spec, group=group, folder=folder, timeline=timeline, phases=phases, reproduce=reproduce)
        self.probe = self.look.probe
        self.epochs = 1 if self.probe is not None else spec.epochs
        self.whole = dict(whole or {"train": len(train_images), "val": len(validation.rows)})
        self.memory_watch = MemoryWatch(timeline, epochs=self.epochs, read=self.memory)
        self.eta = Eta(self.epochs, 1)
        self.corrupt = False
        self._values: Values = {}
        self._batch = spec.batch
        self._restored: dict[str, Any] | None = None
        self._epoch_started = time.monotonic()
        self.stop_reason = ""
        self.sample_every_s: float | None = None
        self.timelines: Timelines | None = None
        if resume is not None and (unknown := ", ".join(self.monitors.restore(resume["extra"]["monitors"]))):
            log.info("monitors %s are new in this run and start at epoch %d", unknown, resume["epoch"] + 1)

    # Joints of the trainer --------------------------------------------------------------------------------------

    @property
    def whole_share(self) -> float:
        """Images of the training for each one that its trainer sees."""
        return self.whole["train"] / max(1, len(self.train_images))

    @property
    def flag(self) -> Any:
        """Raised while the making of batches is profiled; None if it never is."""
        return self.look.flag

    @property
    def steady(self) -> bool:
        """A probe compares early steps with later ones: the optimizer steps as often in both."""
        return self.probe is not None

    def train_loader(self, loader: Any, *, accumulate: int) -> Any:
        """What the trainer goes through instead of its loader. All ranks call it."""
        return self.look.loader(loader, accumulate=accumulate)

    def begin(self, trainer: "RankTrainer") -> None:
        """Set up: restore, then the sanity pass."""
        check_images(trainer, self.train_images)
        self._tell_conditions(trainer)
        if self.resume is not None:
            notes = states.restore(trainer, self.resume)
            trainer.start_epoch = self.resume["epoch"]
            trainer.scheduler.last_epoch = trainer.start_epoch - 1
            self._restored, self.resume = self.resume, None
            self.record.resumed["notes"] = list(notes)
            self.timeline.write("resume", epoch=trainer.start_epoch, notes=list(notes))
            for note in notes:
                log.warning("resume: %s", note)
        if self.spec.sanity_batches:
            before = self.phases.current
            self.phases.enter(VALIDATION)
            self.timeline.phase = "sanity"
            self.record.sanity = SanityPass(self).run(trainer)
            self.timeline.write("sanity", **self.record.sanity)
            self.timeline.phase = ""
            self.phases.enter(before)
        self.eta = Eta(self.epochs, trainer.start_epoch + 1)
        self.phases.take()

    def epoch_begins(self, trainer: "RankTrainer", epoch: int) -> None:
        if trainer.batch_size != self._batch:
            # Upstream does this once a single GPU runs out of memory in the first epoch, and starts it again.
            log.warning("out of memory with batch %d: training goes on with %d", self._batch, trainer.batch_size)
            self._tell_conditions(trainer)
        self.timeline.phase = "train"
        self._epoch_started = time.monotonic()
        self._values = {}
        if self._restored is not None:
            # As late as possible: everything before may have drawn numbers.
            states.restore_gradients(trainer, self._restored)
            if not trainer.train_loader.num_workers:
                states.restore_random(trainer, self._restored)
            self._restored = None
        self.look.epoch_begins(trainer, epoch)

    def step_ends(self, trainer: "RankTrainer") -> None:
        """Once a batch."""
        self.look.step_ends(trainer)

    def steps_end(self, trainer: "RankTrainer") -> None:
        """Once an epoch, after its last batch."""
        self.look.steps_end(trainer)

    def validate(self, trainer: "RankTrainer") -> tuple[dict[str, float], float]:
        """All ranks; upstream gets a fitness of 0 and its real one in `epoch_ends`."""
        started = time.perf_counter()
        self.corrupt = recovery.is_corrupt(trainer, self.group)
        if self.corrupt:
            if self.probe is not None:
                # It is about time, and its weights are for nothing.
                log.warning("probe: the loss or the weights are not finite; nothing is validated")
                self.corrupt, self._values = False, dict.fromkeys(self.monitors.watched)
            return {}, 0.0
        self.timeline.phase = "validate"
        with self.phases.during(VALIDATION):
            self.validation.parts.take()
            with self.validation.parts.during("weights"):
                states.check_equal_weights(trainer.ema.ema, self.group)
            self._values = self.validation.run(trainer.ema.ema)
        self.phases.enter(OTHER)
        seconds = round(time.perf_counter() - started, 4)
        self.timeline.write("validation", epoch=trainer.epoch + 1, seconds=seconds, **self.validation.account())
        return {}, 0.0

    def recover(self, trainer: "RankTrainer", reason: str) -> bool:
        """Go back to the last complete epoch; False if there is none. All ranks call it."""
        return recovery.go_back(self, trainer, reason)

    def epoch_ends(self, trainer: "RankTrainer") -> None:
        """Observe, write, tell. `trainer.stop` is broadcast by upstream right after this."""
        epoch = trainer.epoch + 1
        observation = self.monitors.observe(epoch, self._values)
        trainer.fitness = observation.fitness
        trainer.best_fitness = max(observation.fitness, trainer.best_fitness or -math.inf)
        finished = trainer.stop or observation.stop or epoch >= self.epochs
        if self.probe is not None:
            self.stop_reason = f"this was a probe of {self.probe.steps} steps"
        elif observation.stop:
            self.stop_reason = observation.reason
        trainer.stop = finished
        self.timeline.phase = "checkpoint"
        with self.phases.during(CHECKPOINT):
            self._remember(trainer, epoch, observation)
            self._checkpoint(trainer, epoch, observation, finished=finished)
        self._tell(trainer, epoch)

    def _tell_conditions(self, trainer: "RankTrainer") -> None:
        self._batch = trainer.batch_size
        self.timeline.write("conditions", **conditions(trainer, self, sample_every_s=self.sample_every_s))

    # Parts ------------------------------------------------------------------------------------------------------

    def _remember(self, trainer: "RankTrainer", epoch: int, observation: Observation) -> None:
        if self.group.rank != 0:
            return
        losses = {k: float(v) for k, v in (trainer.tloss or {}).items()}
        overall = {k: v for k, v in self._values.items() if "/" not in k or k in self.monitors.watched}
        row = {
            "epoch": epoch, "values": overall, "losses": losses, "lr": dict(trainer.lr),
            "seconds": round(time.monotonic() - self._epoch_started, 3), "improved": list(observation.improved),
        }  # fmt: skip
        self.record.epochs = [r for r in self.record.epochs if r["epoch"] < epoch] + [row]
        self.record.monitors = self.monitors.record()
        self.record.not_computed = dict(self.validation.reasons)
        self.record.stopped = self.stop_reason
        if self.tracker is not None:
            self.tracker.log(self._values, step=epoch)
            self.tracker.log({f"train/{k}": v for k, v in losses.items()}, step=epoch)
            self.tracker.log(trainer.lr, step=epoch)

    def _checkpoint(self, trainer: "RankTrainer", epoch: int, observation: Observation, *, finished: bool) -> None:
        extra = {
            "monitors": self.monitors.state(), "settings": self.spec.settings(), "manifests": self.record.manifests,
            "classes": list(self.record.classes), "finished": finished,
            "run_id": self.tracker.run_id if self.tracker else "",
        }  # fmt: skip
        started, before = time.perf_counter(), self.checkpoints.waited_s if self.checkpoints is not None else 0.0
        # Plain JSON inside: the reader unpickles nothing but tensors and such values.
        captured = states.capture(trainer, epoch, extra=json.loads(json.dumps(extra)))
        error: BaseException | None = None
        said: dict[str, Any] = {}
        if captured is not None:
            try:
                said["ok"] = self._write(trainer, epoch, observation, captured, finished=finished)
            except OSError as caught:
                # A full disk costs this checkpoint; the weights in memory are whole.
                log.warning("the checkpoint of epoch %d could not be written: %s", epoch, caught)
                said |= {"ok": False, "error": str(caught)}
            except Exception as caught:
                error = caught
        if said:
            waited = self.checkpoints.waited_s - before if self.checkpoints is not None else 0.0
            seconds = round(time.perf_counter() - started, 4)
            self.timeline.write("checkpoint", epoch=epoch, seconds=seconds, waited_s=round(waited, 4), **said)
        self.group.agree("checkpoint", error)

    def _write(
        self, trainer: "RankTrainer", epoch: int, observation: Observation, captured: dict[str, Any], *, finished: bool
    ) -> bool:
        # A few batches may give no value at all, and a probe is to write what a training writes.
        primary = self.spec.monitors[:1] if self.probe is not None else ()
        improved = tuple(dict.fromkeys((*observation.improved, *primary)))
        if improved:
            self.best.add(improved, epoch, self._values, weights.weights_bytes(trainer, epoch=epoch))
        self.best.save()
        part = self.last_state.with_suffix(".part")
        states.write_state(captured, part)
        part.replace(self.last_state)
        if self.checkpoints is None:
            return True
        step = self.checkpoints.begin_step(epoch)
        shutil.copyfile(self.last_state, step / STATE)
        self.best.put(step)
        self.record.checkpoints = self.checkpoints.account()
        self.record.write(step / RECORD)
        if self.timelines is not None:
            (step / "timeline.jsonl.gz").write_bytes(self.timelines.content())
        queued = self.checkpoints.commit(epoch, step, finished=finished)
        self.best.queued()
        return queued

    def _shown_values(self) -> Values:
        """An epoch's values for the timeline: all, unless hundreds of classes would make it long."""
        if len(self._values) <= MANY_VALUES:
            return self._values
        kept = set(self.monitors.watched)
        return {n: v for n, v in self._values.items() if "/" not in n or n in kept or n.endswith("/map50_95")}

    def memory(self, *, children: bool = False, pss: bool = False) -> Memory:
        """This process now."""
        return read_memory(group=self.control_group, cuda=cuda_memory(), children=children, pss=pss)

    def _tell(self, trainer: "RankTrainer", epoch: int) -> None:
        times, memory = self.phases.take(), self.memory_watch.read()
        self.timeline.phase = ""
        self.timeline.write("phases", epoch=epoch, seconds=times.seconds, steps=times.steps, device=times.device)
        self.timeline.write("memory", epoch=epoch, **memory.values(), **self.memory_watch.take())
        self.memory_watch.epoch_ends(epoch, memory)
        if self.group.rank == 0:
            losses = self.record.epochs[-1]["losses"]
            self.timeline.write("epoch", epoch=epoch, values=self._shown_values(), losses=losses)
        log.info("%s", memory_line(epoch, self.epochs, memory))
        log.info("%s", phase_line(epoch, self.epochs, times))
        if self.timelines is not None:
            self.timelines.epoch_ends(self.record if self.group.rank == 0 else None)
        if self.group.rank == 0:
            shown = {n: self._values.get(n) for n in self.spec.monitors}
            say(
                PROGRESS, epoch=epoch, epochs=self.epochs, eta_s=round(self.eta.after(epoch), 1), monitors=shown,
                best={w["monitor"]: w["best_epoch"] for w in self.record.monitors}, stopped=self.stop_reason,
            )  # fmt: skip
