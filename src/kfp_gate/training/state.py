"""The exact state of a training between two epochs: taken from a trainer, and put back.

Upstream's own checkpoints cannot do this: they hold half-precision averaged weights instead of the model's,
half-precision momentum, and no random state. Here everything keeps its type, so a resumed training continues bit for
bit: on CPU always, on several ranks with the same number of ranks. What lives in loader processes (their random
state, prefetched batches, mosaic buffers) cannot be taken; with `workers` > 0 the order and augmentation of later
epochs are another draw.

A state holds only tensors and plain values, and is read with `weights_only=True`.
"""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.training.group import Group

if TYPE_CHECKING:
    from kfp_gate.training.trainer import RankTrainer

STATE_VERSION = 1
_RANDOM_BYTES = 24_576
"""Fixed size of one rank's packed random state: torch 5056, a loader's 5056, Python and numpy 2500 each, CUDA 16."""
_BUFFER_INDEXES = 1001
"""Upstream keeps at most 1000 images for mosaics; the first cell is their number."""


def capture(trainer: "RankTrainer", epoch: int, *, extra: dict[str, Any]) -> dict[str, Any] | None:
    """The state after an epoch, on rank 0; None elsewhere. All ranks must call it.

    Args:
        trainer: between two epochs.
        epoch: the epoch that is complete, from 1.
        extra: plain values to keep with it (monitors, settings).
    """
    from ultralytics.utils.torch_utils import unwrap_model

    model = unwrap_model(trainer.model)
    group = trainer.group
    own = group.gather(pack_random(trainer))
    buffers = group.gather(_flat_buffers(model))
    mosaic = group.gather(_mosaic_indexes(trainer))
    if group.rank != 0:
        return None
    pending = {n: p.grad.detach().cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    return {
        "version": STATE_VERSION, "epoch": epoch, "model": _cpu(model.state_dict()),
        "ema": _cpu(trainer.ema.ema.state_dict()), "updates": trainer.ema.updates,
        "optimizer": _cpu(trainer.optimizer.state_dict()), "scaler": trainer.scaler.state_dict(),
        "gradients": pending, "batch_index": trainer.batch_index, "last_step": trainer.last_step,
        "ranks": [
            {"random": r, "buffers": b, "mosaic": m}
            for r, b, m in zip(own or [], buffers or [], mosaic or [], strict=True)
        ],
        "extra": extra,
    }  # fmt: skip


def restore(trainer: "RankTrainer", state: dict[str, Any], *, randomness: bool = True) -> tuple[str, ...]:
    """Put a state back; all ranks call it with the same state.

    Args:
        trainer: after its setup, of the same architecture and classes.
        state: as captured.
        randomness: put the random state back too; not after a NaN, which the same draws would only repeat.

    Returns:
        What could not be restored exactly, in words.

    Raises:
        InvalidInput: the state is of another architecture or number of classes.
    """
    from ultralytics.utils.torch_utils import unwrap_model

    notes = []
    model = unwrap_model(trainer.model)
    try:
        model.load_state_dict(state["model"])
        trainer.ema.ema.load_state_dict(state["ema"])
    except RuntimeError as error:
        raise InvalidInput(
            f"a checkpoint of another model: {str(error).splitlines()[0]}",
            expected="the same base_model and the same classes as the run that is resumed", where="resume_from",
            next_step="resume with the first run's base_model, or start without resume_from",
        ) from None  # fmt: skip
    trainer.ema.updates = state["updates"]
    try:
        _load_optimizer(trainer, state["optimizer"])
    except ValueError as error:
        notes.append(f"the optimizer's state does not fit and starts afresh ({error})")
    if state["scaler"]:
        trainer.scaler.load_state_dict(state["scaler"])
    trainer.optimizer.zero_grad()
    trainer.last_step = state["last_step"]
    if getattr(model, "criterion", None) is not None and hasattr(model.criterion, "updates"):
        model.criterion = None
    _restore_criterion(model, state["epoch"])
    notes += _restore_rank(trainer, model, state["ranks"], randomness=randomness)
    return tuple(notes)


def restore_gradients(trainer: "RankTrainer", state: dict[str, Any]) -> None:
    """Gradients of batches that wait for their step; upstream clears them once between its setup and its loop."""
    from ultralytics.utils.torch_utils import unwrap_model

    for name, parameter in unwrap_model(trainer.model).named_parameters():
        if name in state["gradients"]:
            parameter.grad = state["gradients"][name].to(parameter.device).clone()


def restore_random(trainer: "RankTrainer", state: dict[str, Any]) -> None:
    """The random state alone, as the last thing before the first batch is drawn."""
    if len(state["ranks"]) != trainer.group.size:
        return
    unpack_random(trainer, state["ranks"][trainer.group.rank]["random"])
    loader = trainer.train_loader
    if trainer.epoch == trainer.epochs - trainer.args.close_mosaic:
        # An uninterrupted run makes a new iterator in this epoch too.
        return
    order, make = loader.generator.get_state(), loader._get_iterator

    def without_drawing() -> Any:
        # Making an iterator draws a number, which an uninterrupted run did not draw here.
        iterator = make()
        loader.generator.set_state(order)
        del loader._get_iterator
        return iterator

    loader._get_iterator = without_drawing


def write_state(state: dict[str, Any], path: Path) -> None:
    """Write a state.

    Raises:
        OSError: the disk is full or not writable. torch reports it as a RuntimeError of its zip writer.
    """
    try:
        torch.save(state, path)
    except RuntimeError as error:
        raise OSError(f"{path.name} could not be written: {str(error).splitlines()[0]}") from error


def read_state(path: Path) -> dict[str, Any]:
    """Read a state.

    Raises:
        Broken: the file is not one, or of another version.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        version = state["version"]
    except Exception as error:
        raise Broken(
            f"unreadable checkpoint ({type(error).__name__})", expected="a state that this trainer wrote",
            where=str(path), next_step="resume from an earlier checkpoint, or start without resume_from",
        ) from error  # fmt: skip
    if version != STATE_VERSION:
        raise Broken(
            f"checkpoint version {version}", expected=str(STATE_VERSION), where=str(path),
            next_step="resume with the kfp-gate version that wrote it",
        )  # fmt: skip
    return state


def weights_digest(module: torch.nn.Module) -> torch.Tensor:
    """A digest of all parameters, as 4 x int64, for comparing ranks bit by bit."""
    import hashlib

    digest = hashlib.sha256()
    for parameter in module.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return torch.frombuffer(bytearray(digest.digest()), dtype=torch.int64).clone()


def check_equal_weights(module: torch.nn.Module, group: Group) -> None:
    """Refuse to go on when ranks hold different weights. All ranks call it.

    Upstream trains an unwrapped model on each rank when only one of its conditions is missed, without a word.

    Raises:
        Broken: on every rank.
    """
    digests = group.gather(weights_digest(module))
    different = [r for r, d in enumerate(digests or []) if not torch.equal(d, digests[0])] if digests else []
    different = group.broadcast(different)
    if different:
        raise Broken(
            f"ranks {different} hold other weights than rank 0", expected="equal weights after every epoch",
            where="training", next_step="report this with the versions in the model card: ranks did not train together",
        )  # fmt: skip


def _load_optimizer(trainer: "RankTrainer", saved: dict[str, Any]) -> None:
    for group, now in zip(saved["param_groups"], trainer.optimizer.param_groups, strict=True):
        group["fused"] = now.get("fused")
        group["foreach"] = now.get("foreach")
    trainer.optimizer.load_state_dict(saved)


def _restore_criterion(model: Any, epoch: int) -> None:
    # Heads with two branches weigh their losses by the epoch (upstream's resume does the same).
    if getattr(model.model[-1], "one2one_cv2", None) is not None:
        model.criterion = model.init_criterion()
        model.criterion.updates = epoch - 1
        model.criterion.update()


def _restore_rank(trainer: "RankTrainer", model: Any, ranks: list[dict[str, Any]], *, randomness: bool) -> list[str]:
    if len(ranks) != trainer.group.size:
        return [f"the checkpoint is of {len(ranks)} ranks, this run has {trainer.group.size}: order and augmentation "
                "of the next epochs are another draw, and batch statistics are rank 0's"]  # fmt: skip
    mine = ranks[trainer.group.rank]
    _put_buffers(model, mine["buffers"])
    if not randomness:
        return []
    count = int(mine["mosaic"][0])
    dataset = trainer.train_loader.dataset
    if trainer.train_loader.num_workers:
        return ["loader processes start with a new random state: order and augmentation are another draw"]
    for index in mine["mosaic"][1 : 1 + count].tolist():
        dataset.load_image(index)
    unpack_random(trainer, mine["random"])
    return []


def _cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, dict):
        return {k: _cpu(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_cpu(v) for v in value]
    return value


def _flat_buffers(model: torch.nn.Module) -> torch.Tensor:
    # float64 holds a float32 and every batch count below 2^53 exactly.
    parts = [b.detach().cpu().reshape(-1).to(torch.float64) for b in model.buffers()]
    return torch.cat(parts) if parts else torch.zeros(1, dtype=torch.float64)


def _put_buffers(model: torch.nn.Module, flat: torch.Tensor) -> None:
    start = 0
    for buffer in model.buffers():
        end = start + buffer.numel()
        buffer.copy_(flat[start:end].reshape(buffer.shape).to(buffer.dtype))
        start = end


def _mosaic_indexes(trainer: "RankTrainer") -> torch.Tensor:
    cells = torch.zeros(_BUFFER_INDEXES, dtype=torch.int64)
    indexes = list(getattr(trainer.train_loader.dataset, "buffer", []))[: _BUFFER_INDEXES - 1]
    cells[0] = len(indexes)
    cells[1 : 1 + len(indexes)] = torch.tensor(indexes, dtype=torch.int64)
    return cells


def pack_random(trainer: "RankTrainer") -> torch.Tensor:
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state()  # upstream augments with it
    parts = [
        torch.get_rng_state(), trainer.train_loader.generator.get_state(),
        _bytes(np.array(words, dtype=np.uint32)), _bytes(np.array([version, gauss is not None], dtype=np.int64)),
        _bytes(np.array([gauss or 0.0])), _bytes(np.asarray(keys, dtype=np.uint32)),
        _bytes(np.array([position, has_gauss], dtype=np.int64)), _bytes(np.array([cached])),
        torch.cuda.get_rng_state(trainer.device) if trainer.device.type == "cuda" else torch.empty(0).byte(),
    ]  # fmt: skip
    lengths = torch.tensor([len(p) for p in parts], dtype=torch.int64).view(torch.uint8)
    packed = torch.cat([lengths, *parts])
    result = torch.zeros(_RANDOM_BYTES, dtype=torch.uint8)
    result[: len(packed)] = packed
    return result


def unpack_random(trainer: "RankTrainer", packed: torch.Tensor) -> None:
    lengths = packed[: 9 * 8].clone().view(torch.int64).tolist()
    parts, start = [], 9 * 8
    for length in lengths:
        parts.append(packed[start : start + length].clone())
        start += length
    torch.set_rng_state(parts[0])
    trainer.train_loader.generator.set_state(parts[1])
    version, has = parts[3].numpy().view(np.int64).tolist()
    gauss = float(parts[4].numpy().view(np.float64)[0])
    random.setstate((version, tuple(parts[2].numpy().view(np.uint32).tolist()), gauss if has else None))
    position, has_gauss = parts[6].numpy().view(np.int64).tolist()
    cached = float(parts[7].numpy().view(np.float64)[0])
    np.random.set_state(("MT19937", parts[5].numpy().view(np.uint32), position, has_gauss, cached))
    if lengths[8] and trainer.device.type == "cuda":
        torch.cuda.set_rng_state(parts[8], trainer.device)


def _bytes(array: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(array.tobytes()), dtype=torch.uint8)
