"""How long a step waits for images, and what of their preparation could explain it.

The bound. Whatever reading or a transform costs, it holds the run back only as far as the step waits for it: with
loader processes preparation runs beside the step. So a cause of this family explains at most the wait, and of a part
that takes x seconds a batch, shared by w processes, at most x / w. On a GPU the wait counts only while the
device has nothing left to do: the host may wait for images while earlier steps are still computed.
"""

from dataclasses import dataclass

from kfp_gate.diagnosis.observations import Loading, Observations, Part, RankSeen
from kfp_gate.diagnosis.quantities import Unknown, known
from kfp_gate.diagnosis.steady import DATA

READING = ("open", "read")
TRANSFORM = "transform:"

SATURATED = (0.6, 0.85)
"""Busy share of the loader processes below which more of them bring nothing, and above which they are the limit."""

SMALL_FILE = 256 << 10
"""Bytes below which reading a file is mostly the way to it."""


@dataclass(frozen=True)
class Feeding:
    """The wait of the run and the preparation behind it. Seconds a step.

    Attributes:
        rank: the rank that stands for all: the middle one, so that a single slow rank is judged as such.
        wait: that the step waited, or in which it prepared images itself (without loader processes).
        workers: loader processes of this rank; None is unknown.
        loading: parts of preparation.
        busy: share of the loader processes' time that preparation fills.
    """

    rank: RankSeen
    wait: float
    workers: int | None
    loading: Loading | Unknown

    @property
    def hands(self) -> int:
        """Processes that prepare."""
        return max(1, self.workers or 0)

    @property
    def busy(self) -> float | None:
        if not self.workers or isinstance(self.loading, Unknown) or not self.rank.step_s:
            return None
        return min(1.0, self.loading.wall / (self.workers * self.rank.step_s))

    @property
    def rest(self) -> float:
        """What a step takes without the wait."""
        return max(0.0, self.rank.step_s - self.wait)

    def saved(self, seconds: float, hands: int | None = None) -> float:
        """Seconds a step that could go at most if so many seconds of a batch's preparation went."""
        return min(self.wait, seconds / (hands or self.hands))

    def blocked(self, name: str) -> float | None:
        """Seconds a batch in which a part waited for something else than a core; None: unknown."""
        if isinstance(self.loading, Unknown):
            return None
        part = self.loading.parts.get(name)
        if part is None:
            return 0.0
        return max(0.0, part.wall - self.loading.stretch * part.cpu) if part.cpu is not None else None

    def work(self, name: str) -> float:
        """Seconds a batch of a part without its waiting for a core."""
        assert isinstance(self.loading, Loading)
        part = self.loading.parts[name]
        if part.cpu is None:
            return part.wall
        return max(part.cpu, part.wall / self.loading.stretch)


def feeding(seen: Observations) -> Feeding | None:
    """None without steady steps."""
    if not seen.ranks:
        return None
    rank = sorted(seen.ranks, key=wait_of)[(len(seen.ranks) - 1) // 2]
    return Feeding(rank, wait_of(rank), rank.workers, rank.loading)


def wait_of(rank: RankSeen) -> float:
    """Seconds a step that a rank really waits for images."""
    host = rank.phase(DATA)
    if rank.device is None:
        return host
    # The device's clock stands in `data` from the end of what was queued to the next batch: then it starves.
    return min(host, rank.device.get(DATA, host))


def idle_cores(seen: Observations) -> float | None:
    """Cores that this run's processes leave free on their node; None: unknown."""
    if seen.cores is None or seen.first is None:
        return None
    own = [r for r in seen.ranks if r.node == seen.first.node]
    used = 0.0
    for rank in own:
        main = known(rank.cpu)
        if main is None:
            return None
        used += main + (known(rank.loaders) or 0.0)
    # Ranks of the node of which nothing is known use what the others use.
    if own and len(own) < seen.ranks_on_node:
        used *= seen.ranks_on_node / len(own)
    return max(0.0, seen.cores - used)


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
    part: Part | None = loading.parts.get("read") or loading.parts.get("open")
    return part.calls if part is not None and part.calls else None
