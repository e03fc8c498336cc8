"""The process group, and the few things said through it.

A collective that one rank never enters hangs all others: minutes on gloo, hours on NCCL. So every place where
one rank alone can fail ends in `agree`; for all other places there is `kfp_gate.training.watch`.
"""

import json
import logging
import math
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kfp_gate.errors import Broken
from kfp_gate.training.ranks import Ranks

log = logging.getLogger(__name__)

CHUNK = 16 << 20
"""Bytes per broadcast of a large payload, so that no rank needs it twice in memory."""

JOIN_S = 3600.0
"""How long ranks wait for each other at the start: a pod may wait for a node or its image, longer than any collective
may take. A rank that failed before it came is the launcher's to see."""

CONNECT_S = 15.0


class Group:
    """All ranks of this training. With one rank every call is local and there is no process group."""

    def __init__(self, ranks: Ranks, device: torch.device, *, timeout_s: float) -> None:
        self.ranks, self.device = ranks, device
        self.store: Any = None
        if ranks.world_size == 1:
            return
        timeout = timedelta(seconds=timeout_s)
        backend = "nccl" if device.type == "cuda" else "gloo"
        try:
            self.store = _join(ranks)
            self.store.set_timeout(timeout)
            dist.init_process_group(
                backend, store=dist.PrefixStore("kfp-gate", self.store), rank=ranks.rank,
                world_size=ranks.world_size, timeout=timeout,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise Broken(
                f"no process group: {type(error).__name__}: {first_line(error)}",
                expected=f"{ranks.world_size} ranks at {ranks.address}:{ranks.port}", where=f"rank {ranks.rank}",
                next_step="check that every rank started and that rank 0's address and port can be reached",
            ) from error  # fmt: skip

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.world_size

    def broadcast(self, value: Any) -> Any:
        """Rank 0's JSON value on every rank."""
        if self.size == 1:
            return value
        payload = json.dumps(value).encode() if self.rank == 0 else b""
        return json.loads(self.broadcast_bytes(payload))

    def broadcast_bytes(self, payload: bytes, *, source: int = 0) -> bytes:
        """One rank's bytes on every rank, in bounded chunks."""
        if self.size == 1:
            return payload
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=source)
        parts = []
        for start in range(0, int(length), CHUNK):
            size = min(CHUNK, int(length) - start)
            if self.rank == source:
                part = torch.frombuffer(bytearray(payload[start : start + size]), dtype=torch.uint8).to(self.device)
            else:
                part = torch.empty(size, dtype=torch.uint8, device=self.device)
            dist.broadcast(part, src=source)
            if self.rank != source:
                parts.append(bytes(part.cpu().numpy()))
        return payload if self.rank == source else b"".join(parts)

    def broadcast_tensors(self, tensors: list[torch.Tensor]) -> None:
        """Make each tensor equal to rank 0's, in place."""
        if self.size > 1:
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Same-shaped tensors of all ranks, on rank 0 alone."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.to(self.device)
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.rank == 0 else None
        dist.gather(tensor, parts, dst=0)
        return [p.cpu() for p in parts] if parts is not None else None

    def largest(self, value: float) -> float:
        """The largest value over all ranks; NaN counts as infinity."""
        if self.size == 1:
            return value
        tensor = torch.tensor([float("inf") if math.isnan(value) else value], dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor)

    def agree(self, what: str, error: BaseException | None = None) -> None:
        """Meet all ranks; raise on every rank if one of them failed.

        Args:
            what: the thing that was done, for the message on the ranks that did not fail.
            error: what this rank met, if it failed.

        Raises:
            The rank's own error where it failed; Broken, naming the rank and its error, elsewhere.
        """
        if self.size == 1:
            if error is not None:
                raise error
            return
        texts = self._texts(f"{type(error).__name__}: {error}" if error is not None else "")
        failed = [(rank, text) for rank, text in enumerate(texts) if text]
        if error is not None:
            raise error
        if failed:
            rank, text = failed[0]
            raise PeerFailed(rank, what, text)

    def _texts(self, text: str) -> list[str]:
        size = 4096
        raw = text.encode()[:size]
        mine = torch.zeros(size, dtype=torch.uint8)
        mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else mine[:0]
        # The flag first: 1 byte a rank in the common case.
        flags = [torch.zeros(1, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(flags, torch.tensor([bool(raw)], dtype=torch.uint8, device=self.device))
        if not any(int(f) for f in flags):
            return [""] * self.size
        parts = [torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in range(self.size)]
        dist.all_gather(parts, mine.to(self.device))
        return [bytes(p.cpu().numpy()).rstrip(b"\0").decode(errors="replace") for p in parts]

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


class PeerFailed(Broken):
    """Another rank failed. This rank did nothing wrong, and its evidence says so."""

    def __init__(self, rank: int, what: str, text: str) -> None:
        self.peer = rank
        super().__init__(
            f"rank {rank} failed in {what}: {text}", expected="all ranks to finish it", where=what,
            next_step=f"read the evidence of rank {rank}; the others only stopped with it",
        )  # fmt: skip

    def __reduce__(self) -> tuple:  # type: ignore[type-arg]  # pickle protocol: the shape is its own
        return (Broken, (self.found,))


def choose_device(ranks: Ranks, device: str) -> torch.device:
    """This rank's device: its own GPU, or the only visible one, or the CPU."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    count = torch.cuda.device_count()
    index = ranks.local_rank if count > 1 else 0
    if not torch.cuda.is_available() or index >= count:
        raise Broken(
            f"{count} visible GPUs for local rank {ranks.local_rank}", expected="a GPU for every process of a node",
            where=f"rank {ranks.rank}", next_step="ask for as many GPUs as processes per node, or set device to 'cpu'",
        )  # fmt: skip
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def open_store(ranks: Ranks, timeout: timedelta, *, client: bool = False) -> Any:
    host = ranks.rank == 0 and not client and not ranks.agent_store
    return dist.TCPStore(
        ranks.address, ranks.port, ranks.world_size, is_master=host, timeout=timeout, wait_for_workers=False
    )


def _join(ranks: Ranks) -> Any:
    """The store, once every rank is here: only then does a collective's timeout begin to count.

    In short waits: a signal is heard between two of them, and not inside one.
    """
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            store = open_store(ranks, timedelta(seconds=CONNECT_S))
            break
        except RuntimeError:
            # The host of the store fails for a reason of its own, such as a port that is taken.
            if (ranks.rank == 0 and not ranks.agent_store) or time.monotonic() > deadline:
                raise
    arrived = dist.PrefixStore("kfp-gate-join", store)
    arrived.set(str(ranks.rank), "1")
    while missing := [rank for rank in range(ranks.world_size) if not arrived.check([str(rank)])]:
        if time.monotonic() > deadline:
            raise RuntimeError(f"ranks {missing[:8]} did not come within {JOIN_S:.0f} s")
        time.sleep(0.2)
    return store


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
