"""A rank's life from start to exit code: data, process group, training, model artifact, evidence."""

import gzip
import logging
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from kfp_gate.data.manifest import Manifest, read_manifest
from kfp_gate.data.materialize import LocalDataset, materialize
from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.model_folder import ModelCard, sha256_of, write_model_folder
from kfp_gate.evaluation.predict import PredictSettings
from kfp_gate.metric_names import parse
from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.phases import Phases
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import open_store
from kfp_gate.training import base_model, profiling, resuming, upstream
from kfp_gate.training.checkpoints import RECORD, Checkpoints
from kfp_gate.training.close_look import Reproduce
from kfp_gate.training.course import TrainingCourse
from kfp_gate.training.device_clock import cuda_memory
from kfp_gate.training.evidence import (
    EXIT_BROKEN,
    LastLines,
    Terminated,
    describe,
    exit_code,
    kind_of,
    message_of,
    write_failure,
)
from kfp_gate.training.group import Group, PeerFailed, choose_device
from kfp_gate.training.heartbeat import Heartbeat
from kfp_gate.training.probe import ProbePlan, part_of_the_data
from kfp_gate.training.progress import FAILURE, say
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.record import Record, versions
from kfp_gate.training.redaction import redact
from kfp_gate.training.reproduction import write_reproduction
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.timelines import SHARED_BYTES, Timelines
from kfp_gate.training.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Tracker, address_of
from kfp_gate.training.validation import Validation
from kfp_gate.training.watch import BEAT_S, GRACE_S, Watch, end_process
from kfp_gate.training.window_plan import WindowPlan

log = logging.getLogger(__name__)

RUN_ID = "mlflow-run-id"
PROBE_FOLDER = "probe"

EVIDENCE_S = 20.0
"""How long storing the evidence may take: the pod's end is near."""


