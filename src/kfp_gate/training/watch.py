"""The watch of each rank over the others: a rank that failed or fell silent ends all of them within seconds.

Beside the process group, each rank has a thread that beats once a second in the rendezvous store and looks at the
beats of the others. It also holds the few things that ranks leave for each other without a collective.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from kfp_gate.errors import KfpGateError
from kfp_gate.training.group import Group, PeerFailed, first_line, open_store

log = logging.getLogger(__name__)

BEAT_S = 1.0
GRACE_S = 3.0
"""How long the main thread may take to report by itself before the watch ends the process."""

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


class Watch:
    """A thread that ends this process when another rank failed, fell silent, or rank 0's store is gone."""

    def __init__(self, group: Group, *, timeout_s: float, on_failure: Callable[[PeerFailed], None]) -> None:
        self.group, self.timeout_s, self.on_failure = group, timeout_s, on_failure
        self.done = threading.Event()
        self.thread: threading.Thread | None = None
        if group.size > 1:
            # A client of its own: calls on one client wait for each other.
            self.store = dist.PrefixStore(
                "kfp-gate-watch", open_store(group.ranks, timedelta(seconds=timeout_s), client=True)
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
        if self.thread is None or isinstance(error, KfpGateError) or not any(w in text for w in _COLLECTIVE_WORDS):
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
                failure = PeerFailed(0, "the rendezvous store", f"rank 0 does not answer: {first_line(error)}")
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


def end_process(code: int) -> None:
    """End now, without unwinding: the main thread may sit in a collective that never returns."""
    os._exit(code)
