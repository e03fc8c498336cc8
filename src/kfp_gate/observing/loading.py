"""What making a batch costs, by parts, in whichever process makes it: the sums travel inside the batch.

    class Cones:                                        # a data set of your own; any framework's loader
        def __getitem__(self, index):
            raw = loading.read_file(self.paths[index])  # parts "open" and "read", and the bytes
            with loading.PARTS.during("decode"):
                image = decode(raw)
            ...

    loader = DataLoader(TimedItems(Cones()), collate_fn=TimedCollate(collate), num_workers=4)
    for batch in loader:
        batch, made = unwrap(batch)                     # made.parts: {"open": [wall_s, cpu_s, calls], ...}

Loader processes need no file and no pipe of their own for it, and what was made ahead of time is counted with the
batch that it went into. Imports no framework.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kfp_gate.observing import loader_profile
from kfp_gate.observing.parts import Parts, add

OPEN, READ, COLLATE, OTHER = "open", "read", "collate", "other"

PARTS = Parts()
"""The timer of this process's loading."""

KEY = "kfp_gate_made"
"""Where the sums lie in a batch that is a dictionary."""

_bytes = 0


@dataclass(frozen=True)
class Made:
    """The making of one batch: `[wall_s, cpu_s, calls]` by part, and the bytes that were read from files; `profile` is
    its functions', while a profile window is open (`kfp_gate.observing.loader_profile`)."""

    parts: dict[str, list[float]] = field(default_factory=dict)
    bytes: int = 0
    profile: str = ""


@dataclass(frozen=True)
class Loaded:
    """A batch that is no dictionary, with its making."""

    batch: Any
    made: Made

    def pin_memory(self) -> "Loaded":
        """What torch's loader asks for where it pins memory."""
        from torch.utils.data._utils.pin_memory import pin_memory

        return Loaded(pin_memory(self.batch), self.made)


class TimedItems:
    """A data set whose items are made in parts; everything else is the data set's own."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        with PARTS.during(OTHER):
            return self.items[index]

    def __getitems__(self, indexes: Sequence[Any]) -> list[Any]:
        """One batch's items; torch's loader prefers this."""
        begin()
        many = getattr(self.items, "__getitems__", None)
        if many is None:
            return [self[i] for i in indexes]
        with PARTS.during(OTHER):
            return list(many(indexes))

    def __getattr__(self, name: str) -> Any:
        if name == "items" or name.startswith("__"):
            # Not there yet while it is unpickled in a loader process.
            raise AttributeError(name)
        return getattr(self.items, name)


class TimedCollate:
    """A collate function that hands the sums on with the batch."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self.collate = collate

    def __call__(self, samples: Any) -> Any:
        with PARTS.during(COLLATE):
            batch = self.collate(samples)
        made = take()
        if isinstance(batch, dict):
            batch[KEY] = made
            return batch
        return Loaded(batch, made)


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a file; opening and reading are parts of their own, since small files on a share cost the first.

    Raises:
        OSError: as `open` does.
    """
    with PARTS.during(OPEN):
        handle = open(path, "rb", buffering=0)  # noqa: PTH123, SIM115  # closed below; any path
    with handle, PARTS.during(READ):
        found = handle.readall()
    count_bytes(len(found))
    return found


def count_bytes(count: int) -> None:
    """Count bytes that were read from files."""
    global _bytes
    _bytes += count


def begin() -> None:
    """Forget what was counted: a batch begins."""
    take()
    loader_profile.begin()


def take() -> Made:
    """What was counted since the last call."""
    global _bytes
    profile = loader_profile.end()
    sums: dict[str, list[float]] = {}
    add(sums, PARTS.take())
    parts = {n: [round(w, 7), round(c, 7), k] for n, (w, c, k) in sums.items()}
    made, _bytes = Made(parts, _bytes, profile), 0
    return made


def unwrap(batch: Any) -> tuple[Any, Made | None]:
    """A batch as its collate function made it, and its making; None if nobody kept it."""
    if isinstance(batch, Loaded):
        return batch.batch, batch.made
    if isinstance(batch, dict):
        # Only where it is there: a dictionary of somebody's own may not let anything be taken out.
        return batch, batch.pop(KEY) if KEY in batch else None
    return batch, None


def batches_ready(iterator: Any) -> int | None:
    """Batches that wait in torch's loader; None without loader processes, or where it cannot be told.

    Zero again and again is a loader that cannot keep up; always full is a loader that waits for the training.
    """
    queue = getattr(iterator, "_data_queue", None)
    if queue is None:
        return None
    workers = getattr(iterator, "_worker_result_queue", queue)
    try:
        ready = queue.qsize() + (workers.qsize() if workers is not queue else 0)
        # Those that came before their turn.
        return int(ready + sum(len(task) > 1 for task in list(iterator._task_info.values())))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        return None
