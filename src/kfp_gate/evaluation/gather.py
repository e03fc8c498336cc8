"""Records of all ranks, on rank 0.

Columns travel as raw bytes through the process group, point to point, in bounded chunks: no pickle, no files, nothing
kept on other ranks. A detection is eight bytes (ten if a shard holds crowds); `all_gather_object` of predictions needs
seventy, on every rank.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken
from kfp_gate.evaluation.columns import LAYOUT, Records, columns, concat, from_columns

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 4 << 20
"""The largest message, and all the memory that a sending rank adds."""

_ABSENT = -1
_NAMES = tuple(LAYOUT)


def gather_records(records: Records, group: Any = None) -> Records | None:
    """All ranks' records on rank 0 of the group, sorted by image; None on the others.

    Every rank must call it. A rank with an empty shard gives records of no image. Without a process group, or in a
    group of one, the records come back as they are. The result does not depend on who held which image.

    Args:
        records: of this rank's shard.
        group: a torch.distributed group; None for the default one. With NCCL the current CUDA device carries the
            bytes.

    Raises:
        Broken: an image is on two ranks, or the ranks' columns do not fit together.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size(group) == 1:
        return records
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    device = _carrier(dist, group)
    own = columns(records)
    header = _tensor([len(own[n]) if n in own else _ABSENT for n in _NAMES], device)
    headers = [header.clone() for _ in range(size)]
    dist.all_gather(headers, header, group=group)
    if rank != 0:
        for name in _NAMES:
            if name in own:
                _send(dist, own[name], device, group)
        return None
    parts = [records]
    for source in range(1, size):
        lengths = dict(zip(_NAMES, headers[source].tolist(), strict=True))
        found = {n: _receive(dist, n, length, source, device, group) for n, length in lengths.items() if length >= 0}
        parts.append(from_columns(found, where=f"records of rank {source}"))
    _check_columns(parts)
    return concat(parts)


def _carrier(dist: Any, group: Any) -> "torch.device":
    import torch

    if "nccl" in str(dist.get_backend(group)):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _tensor(values: list[int], device: "torch.device") -> Any:
    import torch

    return torch.tensor(values, dtype=torch.int64, device=device)


def _send(dist: Any, column: NDArray[Any], device: "torch.device", group: Any) -> None:
    import torch

    flat = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
    for start in range(0, len(flat), CHUNK_BYTES):
        # A copy of one chunk: torch takes no read-only arrays, and NCCL none in host memory.
        chunk = torch.from_numpy(flat[start : start + CHUNK_BYTES].copy()).to(device)
        dist.send(chunk, group=group, group_dst=0)


def _receive(dist: Any, name: str, length: int, source: int, device: "torch.device", group: Any) -> NDArray[Any]:
    import torch

    kind, width = LAYOUT[name]
    column = np.empty(length if width == 1 else (length, width), kind)
    flat = column.reshape(-1).view(np.uint8)
    for start in range(0, len(flat), CHUNK_BYTES):
        target = torch.from_numpy(flat[start : start + CHUNK_BYTES])
        chunk = target if device.type == "cpu" else torch.empty_like(target, device=device)
        dist.recv(chunk, group=group, group_src=source)
        if chunk is not target:
            target.copy_(chunk)
    return column


def _check_columns(parts: list[Records]) -> None:
    kept = {frozenset(set(columns(p)) - {"ignored"}) for p in parts if len(p)}
    if len(kept) > 1:
        raise Broken(
            f"ranks with the columns {sorted(map(sorted, kept))}", expected="the same columns on every rank",
            where="gathering of evaluation records", next_step="use the same `detail` on every rank",
        )  # fmt: skip
