"""How long a step waits for images, and what of their preparation could explain it.

The bound. Whatever reading or a transform costs, it holds the run back only as far as the step waits for it: with
loader processes preparation runs beside the step. So a cause of this family explains at most the wait, and of a part
that takes x seconds a batch, shared by w processes, at most x / w. On a GPU the wait counts only while the
device has nothing left to do: the host may wait for images while earlier steps are still computed.
"""

import math
from dataclasses import dataclass

from kfp_gate.diagnosis.hypotheses.crowding import READING, crowding, loader_lag, wait_of
from kfp_gate.diagnosis.measured.observations import Loading, Observations, RankSeen
from kfp_gate.diagnosis.measured.quantities import Unknown

TRANSFORM = "transform:"

SATURATED = (0.6, 0.85)
"""Busy share of the loader processes below which more of them bring nothing, and above which they are the limit."""

SMALL_FILE = 256 << 10
"""Bytes below which reading a file is mostly the way to it."""

MOST = 64
"""Loader processes beyond which no number is proposed."""


@dataclass(frozen=True)
class Feeding:
    """The wait of the run and the preparation behind it. Seconds a step.

    Attributes:
        rank: the rank that stands for all: the middle one, so that a single slow rank is judged as such.
        wait: that the step waited, or in which it prepared images itself (without loader processes).
        workers: loader processes of this rank; None is unknown.
        loading: parts of preparation.
        crowding: what preparation takes longer because this run's own processes, or its quota, keep it off the cores: a
            factor. The rest of its stretching is others' doing, and does not end when something here changes.
    """

    rank: RankSeen
    wait: float
    workers: int | None
    loading: Loading | Unknown
    crowding: float = 1.0

    @property
    def hands(self) -> int:
        """Processes that prepare."""
        return max(1, self.workers or 0)

    @property
    def busy(self) -> float | None:
        """Share of the loader processes' time that preparation fills."""
        if not self.workers or isinstance(self.loading, Unknown) or not self.rank.step_s:
            return None
        return min(1.0, self.loading.wall / (self.workers * self.rank.step_s))

    @property
    def rest(self) -> float:
        """What a step takes without the wait."""
        return max(0.0, self.rank.step_s - self.wait)

    def saved(self, seconds: float) -> float:
        """Seconds a step that could go at most if so many seconds of a batch's preparation went."""
        return min(self.wait, seconds / self.hands)

    def blocked(self, name: str) -> float | None:
        """Seconds a batch in which a part waited for something else than a core; None: unknown."""
        if isinstance(self.loading, Unknown):
            return None
        part = self.loading.parts.get(name)
        if part is None:
            return 0.0
        return max(0.0, part.wall - self.loading.stretch * part.cpu) if part.cpu is not None else None

    def work(self, name: str) -> float:
        """Seconds a batch of a part, without what this run's own crowding or its quota add to it."""
        assert isinstance(self.loading, Loading)
        part = self.loading.parts[name]
        return part.wall if part.cpu is None else max(part.cpu, part.wall / self.crowding)


def feeding(seen: Observations) -> Feeding | None:
    """None without steady steps."""
    if not seen.ranks:
        return None
    rank = sorted(seen.ranks, key=wait_of)[(len(seen.ranks) - 1) // 2]
    late = max(seen.ranks, key=wait_of)
    behind = loader_lag(late, [r for r in seen.ranks if r is not late])
    # What the last rank waits for a loader that is no slower than the others' is the wait of all.
    wait = wait_of(rank) if behind is None else max(wait_of(rank), wait_of(late) - behind)
    return Feeding(rank, wait, rank.workers, rank.loading, crowding(seen, rank))


@dataclass(frozen=True)
class Wanted:
    """How many loader processes it takes to keep up.

    Attributes:
        made: seconds of preparation a batch.
        each: cores that a process uses at work.
        possible: processes in all, with those for which cores are idle.
        workers: to try.
    """

    made: float
    each: float
    possible: int
    workers: int


def wanted(fed: Feeding, loading: Loading, idle: float) -> Wanted:
    """Processes that would make batches as fast as the rest of the step takes them, as far as cores are idle."""
    made = sum(fed.work(n) if n not in READING else p.wall for n, p in loading.parts.items())
    cpu, each = loading.cpu, 1.0
    if cpu is not None and loading.wall > 0:
        # Freed of the competition for a core it would use as much of one as its parts do; waiting uses none.
        each = max(0.1, min(1.0, cpu * loading.stretch / loading.wall))
    have = fed.workers or 0
    # More than the training would start are no advice.
    most = int(max(have, fed.rank.conditions.get("workers_most") or MOST))
    possible = min(have + int((idle + 0.25) / each), most)
    needed = math.ceil(made / fed.rest) if fed.rest > 1e-6 else possible
    return Wanted(made, each, possible, min(max(have + 1, min(needed, possible, MOST)), most))


def number(value: float) -> str:
    """Cores in a sentence.

    >>> number(0.25), number(1.75), number(127.8)
    ('0.25', '1.8', '128')
    """
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"


def processes(count: int) -> str:
    """A number of loader processes."""
    return f"{count} loader process{'es' if count != 1 else ''}"


def shown(name: str) -> str:
    """A part as a sentence names it.

    >>> shown("transform:Mosaic"), shown("decode")
    ('transform Mosaic', 'decoding')
    """
    if name.startswith(TRANSFORM):
        return f"transform {name.removeprefix(TRANSFORM)}"
    return {
        "open": "opening files", "read": "reading files", "decode": "decoding", "resize": "resizing",
        "labels": "reading labels", "collate": "collating", "other": "the rest of preparation",
    }.get(name, name)  # fmt: skip


def files_of(loading: Loading) -> float | None:
    """Files read for a batch."""
    part = loading.parts.get("read") or loading.parts.get("open")
    return part.calls if part is not None and part.calls else None
