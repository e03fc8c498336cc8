"""The process group, the few things said through it, and the watch over the other ranks.

A collective that one rank never enters hangs all others: minutes on gloo, hours on NCCL. So every place where
one rank alone can fail ends in `agree`, and beside the group each rank has a thread that beats once a second
in the rendezvous store and ends the process when another rank has failed or fallen silent.
"""

import json
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kfp_gate.errors import Broken
from kfp_gate.training.ranks import Ranks

log = logging.getLogger(__name__)

CHUNK = 16 << 20
"""Bytes per broadcast of a large payload, so that no rank needs it twice in memory."""

BEAT_S = 1.0
GRACE_S = 3.0
"""How long the main thread may take to report by itself before the watch ends the process."""


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
            self.store = _store(ranks, timeout)
            dist.init_process_group(
                backend, store=dist.PrefixStore("kfp-gate", self.store), rank=ranks.rank,
                world_size=ranks.world_size, timeout=timeout,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            raise Broken(
                f"no process group: {type(error).__name__}: {_first_line(error)}",
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

    def broadcast_bytes(self, payload: bytes) -> bytes:
        """Rank 0's bytes on every rank, in bounded chunks."""
        if self.size == 1:
            return payload
        length = torch.tensor([len(payload)], dtype=torch.int64, device=self.device)
        dist.broadcast(length, src=0)
        parts = []
        for start in range(0, int(length), CHUNK):
            size = min(CHUNK, int(length) - start)
            if self.rank == 0:
                part = torch.frombuffer(bytearray(payload[start : start + size]), dtype=torch.uint8).to(self.device)
            else:
                part = torch.empty(size, dtype=torch.uint8, device=self.device)
            dist.broadcast(part, src=0)
            if self.rank != 0:
                parts.append(bytes(part.cpu().numpy()))
        return payload if self.rank == 0 else b"".join(parts)

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


_COLLECTIVE_WORDS = (
    "gloo",
    "NCCL",
    "DistBackendError",
    "onnection",
    "process group",
    "TCPStore",
    "socket",
    "Broken pipe",
)
"""What torch's errors say when the other side of a collective is gone."""


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


class Watch:
    """A thread that ends this process when another rank failed, fell silent, or rank 0's store is gone."""

    def __init__(self, group: Group, *, timeout_s: float, on_failure: Callable[[PeerFailed], None]) -> None:
        self.group, self.timeout_s, self.on_failure = group, timeout_s, on_failure
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        if group.size > 1:
            # A client of its own: calls on one client wait for each other.
            self.store = dist.PrefixStore(
                "kfp-gate-watch", _store(group.ranks, timedelta(seconds=timeout_s), client=True)
            )
            self.thread = threading.Thread(target=self._run, name="kfp-gate-watch", daemon=True)
            self.thread.start()

    def report(self, text: str) -> None:
        """Tell the others that this rank failed, from the main thread, before the evidence is written."""
        if self.thread is not None and not self.done.is_set():
            try:
                self.store.set(f"failed/{self.group.rank}", text[:2000])
            except RuntimeError as error:
                log.debug("the failure could not be told to the other ranks: %s", error)

    def meet(self, name: str) -> None:
        """Wait for all ranks, for as long as they live: a download may take one rank an hour longer than another,
        which no collective's timeout should decide. A rank that fails meanwhile ends the wait through the watch."""
        if self.thread is None:
            return
        self.store.set(f"meet/{name}/{self.group.rank}", "1")
        keys = [f"meet/{name}/{rank}" for rank in range(self.group.size)]
        while not self.store.check(keys):
            time.sleep(0.05)

    def share(self, name: str, value: str) -> None:
        """Leave a small text for the other ranks; never raises."""
        if self.thread is not None:
            try:
                self.store.set(f"share/{name}", value)
            except RuntimeError as error:
                log.debug("%s could not be shared: %s", name, error)

    def shared(self, name: str) -> str:
        """What another rank shared; "" if nothing."""
        try:
            if self.thread is not None and self.store.check([f"share/{name}"]):
                return str(self.store.get(f"share/{name}").decode())
        except RuntimeError as error:
            log.debug("%s could not be read: %s", name, error)
        return ""

    def leave(self, *, wait_s: float = 15.0) -> None:
        """This rank ends and will beat no more; rank 0, which holds the store, waits for the others."""
        if self.thread is None:
            return
        self.done.set()
        if threading.current_thread() is not self.thread:
            self.thread.join(timeout=5)
        try:
            self.store.set(f"left/{self.group.rank}", "1")
            if self.group.rank == 0:
                deadline = time.monotonic() + wait_s
                while time.monotonic() < deadline:
                    if self.store.check([f"left/{r}" for r in range(self.group.size)]):
                        break
                    time.sleep(0.05)
        except RuntimeError:
            log.debug("the store was gone before all ranks had left")

    def cause(self, error: BaseException) -> BaseException:
        """What lies behind an error of a collective: usually that another rank failed a moment before.

        Args:
            error: what the main thread met.

        Returns:
            PeerFailed naming that rank, or the error itself if it is this rank's own.
        """
        text = f"{type(error).__name__}: {error}"
        if self.thread is None or isinstance(error, Broken) or not any(w in text for w in _COLLECTIVE_WORDS):
            return error
        deadline, counts = time.monotonic() + GRACE_S, dict[int, bytes]()
        others = [r for r in range(self.group.size) if r != self.group.rank]
        try:
            while time.monotonic() < deadline:
                for rank in others:
                    if self.store.check([f"failed/{rank}"]):
                        return PeerFailed(rank, "training", self.store.get(f"failed/{rank}").decode(errors="replace"))
                    if rank not in counts and self.store.check([f"beat/{rank}"]):
                        counts[rank] = self.store.get(f"beat/{rank}")
                time.sleep(0.1)
            for rank, count in counts.items():
                if self.store.get(f"beat/{rank}") == count:
                    return PeerFailed(rank, "training", "its connections closed and it gives no sign of life")
        except RuntimeError:
            return PeerFailed(0, "training", "its connections closed and its store does not answer")
        return error

    def _run(self) -> None:
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        others = [r for r in range(self.group.size) if r != self.group.rank]
        while not self.done.wait(BEAT_S):
            count += 1
            try:
                failure = self._look(count, seen, others)
            except RuntimeError as error:
                failure = PeerFailed(0, "the rendezvous store", f"rank 0 does not answer: {_first_line(error)}")
            if failure is not None:
                # The main thread may be about to raise the same from a collective: let it speak first.
                if not self.done.wait(GRACE_S):
                    self.on_failure(failure)
                return

    def _look(self, count: int, seen: dict[int, tuple[bytes, float]], others: list[int]) -> PeerFailed | None:
        self.store.set(f"beat/{self.group.rank}", str(count))
        now = time.monotonic()
        for rank in others:
            if self.store.check([f"failed/{rank}"]):
                return PeerFailed(rank, "training", self.store.get(f"failed/{rank}").decode(errors="replace"))
            if self.store.check([f"left/{rank}"]):
                continue
            beat = self.store.get(f"beat/{rank}") if self.store.check([f"beat/{rank}"]) else b""
            if rank not in seen or seen[rank][0] != beat:
                seen[rank] = (beat, now)
            elif now - seen[rank][1] > self.timeout_s:
                return PeerFailed(rank, "training", f"no sign of life for {self.timeout_s:.0f} s")
        return None


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


def end_process(code: int) -> None:
    """End now, without unwinding: the main thread may sit in a collective that never returns."""
    os._exit(code)


def _store(ranks: Ranks, timeout: timedelta, *, client: bool = False) -> Any:
    host = ranks.rank == 0 and not client and not ranks.agent_store
    return dist.TCPStore(
        ranks.address, ranks.port, ranks.world_size, is_master=host, timeout=timeout, wait_for_workers=False
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