class Session:
    """See the module. `run` never raises."""

    def __init__(self, spec: TrainingSpec, ranks: Ranks, *, out: Path, private: Path, node: str) -> None:
        self.spec, self.ranks, self.out, self.private = spec, ranks, out, private
        self.run_id = spec.run_id or os.environ.get("KFP_GATE_RUN_ID", "")
        self.timeline = Timeline(private / "timeline.jsonl", run=self.run_id, rank=ranks.rank, node=node, gpu=None)
        self.lines = LastLines()
        self.lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self.lines)
        self.group: Group | None = None
        self.watch: Watch | None = None
        self.tracker: Tracker | None = None
        self.checkpoints: Checkpoints | None = None
        self.sampler: Sampler | None = None
        self.timelines: Timelines | None = None
        self.reference: BoxReference
        self._failing = threading.Lock()
        self._signalled = False
        self._main = threading.get_ident()

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
            error = self.watch.cause(caught) if self.watch is not None else caught
            if self._signalled and isinstance(error, Exception) and not isinstance(error, KfpGateError):
                # What was raised for the signal got lost on the way, and what died of it too is met first.
                error = Terminated(f"SIGTERM: the pod is being ended ({type(caught).__name__})")
            if error is not caught:
                error.__cause__ = caught
            return self._fail(error)
        self.timeline.write("end", exit_code=0)
        return 0

    @property
    def failing(self) -> bool:
        """Whether this rank is leaving its evidence."""
        return self._failing.locked()

    def hear_signal(self) -> None:
        """Called when SIGTERM arrives."""
        self._signalled = True

    def end_by_signal(self) -> None:
        """Called from a timer when the main thread did not end after SIGTERM."""
        self._fail_from_thread(Terminated("SIGTERM: the main thread did not end in time"))

    # Course -----------------------------------------------------------------------------------------------------

    def _train(self) -> None:
        spec = self.spec
        upstream.settle()
        # On every rank, before anything costs time: a refusal of rank 0 alone would come after the data.
        address_of(spec.tracking_uri)
        device = choose_device(self.ranks, spec.device)
        self.group = group = Group(self.ranks, device, timeout_s=spec.collective_timeout_s)
        self.watch = Watch(group, timeout_s=spec.peer_timeout_s, on_failure=self._fail_from_thread)
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
        self.sampler = Sampler(self.timeline, gpu=gpu, cuda=_quiet_cuda)
        self.sampler.start()
        self.timeline.phase = "data"
        used = self._part_of_the_data(manifests) if spec.probe_steps else manifests
        data = materialize(used, self.private / "data", source_uri=spec.source_uri or None)
        self.timeline.phase = ""
        self.watch.meet("data")
        self.reference = BoxReference.of(manifests["train"].rows(), len(classes))
        validation = Validation(
            used["val"], data.images["val"], group=group, settings=self._predict_settings(device),
            confidence=spec.confidence, bands=any(parse(m).size is not None for m in spec.monitors),
            reference=self.reference,
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
            phases=_phases(device), record=record, tracker=self.tracker, checkpoints=self.checkpoints,
            train_images=data.images["train"], control_group=control_group,
            resume=resumed.state if resumed is not None else None,
            whole={k: len(m) for k, m in manifests.items()}, reproduce=self._reproducer(manifests),
        )  # fmt: skip
        if resumed is not None and resumed.has_ended(spec.epochs):
            log.info("the training ended at epoch %d already: only the model artifact is written", resumed.epoch)
        else:
            course.sample_every_s, course.timelines = self.sampler.every_s, self.timelines
            self._fit(course, data)
        group.agree("training")
        self._share_timelines(group)
        if group.rank == 0:
            self._finish(course, manifests)
        self.watch.meet("model artifact")
        if self.sampler is not None:
            self.sampler.stop()
        self.watch.leave()
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
        token = str(group.broadcast(self.checkpoints.token if self.checkpoints is not None else ""))
        self.timelines = Timelines(
            self.timeline, self.checkpoint_uri, token, rank=group.rank, folder=self.private / "tracked",
            tracker=self.tracker,
        )  # fmt: skip
        self.timelines.start()

    def _share_timelines(self, group: Group) -> None:
        """The other ranks' timelines beside rank 0's: their pods are gone soon."""
        assert self.timelines is not None
        self.timelines.stop()
        for rank in range(1, group.size):
            own = self.timelines.packed.content(SHARED_BYTES) if rank == group.rank else b""
            packed = group.broadcast_bytes(own, source=rank)
            if group.rank == 0:
                try:
                    (self.out / "training").mkdir(parents=True, exist_ok=True)
                    (self.out / "training" / f"timeline-rank{rank}.jsonl").write_bytes(gzip.decompress(packed))
                except OSError as error:
                    log.warning("the timeline of rank %d could not be written: %s", rank, error)
                self.timelines.track(rank, packed)

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
        self.checkpoints = Checkpoints(
            self._steps_uri,
            self.private / "uploads",
            bound_s=spec.upload_bound_s,
            run=self.run_id,
            timeline=self.timeline,
        )
        if resumed is not None and resumed.step is not None:
            # The same training on a new pod: the same store and the same MLflow run go on.
            self.checkpoints.adopt(resumed.step)
            earlier = str(resumed.state["extra"]["run_id"])
        elif resumed is not None:
            self.checkpoints.bring(resumed.best)
        tags = {PIPELINE_RUN_TAG: self.run_id, ROLE_TAG: "training", "kfp_gate.ranks": str(self.ranks.world_size)}
        if record.resumed:
            tags["kfp_gate.resumed_from"] = str(record.resumed.get("uri", ""))
        self.tracker = Tracker(
            uri=spec.tracking_uri, experiment=spec.experiment, spool=self.private / "tracking-spool.jsonl",
            run_id=spec.mlflow_run_id or earlier, name="training", params=_flat(spec.settings()),
            tags={k: v for k, v in tags.items() if v},
            on_open=lambda run_id: self.watch.share(RUN_ID, run_id) if self.watch is not None else None,
        )  # fmt: skip
        if spec.heartbeat_bound_s:
            Heartbeat(self.checkpoint_uri, bound_s=spec.heartbeat_bound_s).watch(self._heartbeat_stale)

    def _finish(self, course: TrainingCourse, manifests: dict[str, Manifest]) -> None:
        assert self.tracker is not None and self.checkpoints is not None
        record, spec = course.record, self.spec
        primary = spec.monitors[0]
        course.best.save()
        chosen = course.best.path(primary)
        if not chosen.is_file():
            raise InvalidInput(
                f"{primary} had no value in any epoch", expected="at least one epoch with a value", where="monitors",
                next_step="choose a monitor that this val set gives a value for, such as map50_95",
            )  # fmt: skip
        self.checkpoints.finish()
        record.checkpoints = self.checkpoints.account()
        self.tracker.tag(**{
            "kfp_gate.monitors": str([(m["monitor"], m["best"], m["best_epoch"]) for m in record.monitors]),
            "kfp_gate.not_computed": str(record.not_computed),
        })  # fmt: skip
        training = self.out / "training"
        training.mkdir(parents=True, exist_ok=True)
        record.write(training / RECORD)
        self.tracker.artifact(training / RECORD)
        (training / "timeline.jsonl").write_bytes(self.timeline.path.read_bytes())
        self._keep_profile(training)
        # The card names the run.
        self.tracker.flush(10.0)
        others = {
            m: f"{self.checkpoints.uri}/{s.key}" for m in spec.monitors[1:]
            if (s := self.checkpoints.known.get(f"best/{course.best.path(m).name}")) is not None
            # What did not arrive left an older one there.
            and (best := course.best.path(m)).is_file() and sha256_of(best) == s.sha256
        }  # fmt: skip
        card = ModelCard(
            sha256="", classes=record.classes, image_size=spec.image_size, settings=spec.settings(),
            monitors=spec.monitors, chosen_by=primary, manifests=record.manifests, versions=versions(),
            image=os.environ.get("KFP_GATE_IMAGE", ""), run_id=self.tracker.run_id, other_weights=others,
            image_lock=os.environ.get("KFP_GATE_IMAGE_LOCK", ""), boxes=self.reference.to_json(),
        )  # fmt: skip
        card = write_model_folder(self.out / "model", chosen, card, (m.table for m in manifests.values()))
        log.info("model %s: best %s of epoch %s", card.sha256[:12], primary, record.weights[primary]["epoch"])
        # Only now: a run that says it finished has its model.
        delivery = self.tracker.close(status="FINISHED")
        self._keep_undelivered()
        record.tracking = {"uri": redact(self.tracker.uri), "run_id": self.tracker.run_id, "summary": delivery.text()}
        record.write(training / RECORD)

    def _keep_profile(self, training: Path) -> None:
        """Beside the record, since this rank's own folder ends with the pod. A full disk costs it and no model."""
        profile = self.private / profiling.FOLDER
        if profile.is_dir():
            try:
                shutil.copytree(profile, training / profiling.FOLDER, dirs_exist_ok=True)
            except OSError as error:
                log.warning("the profile could not be kept in %s: %s", training, error)

    def _keep_undelivered(self) -> None:
        """Put what the tracking server did not take where it outlives this pod; `deliver_spool` delivers it later."""
        waiting = self.tracker.deliver_later() if self.tracker is not None else []
        if not waiting or self.checkpoints is None:
            return
        try:
            key = f"tracking/spool-{self.checkpoints.token}.jsonl"
            open_store(self.checkpoint_uri).write(key, "\n".join(waiting).encode())
            log.warning("what tracking did not take is kept in %s/%s", self.checkpoint_uri, key)
        except KfpGateError as error:
            log.warning("what tracking did not take could not be stored: %s", error.found)

    # Failure ----------------------------------------------------------------------------------------------------

    def _heartbeat_stale(self, reason: str) -> None:
        self._fail_from_thread(Terminated(f"nobody follows this training any more: {reason}"))

    def _fail_from_thread(self, error: BaseException) -> None:
        """The main thread may never come back: leave the evidence from here and end the process."""
        if not self._failing.acquire(blocking=False):
            return
        code = EXIT_BROKEN
        try:
            code = self._leave_evidence(error, thread=self._main)
        finally:
            # Whatever goes wrong here (a full disk, a closed standard output), the process must not stay and hang.
            end_process(code)

    def _fail(self, error: BaseException) -> int:
        if not self._failing.acquire(blocking=False):
            threading.Event().wait(EVIDENCE_S * 2)
        return self._leave_evidence(error)

    def _leave_evidence(self, error: BaseException, *, thread: int | None = None) -> int:
        # First of all the others, so that they stop in seconds.
        if self.watch is not None and not isinstance(error, PeerFailed):
            self.watch.report(f"{type(error).__name__}: {message_of(error)}")
        facts = describe(error, thread=thread)
        memory = read_memory(group=find_control_group(), cuda=_quiet_cuda(), children=True)
        self.timeline.write("failure", failure=facts["kind"], message=facts["message"], **memory.values())
        text = write_failure(
            self._failure_file, rank=self.ranks.rank,
            node=self.timeline.identity["node"], phase=self.timeline.phase, memory=memory.values(),
            versions=versions(), settings=self.spec.settings(),
            last_lines=[redact(line) for line in self.lines.lines], **facts,
        )  # fmt: skip
        done = threading.Thread(target=self._store_evidence, args=(text, error), daemon=True)
        done.start()
        done.join(EVIDENCE_S)
        if kind_of(error) in ("user", "peer", "terminated", "unavailable"):
            log.error("\n%s", message_of(error))
        else:
            log.error("\n%s\n%s", facts["traceback"], message_of(error))
        say(FAILURE, rank=self.ranks.rank, kind=facts["kind"], message=facts["message"], peer=facts["peer"],
            phase=self.timeline.phase, exit_code=exit_code(error))  # fmt: skip
        if self.watch is not None:
            # Rank 0 holds the store in which the others read what happened.
            self.watch.leave(wait_s=2 * BEAT_S + GRACE_S)
        return exit_code(error)

    def _send_evidence(self) -> None:
        """The failure file of a rank without a tracker of its own, into the run that rank 0 opened."""
        run_id = self.watch.shared(RUN_ID) if self.watch is not None else ""
        if not run_id:
            return
        try:
            from mlflow import MlflowClient

            address = address_of(self.spec.tracking_uri)
            if address is not None:
                MlflowClient(address.uri).log_artifact(run_id, str(self._failure_file), "evidence")
        except Exception as problem:
            log.warning("the evidence did not reach MLflow: %s", type(problem).__name__)

    @property
    def _failure_file(self) -> Path:
        return self.private / f"failure-rank{self.ranks.rank}.json"

    def _store_evidence(self, text: str, error: BaseException) -> None:
        try:
            store = open_store(self.checkpoint_uri)
            store.write(f"evidence/failure-rank{self.ranks.rank}.json", text.encode())
            store.write(f"evidence/timeline-rank{self.ranks.rank}.jsonl", self.timeline.path.read_bytes())
            if self.tracker is not None:
                waiting = self.tracker.deliver_later()
                if waiting:
                    store.write("evidence/tracking-spool.jsonl", "\n".join(waiting).encode())
        except Exception as problem:
            log.warning("the evidence did not reach %s: %s", self.checkpoint_uri, type(problem).__name__)
        if self.timelines is not None:
            self.timelines.stop(EVIDENCE_S / 4)
        if self.ranks.rank != 0 and kind_of(error) != "peer":
            self._send_evidence()
        if self.tracker is not None:
            self.tracker.tag(**{"kfp_gate.failure": f"{kind_of(error)}: {message_of(error)}"})
            self.tracker.artifact(self._failure_file, "evidence")
            self.tracker.close(status="KILLED" if kind_of(error) == "terminated" else "FAILED", timeout_s=10)


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


def _quiet_cuda() -> dict[str, int] | None:
    try:
        return cuda_memory()
    except RuntimeError:
        # The device may be the reason why we are here.
        return None
