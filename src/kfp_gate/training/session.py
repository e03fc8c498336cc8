"""A rank's life from start to exit code: data, process group, training, model artifact, evidence."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kfp_gate.data.manifest import Manifest, read_manifest
from kfp_gate.data.materialize import LocalDataset, materialize
from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.predict import PredictSettings
from kfp_gate.metric_names import parse
from kfp_gate.observing.memory import find_control_group
from kfp_gate.observing.phases import Phases
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training import base_model, resuming, upstream
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.close_look import Reproduce
from kfp_gate.training.course import TrainingCourse
from kfp_gate.training.device_clock import cuda_memory
from kfp_gate.training.evidence import (
    Terminated,
)
from kfp_gate.training.finishing import finish
from kfp_gate.training.group import Group, choose_device
from kfp_gate.training.heartbeat import Heartbeat
from kfp_gate.training.leaving import RUN_ID, Held, Leaving
from kfp_gate.training.probe import ProbePlan, part_of_the_data
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.record import Record, versions
from kfp_gate.training.reproduction import write_reproduction
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.timelines import Timelines, share
from kfp_gate.training.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Tracker, address_of
from kfp_gate.training.validation import Validation
from kfp_gate.training.watch import Watch
from kfp_gate.training.window_plan import WindowPlan

log = logging.getLogger(__name__)

PROBE_FOLDER = "probe"


class Session:
    """See the module. `run` never raises."""

    def __init__(self, spec: TrainingSpec, ranks: Ranks, *, out: Path, private: Path, node: str) -> None:
        self.spec, self.ranks, self.out, self.private = spec, ranks, out, private
        self.run_id = spec.run_id or os.environ.get("KFP_GATE_RUN_ID", "")
        self.timeline = Timeline(private / "timeline.jsonl", run=self.run_id, rank=ranks.rank, node=node, gpu=None)
        self.held = Held()
        self.leaving = Leaving(
            spec, ranks, self.held, timeline=self.timeline, private=private, checkpoint_uri=self.checkpoint_uri
        )
        self.group: Group | None = None
        self.sampler: Sampler | None = None
        self._signalled = False

    @property
    def checkpoint_uri(self) -> str:
        return self.spec.checkpoint_uri or str(self.out / "checkpoints")

    @property
    def _steps_uri(self) -> str:
        """Where checkpoints go. A probe's are never to be found by a training, which would go on from them."""
        return f"{self.checkpoint_uri}/{PROBE_FOLDER}" if self.spec.probe_steps else self.checkpoint_uri

    def run(self) -> int:
        """Train; returns the exit code."""
        error: BaseException
        self.timeline.write("start", pid=os.getpid(), versions=versions(), ranks=vars(self.ranks))
        try:
            self._train()
        except BaseException as caught:
            error = self.held.watch.cause(caught) if self.held.watch is not None else caught
            if self._signalled and isinstance(error, Exception) and not isinstance(error, KfpGateError):
                # What was raised for the signal got lost on the way, and what died of it too is met first.
                error = Terminated(f"SIGTERM: the pod is being ended ({type(caught).__name__})")
            if error is not caught:
                error.__cause__ = caught
            return self.leaving.fail(error)
        self.timeline.write("end", exit_code=0)
        return 0

    @property
    def failing(self) -> bool:
        """Whether this rank is leaving its evidence."""
        return self.leaving.failing

    def hear_signal(self) -> None:
        """Called when SIGTERM arrives."""
        self._signalled = True

    def heartbeat_stale(self, reason: str) -> None:
        """Called from a thread when the launcher has not been heard of for too long."""
        self.leaving.fail_from_thread(Terminated(f"nobody follows this training any more: {reason}"))

    def end_by_signal(self) -> None:
        """Called from a timer when the main thread did not end after SIGTERM."""
        self.leaving.fail_from_thread(Terminated("SIGTERM: the main thread did not end in time"))

    # Course -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        spec = self.spec
        upstream.settle()
        # On every rank, before anything costs time: a refusal of rank 0 alone would come after the data.
        address_of(spec.tracking_uri)
        device = choose_device(self.ranks, spec.device)
        self.group = group = Group(self.ranks, device, timeout_s=spec.collective_timeout_s)
        self.held.watch = Watch(group, timeout_s=spec.peer_timeout_s, on_failure=self.leaving.fail_from_thread)
        log.info("rank %d of %d on %s, node %d", group.rank, group.size, device, self.ranks.node_rank)
        if spec.batch < group.size:
            raise InvalidInput(
                f"batch {spec.batch} for {group.size} ranks", expected="at least one image per rank and step",
                where="batch", next_step="raise batch or use fewer ranks",
            )  # fmt: skip
        manifests = {"train": read_manifest(spec.train_manifest), "val": read_manifest(spec.val_manifest)}
        classes = _classes(manifests)
        spec.check(classes=classes)
        gpu = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
        self.timeline.identity["gpu"] = gpu
        self.sampler = Sampler(self.timeline, gpu=gpu, cuda=cuda_memory)
        self.sampler.start()
        self.timeline.phase = "data"
        used = self._part_of_the_data(manifests) if spec.probe_steps else manifests
        data = materialize(used, self.private / "data", source_uri=spec.source_uri or None)
        self.timeline.phase = ""
        self.held.watch.meet("data")
        boxes = BoxReference.of(manifests["train"].rows(), len(classes))
        validation = Validation(
            used["val"], data.images["val"], group=group, settings=self._predict_settings(device),
            confidence=spec.confidence, bands=any(parse(m).size is not None for m in spec.monitors),
            reference=boxes,
        )  # fmt: skip
        validation.check_monitors(spec.monitors)
        record = Record(
            settings=spec.settings(), manifests={k: m.digest for k, m in manifests.items()}, classes=classes,
            ranks=group.size, device=str(device),
        )  # fmt: skip
        resumed = None if spec.probe_steps else resuming.find(
            spec, self.checkpoint_uri, run=self.run_id, group=group, folder=self.private, record=record
        )  # fmt: skip
        if group.rank == 0:
            self._open_first(record, resumed)
        self._send_timeline(group)
        control_group = find_control_group()
        course = TrainingCourse(
            spec, group=group, validation=validation, folder=self.private, timeline=self.timeline,
            phases=_phases(device), record=record, tracker=self.held.tracker, checkpoints=self.held.checkpoints,
            train_images=data.images["train"], control_group=control_group,
            resume=resumed.state if resumed is not None else None,
            whole={k: len(m) for k, m in manifests.items()}, reproduce=self._reproducer(manifests),
        )  # fmt: skip
        if resumed is not None and resumed.has_ended(spec.epochs):
            log.info("the training ended at epoch %d already: only the model artifact is written", resumed.epoch)
            self.timeline.write("stop", reason=f"the training ended at epoch {resumed.epoch} already")
        else:
            course.sample_every_s, course.timelines = self.sampler.every_s, self.held.timelines
            self._fit(course, data)
        group.agree("training")
        assert self.held.timelines is not None
        share(self.held.timelines, group, self.out / "training")
        if group.rank == 0:
            finish(course, manifests, self.held, out=self.out, boxes=boxes, checkpoint_uri=self.checkpoint_uri)
        self.held.watch.meet("model artifact")
        if self.sampler is not None:
            self.sampler.stop()
        self.held.watch.leave()
        group.close()

    def _fit(self, course: TrainingCourse, data: LocalDataset) -> None:
        from kfp_gate.training.trainer import RankTrainer

        spec, group = self.spec, course.group
        model = base_model.resolve(spec.base_model, self.private / "base")
        gpu = group.device.type == "cuda"
        arguments: dict[str, Any] = {
            "plots": False, "deterministic": True, **spec.overrides, "task": "detect", "mode": "train",
            "model": str(model), "data": str(data.data_yaml), "epochs": spec.epochs, "imgsz": spec.image_size,
            "batch": spec.batch, "seed": spec.seed, "patience": 0, "workers": spec.loader_processes(gpu=gpu),
            "device": str(group.device.index) if gpu else "cpu", "project": str(self.private), "name": "upstream",
            "exist_ok": True, "val": True, "save": False,
        }  # fmt: skip
        if "amp" not in spec.overrides:
            arguments["amp"] = {"auto": gpu, "fp32": False, "bf16": "bf16"}[spec.precision]
        RankTrainer(arguments, course).train()
        self.timeline.write("stop", reason=course.stop_reason or "all epochs done")

    def _send_timeline(self, group: Group) -> None:
        """From here on this rank's timeline leaves the pod, under the token of rank 0's checkpoints."""
        token = str(group.broadcast(self.held.checkpoints.token if self.held.checkpoints is not None else ""))
        self.held.timelines = Timelines(
            self.timeline, self.checkpoint_uri, token, rank=group.rank, folder=self.private / "tracked",
            tracker=self.held.tracker,
        )  # fmt: skip
        self.held.timelines.start()

    def _part_of_the_data(self, manifests: dict[str, Manifest]) -> dict[str, Manifest]:
        """What a probe looks at; the same on all ranks, whatever each of them runs on."""
        assert self.group is not None
        spec, gpu = self.spec, self.group.device.type == "cuda"
        # Upstream's loader holds four batches a process; it may start fewer processes than it is asked for.
        stock = 4 * spec.loader_processes(gpu=gpu)
        window = WindowPlan.full(spec.profile_steps, stock).after_warm_up if spec.profile_steps else 0
        return part_of_the_data(
            manifests, batch=spec.batch, validation_batch=self._validation_batch, ranks=self.ranks.world_size,
            steps=ProbePlan.of(spec.probe_steps, stock=stock, window=window).total + stock, monitors=spec.monitors,
        )  # fmt: skip

    def _reproducer(self, manifests: dict[str, Manifest]) -> Reproduce | None:
        """Rank 0's: writes a run that shows the profile window once more."""
        spec, ranks = self.spec, self.ranks
        if not spec.profile_steps or ranks.rank:
            return None

        def write(folder: Path, optimizer: Mapping[str, Any]) -> str:
            assert self.group is not None
            return write_reproduction(
                folder, spec, self._part_of_the_data(manifests), ranks=ranks.world_size,
                local_ranks=ranks.local_world_size, cuda=self.group.device.type == "cuda", optimizer=optimizer,
            )  # fmt: skip

        return write

    def _predict_settings(self, device: torch.device) -> PredictSettings:
        return PredictSettings(image_size=self.spec.image_size, batch=self._validation_batch, device=str(device))

    @property
    def _validation_batch(self) -> int:
        return self.spec.validation_batch or max(1, 2 * self.spec.batch // self.ranks.world_size)

    # Rank 0 -----------------------------------------------------------------------------------------------------

    def _open_first(self, record: Record, resumed: resuming.Resumed | None) -> None:
        spec, earlier = self.spec, ""
        self.held.checkpoints = Checkpoints(
            self._steps_uri,
            self.private / "uploads",
            bound_s=spec.upload_bound_s,
            run=self.run_id,
            timeline=self.timeline,
        )
        if resumed is not None and resumed.step is not None:
            # The same training on a new pod: the same store and the same MLflow run go on.
            self.held.checkpoints.adopt(resumed.step)
            earlier = str(resumed.state["extra"]["run_id"])
        elif resumed is not None:
            self.held.checkpoints.bring(resumed.best)
        tags = {PIPELINE_RUN_TAG: self.run_id, ROLE_TAG: "training", "kfp_gate.ranks": str(self.ranks.world_size)}
        if record.resumed:
            tags["kfp_gate.resumed_from"] = str(record.resumed.get("uri", ""))
        self.held.tracker = Tracker(
            uri=spec.tracking_uri, experiment=spec.experiment, spool=self.private / "tracking-spool.jsonl",
            run_id=spec.mlflow_run_id or earlier, name="training", params=_flat(spec.settings()),
            tags={k: v for k, v in tags.items() if v},
            on_open=lambda run_id: self.held.watch.share(RUN_ID, run_id) if self.held.watch is not None else None,
        )  # fmt: skip
        if spec.heartbeat_bound_s:
            Heartbeat(self.checkpoint_uri, bound_s=spec.heartbeat_bound_s).watch(self.heartbeat_stale)


def _phases(device: torch.device) -> Phases:
    if device.type != "cuda":
        return Phases()
    from kfp_gate.training.device_clock import CudaClock

    return Phases(CudaClock())


def _classes(manifests: dict[str, Manifest]) -> tuple[str, ...]:
    train, val = manifests["train"], manifests["val"]
    problem = ""
    if train.classes != val.classes:
        problem = f"train has {list(train.classes)[:10]}, val has {list(val.classes)[:10]}"
    elif not train.classes:
        problem = "no class at all"
    elif not len(train) or not len(val):
        problem = f"{len(train)} train images and {len(val)} val images"
    if problem:
        raise InvalidInput(
            problem, expected="train and val manifests with images and with the same classes", where="manifests",
            next_step="take both from the same run of split_dataset",
        )  # fmt: skip
    return train.classes


def _flat(settings: dict[str, Any]) -> dict[str, Any]:
    flat = {k: v for k, v in settings.items() if k != "overrides"}
    return flat | {f"overrides.{k}": v for k, v in settings["overrides"].items()}
