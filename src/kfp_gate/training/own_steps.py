"""The steps of a training that is not ours, in the same lines as the worker's: see `kfp_gate.training.api`."""

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kfp_gate.observing.cores import cpu_quota, usable_cores
from kfp_gate.observing.loading import Made, batches_ready, unwrap
from kfp_gate.observing.phases import FORWARD, OTHER, Phases, phase_line
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.record import versions
from kfp_gate.training.windows import Windows

if TYPE_CHECKING:
    from kfp_gate.training.timelines import Timelines

log = logging.getLogger(__name__)


class OwnSteps:
    """Phases, windows and samples of one process."""

    def __init__(self, timeline: Timeline, ranks: Ranks, *, epochs: int, cuda: bool, timelines: "Timelines | None"):
        """`cuda`: the process computes on torch's current CUDA device; its time is then measured there too."""
        self.timeline, self.ranks, self.epochs, self.timelines = timeline, ranks, epochs, timelines
        clock, gpu = None, None
        if cuda:
            import torch

            from kfp_gate.training.device_clock import CudaClock

            clock = CudaClock()
            gpu = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        timeline.identity["gpu"] = gpu
        timeline.write("start", pid=os.getpid(), versions=versions(), ranks=vars(ranks))
        self.phases = Phases(clock)
        self.windows = Windows(timeline, self.phases)
        self.sampler = Sampler(timeline, gpu=gpu, cuda=allocator)
        self.sampler.start()
        if timelines is not None:
            timelines.start()
        self._epoch = self._batch = 0
        self._iterator: Any = None
        self._made: Made | None = None
        self._moved: int | None = None

    def conditions(self, loader: Any = None, **values: Any) -> None:
        """Write what the training runs under; `values` as `kfp_gate.observing.timeline` names them."""
        known: dict[str, Any] = {
            "epochs": self.epochs, "ranks": self.ranks.world_size, "cpus": usable_cores(), "cpu_quota": cpu_quota(),
            "sample_every_s": self.sampler.every_s,
        }  # fmt: skip
        workers = getattr(loader, "num_workers", None)
        if workers is not None:
            known |= {
                "workers": workers, "prefetch": getattr(loader, "prefetch_factor", None) if workers else None,
                "pin_memory": bool(getattr(loader, "pin_memory", False)),
                "rank_batch": getattr(loader, "batch_size", None),
            }  # fmt: skip
        self.timeline.write("conditions", **{**known, **values})

    @contextmanager
    def epoch(self, epoch: int) -> Iterator[None]:
        """Around an epoch with its validation: one `phases` line at its end, and a line in the log."""
        self._epoch, self.timeline.phase = epoch, "train"
        self.phases.take()
        try:
            yield
        finally:
            self.phases.enter(OTHER)
            times = self.phases.take()
            self.timeline.phase = ""
            self.timeline.write("phases", epoch=epoch, seconds=times.seconds, steps=times.steps, device=times.device)
            log.info("%s", phase_line(epoch, self.epochs, times))
            if self.timelines is not None:
                self.timelines.epoch_ends()

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader, once through; waiting for them is the phase `data`."""
        self.windows.begin(self._epoch, self._batch)
        self._iterator = iter(loader)
        try:
            for loaded in self._iterator:
                batch, self._made = unwrap(loaded)
                self._moved = _bytes(batch)
                self.phases.enter(FORWARD)
                yield batch
        finally:
            self.windows.end()
            self._iterator = None

    def step_done(self, *, images: int | None = None) -> None:
        """At the end of a step; what follows is the wait for the next batch."""
        self.windows.step(
            images=images, moved=self._moved, made=self._made, ready=batches_ready(self._iterator)
        )  # fmt: skip
        self._batch += 1
        self._made = self._moved = None

    def stop(self, *, ok: bool) -> None:
        """Write the last line, and send what is left."""
        self.sampler.stop()
        self.timeline.write("end", exit_code=0 if ok else 1)
        if self.timelines is not None:
            self.timelines.stop()


def _bytes(batch: Any) -> int | None:
    """Of the largest array in a batch, which is that of the images."""
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    sizes = [_size(x) for x in (batch if isinstance(batch, list | tuple) else [batch])]
    return max((s for s in sizes if s is not None), default=None)


def _size(value: Any) -> int | None:
    try:
        found = getattr(value, "nbytes", None)
    except Exception:
        # A batch may hold anything; torch's sparse tensors raise here. Looking at it must not cost the training.
        return None
    return int(found) if isinstance(found, int) else None


def allocator() -> dict[str, int] | None:
    """Bytes of torch's allocator, where torch is in use at all: importing it for this would cost seconds."""
    import sys

    if "torch" not in sys.modules:
        return None
    from kfp_gate.training.device_clock import cuda_memory

    return cuda_memory()
