"""Who takes the cores: this run's own processes, its quota, or others on the machine."""

from collections.abc import Sequence
from statistics import median

from kfp_gate.diagnosis.measured.observations import Observations, RankSeen
from kfp_gate.diagnosis.measured.quantities import Unknown, known
from kfp_gate.diagnosis.measured.steady import DATA

READING = ("open", "read")

CROWDED = 1.2
"""Processes of this run that want a core at the same time, for each core, from which they get into each other's way."""

HELD = 0.01
"""Seconds a second of throttling below which the quota did nothing."""


def wait_of(rank: RankSeen) -> float:
    """Seconds a step that a rank really waits for images."""
    host = rank.phase(DATA)
    if rank.device is None:
        return host
    # The device's clock stands in `data` from the end of what was queued to the next batch: then it starves.
    return min(host, rank.device.get(DATA, host))


def loader_lag(late: RankSeen, others: Sequence[RankSeen]) -> float | None:
    """Seconds a step by which a rank's loader processes are slower than the others'; None: it has none, or unknown.

    Of ranks whose loaders are equally slow some rank is last, by chance and for long: while the others wait for it in
    backward their loaders get ahead, and they hardly wait for images any more. What a batch takes tells, no wait does.
    """
    paces = [_loader_pace(r) for r in (late, *others)]
    known_ones = [p for p in paces if p is not None]
    if not others or len(known_ones) < len(paces):
        return None
    return max(0.0, known_ones[0] - median(known_ones[1:]))


def _loader_pace(rank: RankSeen) -> float | None:
    """Seconds that the loader processes of a rank together need for a batch."""
    if not rank.workers or isinstance(rank.loading, Unknown):
        return None
    return rank.loading.wall / rank.workers


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


def idle_cores(seen: Observations) -> float | None:
    """Cores that this run's processes leave free on their node; None: unknown."""
    used = cores_used(seen)
    return max(0.0, seen.cores - used) if seen.cores is not None and used is not None else None


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


def active(rank: RankSeen) -> float:
    """Loader processes of a rank that compute at the same time, on average, or want to."""
    if isinstance(rank.loading, Unknown) or not rank.step_s:
        return 0.0
    parts = [(p.wall, p.cpu) for n, p in rank.loading.parts.items() if n not in READING and p.cpu is not None]
    computing = sum(min(wall, rank.loading.stretch * cpu) for wall, cpu in parts)
    return min(computing / rank.step_s, float(rank.workers or 0))


def crowd(seen: Observations, rank: RankSeen) -> float:
    """Processes of this run that want a core at the same time, for each core; 0 if that cannot be told."""
    if seen.cores is None or not rank.workers or not rank.step_s:
        return 0.0
    main = 1.0 if seen.cuda is not False else 1 - min(1.0, wait_of(rank) / rank.step_s)
    return (active(rank) + main) * seen.ranks_on_node / seen.cores


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


def crowding(seen: Observations, rank: RankSeen) -> float:
    """What preparation takes longer for this run's own crowding and its quota: a factor."""
    if isinstance(rank.loading, Unknown):
        return 1.0
    stretch, held = rank.loading.stretch, quota_lost(seen)
    own = own_share(seen, rank) if crowd(seen, rank) >= CROWDED else 0.0
    by_quota = 1 / (1 - held) if held is not None and held < 1 else 1.0
    return max(1.0, min(stretch, max(by_quota, 1 + (stretch - 1) * own)))


def core_lost(seen: Observations, rank: RankSeen) -> float | None:
    """Share of the time in which the main thread could run and got no core, apart from the quota; None: unknown."""
    queued = known(rank.queued)
    if queued is not None:
        return max(0.0, queued - (known(rank.throttled) or 0.0))
    thread = known(rank.thread)
    if seen.cuda is not False or thread is None or not rank.step_s or len(seen.ranks) > 1:
        # Ranks wait for each other inside backward, off the core; a GPU is waited for as well.
        return None
    return max(0.0, 1 - wait_of(rank) / rank.step_s - thread)


def robbed(seen: Observations, rank: RankSeen) -> float:
    """Seconds a step in which the main thread waits for a core that loader processes of this run use."""
    if crowd(seen, rank) < CROWDED:
        return 0.0
    return (core_lost(seen, rank) or 0.0) * own_share(seen, rank) * rank.step_s


def without_crowd(seen: Observations, rank: RankSeen) -> float | None:
    """Seconds that a step would take if loader processes left a core to each rank; None: unknown.

    From the CPU seconds of the work: fewer processes do not make it less, the cores need what they need. So a crowd
    costs something only as far as cores stand idle in spite of it. What others on the machine take stays.
    """
    main = known(rank.cpu)
    if isinstance(rank.loading, Unknown) or main is None or seen.cores is None or not rank.step_s:
        return None
    making = rank.loading.cpu
    if making is None:
        return None
    on_core = main * rank.step_s
    # A device goes on at its own pace; what its host lost to loader processes comes back.
    computing = on_core if seen.cuda is False else rank.step_s - wait_of(rank) - robbed(seen, rank)
    alone = max(computing, making / fewer(seen), (making + on_core) * seen.ranks_on_node / seen.cores)
    foreign = 1 + (rank.loading.stretch - 1) * (1 - own_share(seen, rank))
    return alone * foreign


def fewer(seen: Observations) -> int:
    """Loader processes of a rank that leave a core to the rank itself."""
    return max(1, int((seen.cores or 1) / seen.ranks_on_node) - 1)
