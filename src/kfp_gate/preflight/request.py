"""What preflight is asked to check: the pipeline's parameters, as far as something in them can fail later."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kfp_gate.gate.settings import GateSettings


@dataclass(frozen=True, kw_only=True)
class PreflightRequest:
    """The pipeline that is about to run.

    Attributes:
        train, val, test: manifests.
        gate: thresholds and all else that the gate is told.
        model_uri: a model to judge instead of one to train; "" trains `base_model`.
        base_model, image_size, batch, monitors: of the training.
        backend, worker_image: where the ranks run; an image other than this release's is told.
        gpus: GPUs per node that the training asks for; 0 is CPU.
        gate_gpu: whether the gate's step, in whose image this runs, was given a GPU.
        checkpoint_uri: where checkpoints go.
        tracking_uri, experiment: the MLflow server.
        registered_model, alias: of the registration; an empty name registers nothing.
        run_id: the pipeline run's id.
        try_images: images that the gate's path is tried on; 0 leaves it out.
    """

    train: Path
    val: Path
    test: Path
    gate: GateSettings = field(default_factory=GateSettings)
    model_uri: str = ""
    base_model: str = "yolo11n.yaml"
    image_size: int = 640
    batch: int = 16
    monitors: Sequence[str] = ("map50_95",)
    backend: str = "processes"
    worker_image: str = ""
    gpus: int = 0
    gate_gpu: bool = False
    checkpoint_uri: str = ""
    tracking_uri: str = ""
    experiment: str = "kfp-gate"
    registered_model: str = ""
    alias: str = "champion"
    run_id: str = ""
    try_images: int = 8
