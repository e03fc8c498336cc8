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
        """Seconds a batch of a part, without what this run's own crowding or its quota add to it."""
        assert isinstance(self.loading, Loading)
        part = self.loading.parts[name]
        return part.wall if part.cpu is None else max(part.cpu, part.wall / self.crowding)


def feeding(seen: Observations) -> Feeding | None:
    """None without steady steps."""
    if not seen.ranks:
        return None
    rank = sorted(seen.ranks, key=wait_of)[(len(seen.ranks) - 1) // 2]
    return Feeding(rank, wait_of(rank), rank.workers, rank.loading, _crowding(seen, rank))


def _crowding(seen: Observations, rank: RankSeen) -> float:
    if isinstance(rank.loading, Unknown):
        return 1.0
    stretch = rank.loading.stretch
    held = quota_lost(seen)
    own = own_share(seen, rank) if crowd(seen, rank) >= CROWDED else 0.0
    by_quota = 1 / (1 - held) if held is not None and held < 1 else 1.0
    return max(1.0, min(stretch, max(by_quota, 1 + (stretch - 1) * own)))


CROWDED = 1.2
"""Processes of this run that want a core at the same time, for each core, from which they get into each other's way."""


def crowd(seen: Observations, rank: RankSeen) -> float:
    """Processes of this run that want a core at the same time, for each core; 0 if that cannot be told."""
    if seen.cores is None or not rank.workers or not rank.step_s:
        return 0.0
    return (active(rank) + computing_share(seen, rank)) * seen.ranks_on_node / seen.cores


def active(rank: RankSeen) -> float:
    """Loader processes of a rank that compute at the same time, on average, or want to."""
    if isinstance(rank.loading, Unknown) or not rank.step_s:
        return 0.0
    wanted = sum(p.wall for n, p in rank.loading.parts.items() if n not in READING and (p.cpu is None or p.cpu > 0))
    blocked = sum(
        max(0.0, p.wall - rank.loading.stretch * p.cpu)
        for n, p in rank.loading.parts.items() if n not in READING and p.cpu
    )  # fmt: skip
    return min((wanted - blocked) / rank.step_s, float(rank.workers or 0))


def computing_share(seen: Observations, rank: RankSeen) -> float:
    """Share of a step in which the main thread wants a core."""
    if seen.cuda is not False:
        return 1.0
    return 1 - min(1.0, wait_of(rank) / rank.step_s) if rank.step_s else 0.0


def own_share(seen: Observations, rank: RankSeen) -> float:
    """Of the cores that the main threads do not use, the share that this run's loader processes use.

    The rest is idle or used by others on the machine, whom fewer loader processes would not drive away.
    """
    loaders, main = known(rank.loaders), known(rank.cpu)
    if loaders is None or main is None or seen.cores is None:
        return 1.0
    others = max(0.0, seen.cores - (main + loaders) * seen.ranks_on_node)
    used = loaders * seen.ranks_on_node
    return used / (used + others) if used + others > 0 else 1.0


def cores_used(seen: Observations) -> float | None:
    """Cores that this run's processes use on the node of its first rank; None: unknown."""
    if seen.first is None:
        return None
    own = [r for r in seen.ranks if r.node == seen.first.node]
    used = 0.0
    for rank in own:
        main = known(rank.cpu)
        if main is None:
            return None
        used += main + (known(rank.loaders) or 0.0)
    # Ranks of the node of which nothing is known use what the others use.
    return used * seen.ranks_on_node / len(own) if len(own) < seen.ranks_on_node else used


def quota_lost(seen: Observations) -> float | None:
    """Share of the time that processes wanted a core in which the container's quota kept them off; None: unknown.

    A process that may run r of every second and stands s of it has lost s / (r + s) of what it wanted. With several
    processes both are sums over the cores, and the share stays.
    """
    first, used = seen.first, cores_used(seen)
    held = known(first.throttled) if first is not None else None
    if first is None or used is None or held is None:
        return None
    quota = first.conditions.get("cpu_quota")
    if quota and held >= HELD:
        # What others in the container use counts against the same quota.
        used = max(used, 0.9 * float(quota))
    return held / (used + held) if used + held > 0 else 0.0


HELD = 0.01
"""Seconds a second of throttling below which the quota did nothing."""


def wait_of(rank: RankSeen) -> float:
    """Seconds a step that a rank really waits for images."""
    host = rank.phase(DATA)
    if rank.device is None:
        return host
    # The device's clock stands in `data` from the end of what was queued to the next batch: then it starves.
    return min(host, rank.device.get(DATA, host))


def idle_cores(seen: Observations) -> float | None:
    """Cores that this run's processes leave free on their node; None: unknown."""
    used = cores_used(seen)
    return max(0.0, seen.cores - used) if seen.cores is not None and used is not None else None


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
