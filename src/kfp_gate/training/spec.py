"""What to train: one frozen value that travels to every rank as JSON.

    {"schema_version": 1, "train_manifest": "s3://b/train.parquet", "val_manifest": ..., "epochs": 100, ...}

Readers refuse keys they do not know: a misspelt setting would otherwise train with a default for days.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from kfp_gate import metric_names
from kfp_gate.errors import InvalidInput, Problem

SCHEMA_VERSION = 1

STOP_ON_ALL, STOP_OFF = "all", "off"

GPU_WORKERS = 4
"""Loader processes of a rank on a GPU where `workers` leaves it open."""

MOST_PROFILE_STEPS = 100
"""A step of a large model is 10 to 20 MB of a profiler's events in memory."""

OWNED_OVERRIDES = {
    "model": "base_model", "data": "train_manifest and val_manifest", "epochs": "epochs", "imgsz": "image_size",
    "batch": "batch", "seed": "seed", "patience": "patience", "device": "device", "workers": "workers",
    "resume": "resume_from", "project": "the worker's folder", "name": "the worker's folder",
    "save_dir": "the worker's folder",
}  # fmt: skip
"""Upstream arguments that a field of the spec stands for: given twice, one of the two would be ignored."""

REFUSED_OVERRIDES = {
    "val": "validation would never run, so no best weights could be chosen",
    "save": "nothing would be kept",
    "time": "each rank would compute another number of epochs from its own clock",
    "rect": "validation uses a fixed square, and rectangular training batches are not supported on several ranks",
    "task": "only detection is trained here",
    "mode": "only training happens here",
    "single_cls": "the classes are those of the manifests",
    "fraction": "the images are those of the manifests",
    "split": "the splits are those of the manifests",
    "save_period": "checkpoints are kept by checkpoint_uri",
    "distill_model": "not supported by the exact resume",
    "cache": "ranks may not write beside the data; 'ram' multiplies with every loader worker",
}
"""Upstream arguments under which the promises of this trainer would not hold, and why."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """One training.

    Attributes:
        train_manifest: path or URI of the train manifest.
        val_manifest: path or URI of the val manifest, which chooses the best epoch.
        source_uri: where the images lie; empty: where the manifests say.
        base_model: what to start from, see `kfp_gate.training.base_model`.
        epochs: number of epochs.
        image_size: side of the square in pixels, a multiple of 32.
        batch: images per step over all ranks.
        seed: of weights, order and augmentation.
        monitors: canonical metric names; the first is the primary, whose best epoch becomes the model.
        stop_on: a monitor's name, "all" (stop when all stopped improving), "off"; empty: the primary.
        patience: epochs without improvement after which a monitor has stopped improving; 0 is off.
        min_delta: what a value must gain to count as an improvement.
        min_epochs: never stop earlier.
        sanity_batches: validation batches that go through the whole path before epoch 1; 0 is off.
        confidence: at which precision, recall and the rates are taken.
        validation_batch: images per prediction batch; 0: twice a rank's share of `batch`. Changes no value.
        overrides: further arguments of the upstream trainer, such as `{"lr0": 0.004, "optimizer": "AdamW"}`.
        workers: loader processes per rank; -1: 4 on a GPU, none on a CPU. Upstream starts no more than the node has
            cores or the epoch has batches. With any, a resumed run is another draw.
        device: "auto" (the rank's GPU, else CPU), "cpu" or "cuda".
        precision: "auto" (mixed precision on GPU), "fp32" or "bf16".
        checkpoint_uri: where checkpoints and evidence go while training runs; empty: the worker's folder.
        resume_from: checkpoint URI of an earlier run to continue; empty: continue this one's own, if there is one.
        tracking_uri: MLflow; empty: the environment's, else no tracking.
        experiment: MLflow experiment.
        mlflow_run_id: a run to write to; empty: the worker makes one.
        run_id: the pipeline run's id, kept as a tag; empty: that of the environment.
        upload_bound_s: how long a step may wait for an upload that is still under way.
        heartbeat_bound_s: end if the launcher's heartbeat beside the checkpoints is older; 0 is off.
        peer_timeout_s: a rank that gives no sign for so long counts as dead, and the others stop.
        collective_timeout_s: how long a collective operation may take.
        probe_steps: above 0: no training but a probe of so many steps, see `kfp_gate.training.probe`.
        profile_steps: above 0: profile so many steps, once, after the warm-up; see `kfp_gate.training.profiling`.
    """

    train_manifest: str
    val_manifest: str
    source_uri: str = ""
    base_model: str = "yolo11n.yaml"
    epochs: int = 100
    image_size: int = 640
    batch: int = 16
    seed: int = 0
    monitors: tuple[str, ...] = ("map50_95",)
    stop_on: str = ""
    patience: int = 50
    min_delta: float = 0.0
    min_epochs: int = 0
    sanity_batches: int = 2
    confidence: float = 0.25
    validation_batch: int = 0
    overrides: Mapping[str, Any] = field(default_factory=dict)
    workers: int = -1
    device: str = "auto"
    precision: str = "auto"
    checkpoint_uri: str = ""
    resume_from: str = ""
    tracking_uri: str = ""
    experiment: str = "kfp-gate"
    mlflow_run_id: str = ""
    run_id: str = ""
    upload_bound_s: float = 120.0
    heartbeat_bound_s: float = 0.0
    peer_timeout_s: float = 45.0
    collective_timeout_s: float = 600.0
    probe_steps: int = 0
    profile_steps: int = 0
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The spec as JSON, readable by `from_json`."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, *, where: str = "training spec") -> "TrainingSpec":
        """Read a spec.

        Raises:
            InvalidInput: not JSON, unknown or missing keys, or values out of range (all problems at once).
        """
        try:
            values = json.loads(text)
        except ValueError as error:
            raise _invalid(f"not JSON: {error}", where) from None
        if not isinstance(values, dict):
            raise _invalid(f"a JSON {type(values).__name__}", where)
        if values.get("schema_version", SCHEMA_VERSION) != SCHEMA_VERSION:
            raise InvalidInput(
                f"schema_version {values['schema_version']!r}", expected=str(SCHEMA_VERSION), where=where,
                next_step="start the ranks from an image of the same kfp-gate version as the launcher's",
            )  # fmt: skip
        known = {f.name for f in fields(cls)}
        problems = [Problem(k, "unknown setting") for k in values if k not in known]
        problems += [Problem(k, "missing") for k in ("train_manifest", "val_manifest") if k not in values]
        if problems:
            raise _invalid("settings that do not fit", where, problems)
        if isinstance(values.get("monitors"), list):
            values["monitors"] = tuple(values["monitors"])
        spec = cls(**values)
        spec.check(where=where)
        return spec

    @classmethod
    def read(cls, path: Path) -> "TrainingSpec":
        """Read a spec from a file; raises as `from_json`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise _invalid(f"unreadable file ({type(error).__name__})", str(path)) from None
        return cls.from_json(text, where=str(path))

    def check(self, *, classes: tuple[str, ...] | None = None, where: str = "training spec") -> None:
        """Refuse what would fail later.

        Args:
            classes: if given, per-class monitors must name one of them.
            where: for the message.

        Raises:
            InvalidInput: with every problem found.
        """
        problems = [*_ranges(self), *_overrides(self.overrides)]
        names = [] if isinstance(self.monitors, str) else list(self.monitors)
        if not names:
            problems.append(Problem("monitors", f"{self.monitors!r}: give a list of at least one metric"))
        for name in names:
            try:
                if metric_names.parse(name, classes=classes, where="monitors").slice is not None:
                    problems.append(Problem("monitors", f"{name!r}: slices are judged by the gate, not watched here"))
            except InvalidInput as error:
                problems.append(Problem("monitors", f"{error.found}; {error.next_step}"))
        if len(set(names)) != len(names):
            problems.append(Problem("monitors", "a name twice"))
        if self.stop_on not in ("", STOP_ON_ALL, STOP_OFF, *names):
            problems.append(Problem("stop_on", f"{self.stop_on!r}: expected one of the monitors, 'all' or 'off'"))
        if problems:
            raise _invalid("settings that do not fit", where, problems)

    def settings(self) -> dict[str, Any]:
        """What the model card and the comparison on resume show: no addresses, no ids."""
        hidden = ("train_manifest", "val_manifest", "source_uri", "checkpoint_uri", "resume_from", "tracking_uri",
                  "experiment", "mlflow_run_id", "run_id", "schema_version")  # fmt: skip
        return {k: v for k, v in asdict(self).items() if k not in hidden}

    def differences(self, earlier: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Settings that differ from an earlier run's `settings()`: name to (earlier, now).

        What an earlier version did not know had its default.
        """
        now = json.loads(json.dumps(self.settings()))
        known = {**_defaults(), **earlier}
        if "probe_steps" not in earlier and known["workers"] == GPU_WORKERS and self.workers == -1:
            # Before there were probes, what is -1 now was written as the number on a GPU, and meant none on a CPU.
            known["workers"] = -1
        return {k: (known.get(k), v) for k, v in now.items() if known.get(k) != v}

    def loader_processes(self, *, gpu: bool) -> int:
        """Loader processes to ask for on a rank with or without a GPU."""
        if self.workers >= 0:
            return self.workers
        return GPU_WORKERS if gpu else 0

    def with_changes(self, **changes: Any) -> "TrainingSpec":
        """A copy with some fields changed."""
        return replace(self, **changes)


def _defaults() -> dict[str, Any]:
    values: dict[str, Any] = json.loads(TrainingSpec(train_manifest="", val_manifest="").to_json())
    return values


def _ranges(spec: TrainingSpec) -> list[Problem]:
    problems = []

    def whole(name: str, low: int) -> None:
        value = getattr(spec, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            problems.append(Problem(name, f"{value!r}: expected a whole number, at least {low}"))

    def between(name: str, low: float, high: float = math.inf) -> None:
        value = getattr(spec, name)
        # Written so that NaN fails.
        if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high):
            problems.append(Problem(name, f"{value!r}: expected a number from {low:g} to {high:g}"))

    for name, low in (("epochs", 1), ("image_size", 32), ("batch", 1), ("seed", 0), ("patience", 0), ("min_epochs", 0),
                      ("sanity_batches", 0), ("workers", -1), ("validation_batch", 0), ("probe_steps", 0),
                      ("profile_steps", 0)):  # fmt: skip
        whole(name, low)
    if isinstance(spec.profile_steps, int) and spec.profile_steps > MOST_PROFILE_STEPS:
        problems.append(Problem("profile_steps", f"{spec.profile_steps}: expected at most {MOST_PROFILE_STEPS}"))
    if spec.probe_steps and spec.resume_from:
        problems.append(Problem("probe_steps", "a probe starts anew: leave resume_from empty"))
    for name, least in (("min_delta", 0.0), ("upload_bound_s", 0.0), ("heartbeat_bound_s", 0.0),
                      ("peer_timeout_s", 1.0), ("collective_timeout_s", 1.0)):  # fmt: skip
        between(name, least)
    between("confidence", 0.0, 1.0)
    if isinstance(spec.image_size, int) and spec.image_size % 32:
        problems.append(
            Problem("image_size", f"{spec.image_size}: expected a multiple of 32, the model's largest stride")
        )
    for name, choices in (("device", ("auto", "cpu", "cuda")), ("precision", ("auto", "fp32", "bf16"))):
        if getattr(spec, name) not in choices:
            problems.append(Problem(name, f"{getattr(spec, name)!r}: expected one of {', '.join(choices)}"))
    return problems


def _overrides(overrides: Mapping[str, Any]) -> list[Problem]:
    if not isinstance(overrides, Mapping):
        return [Problem("overrides", f"{overrides!r}: expected a mapping of upstream arguments")]
    problems = []
    for name in overrides:
        if name in OWNED_OVERRIDES:
            problems.append(Problem(f"overrides.{name}", f"is set by {OWNED_OVERRIDES[name]}"))
        elif name in REFUSED_OVERRIDES:
            problems.append(Problem(f"overrides.{name}", f"refused: {REFUSED_OVERRIDES[name]}"))
    return problems


def _invalid(found: str, where: str, problems: list[Problem] | None = None) -> InvalidInput:
    return InvalidInput(
        found, expected="a training spec as docs/training.md describes it", where=where,
        next_step="correct the settings named above" if problems else "write the spec with TrainingSpec.to_json",
        problems=problems or (),
    )  # fmt: skip
