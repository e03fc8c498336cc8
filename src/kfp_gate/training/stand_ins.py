"""What stands in upstream's trainer where it keeps something of its own; `kfp_gate.training.trainer` puts it there."""

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from kfp_gate.observing.loader_profile import Flag, follow
from kfp_gate.training.loader_parts import install

PR_SET_PDEATHSIG = 1
"""Of linux/prctl.h."""


class NeverStops:
    """Stands where upstream keeps its early stopping: `Course.epoch_ends` sets `stop` itself, just before upstream
    broadcasts it."""

    possible_stop = False

    def __call__(self, _epoch: int, _fitness: float) -> bool:
        return False


class Order:
    """One permutation an epoch. torch's own sampler draws a second, unused one, at the end of an epoch or at the
    start of the next, depending on whether the batch divides the set: a checkpoint in between could not tell."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(len(self.sampler), generator=self.sampler.generator).tolist()


class LoaderStart:
    """The start of a loader process. A forked one inherits the worker's answer to SIGTERM, and would leave evidence
    of its own; it simply ends. It also ends with its rank: torch's would wait for ever to hand over a batch that is
    larger than a pipe, and keep its memory and the rank's standard output."""

    def __init__(self, upstreams: Callable[[int], None], flag: Flag | None) -> None:
        self.upstreams, self.flag = upstreams, flag

    def __call__(self, number: int) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _end_with_parent()
        install()
        if self.flag is not None:
            follow(self.flag)
        self.upstreams(number)


def _end_with_parent() -> None:
    """prctl(2), on Linux; elsewhere torch's own look at the parent has to do."""
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    except (AttributeError, OSError, TypeError):
        return


class NoLoader:
    """Stands where upstream keeps its validation loader."""

    dataset: tuple[()] = ()

    def close(self) -> None: ...
    def reset(self) -> None: ...


def thread_count() -> int:
    """CPU threads for this process: OMP_NUM_THREADS, else what the container may use."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else max(1, min(8, len(os.sched_getaffinity(0))))


def without_device_ids(wrapper: Any) -> Callable[..., Any]:
    def wrap(module: nn.Module, device_ids: Any = None, **more: Any) -> Any:
        return wrapper(module, **more)

    return wrap
