"""The weights file: what `model.pt` of the model artifact holds, readable by upstream's own tools.

The averaged weights in half precision, nothing of the optimizer, and no path of this machine.
"""

import io
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from kfp_gate.training.trainer import RankTrainer

LICENSE = "AGPL-3.0 (https://ultralytics.com/license)"
"""Upstream writes its licence into every checkpoint; so do we."""

_LOCAL_ARGUMENTS = frozenset({"data", "project", "name", "save_dir", "model", "resume", "pretrained", "device"})


def as_stored(module: torch.nn.Module) -> torch.nn.Module:
    """A copy with the values that the weights file will hold: rounded to half precision, back in float32."""
    copy = _stripped(module)
    return copy.half().float()


def weights_bytes(trainer: "RankTrainer", *, epoch: int) -> bytes:
    """The file of a trainer's averaged weights.

    Args:
        trainer: between two epochs.
        epoch: the epoch, from 1.
    """
    import ultralytics

    module = _stripped(trainer.ema.ema).half()
    for value in module.state_dict().values():
        if value.is_floating_point():
            torch.nan_to_num_(value)
    arguments = portable_arguments(vars(trainer.args))
    module.args = arguments  # upstream's models carry their arguments
    architecture = getattr(module, "yaml", None)
    if isinstance(architecture, dict) and "yaml_file" in architecture:
        architecture["yaml_file"] = Path(str(architecture["yaml_file"])).name
    buffer = io.BytesIO()
    torch.save(
        {
            "epoch": -1, "trained_epochs": epoch, "best_fitness": None, "model": module.cpu(), "ema": None,
            "updates": None, "optimizer": None, "scaler": None, "train_args": arguments,
            "version": ultralytics.__version__, "license": LICENSE,
        },
        buffer,
    )  # fmt: skip
    return buffer.getvalue()


def portable_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Upstream's arguments without those that name places of this machine."""
    return {
        k: v
        for k, v in arguments.items()
        if k not in _LOCAL_ARGUMENTS and isinstance(v, str | int | float | bool | None)
    }


def _stripped(module: torch.nn.Module) -> torch.nn.Module:
    criterion = getattr(module, "criterion", None)
    if criterion is not None:
        module.criterion = None  # not part of the weights, and large
    try:
        copy = deepcopy(module)
    finally:
        if criterion is not None:
            module.criterion = criterion
    for parameter in copy.parameters():
        parameter.requires_grad = False
    return copy.eval()
