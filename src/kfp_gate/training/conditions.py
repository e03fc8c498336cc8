"""Under which conditions a rank trains, as one `conditions` line: what two runs must share to be compared."""

import os
from typing import TYPE_CHECKING, Any

import torch

from kfp_gate.observing.cores import cpu_quota, usable_cores

if TYPE_CHECKING:
    from kfp_gate.training.course import TrainingCourse
    from kfp_gate.training.trainer import RankTrainer


def conditions(trainer: "RankTrainer", course: "TrainingCourse", *, sample_every_s: float | None) -> dict[str, Any]:
    """The line's values, as they really are on this rank once its loader exists; None is unknown, or none."""
    loader, device, spec, record = trainer.train_loader, trainer.device, course.spec, course.record
    workers = int(loader.num_workers)
    # A probe's loader is as long as the probe, and sees a part of the images.
    steps = -(-course.whole["train"] // (course.group.size * loader.batch_size)) if course.probe else len(loader)
    return {
        "manifests": record.manifests, "classes": len(record.classes), "train_images": course.whole["train"],
        "val_images": course.whole["val"], "steps_per_epoch": steps, "epochs": spec.epochs,
        "batch": int(trainer.batch_size), "rank_batch": int(loader.batch_size), "ranks": course.group.size,
        "workers": workers, "workers_most": most_workers(device),
        "prefetch": loader.prefetch_factor if workers else None, "pin_memory": bool(loader.pin_memory),
        "precision": precision(trainer), "image_size": spec.image_size,
        "device": str(device), "gpu_name": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "cpus": usable_cores(), "cpu_quota": cpu_quota(), "memory_limit": course.memory().limit,
        "monitors": list(spec.monitors), "stop_on": spec.stop_on, "patience": spec.patience,
        "min_delta": spec.min_delta, "min_epochs": spec.min_epochs, "seed": spec.seed, "base_model": spec.base_model,
        "sample_every_s": sample_every_s, "settings": spec.settings(),
    }  # fmt: skip


def most_workers(device: torch.device) -> int:
    """Loader processes that upstream starts at most, whatever it is asked for: the node's cores over its GPUs."""
    gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    return (os.cpu_count() or 1) // max(gpus, 1)


def precision(trainer: "RankTrainer") -> str:
    """What the forward pass computes in: "fp32", or mixed with "fp16" or "bf16"."""
    if trainer.args.amp == "bf16":
        return "bf16"
    return "fp16" if bool(trainer.amp) else "fp32"
