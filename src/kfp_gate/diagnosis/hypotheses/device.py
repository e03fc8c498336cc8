"""The device: copies to it, launches, its clock, and whether it simply computes.

On a GPU the host only queues work, so host times of forward and backward say how long queueing took. What the device
did is known from its own clock (events between the phases), from NVML's utilisation (share of time in which any
kernel ran, an upper bound of work), and from a profile window (the union of its kernels).
"""

from kfp_gate.diagnosis.amounts import cores, duration, rate, share, size
from kfp_gate.diagnosis.findings import BAR, Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.ranks import waits_for_others
from kfp_gate.diagnosis.measured.observations import Observations, RankSeen
from kfp_gate.diagnosis.measured.quantities import Unknown, known, reason
from kfp_gate.diagnosis.measured.steady import COMPUTE, DATA, OPTIMIZER, TRANSFER

CAUSES = ("transfer", "kernel_launch", "gpu_throttling")
NO_GPU = "this run used no GPU"
QUEUES = ("forward", "backward")
QUICK, LEVEL = 0.5, 0.8
"""Host time of queueing over device time of the work: below the first the host is ahead, above the second maybe not."""

SATURATED = 0.8
"""Cores of the busiest thread from which it has no time left."""

NEAR_LINK = 10e9
"""Bytes a second that are near what PCIe carries."""

SMALL_KERNEL = 20e-6
"""Seconds of a kernel below which launching it costs about as much as running it."""


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Transfer, launches, throttling, and health."""
    first = seen.first
    if first is None:
        return [Unjudged(c, ("no steady steps",)) for c in (*CAUSES, "device_busy")]
    if seen.cuda is not True:
        why = NO_GPU if seen.cuda is False else "the device: not recorded"
        moved = _transfer(seen, first) if seen.cuda is False else Unjudged("transfer", (why,))
        return [moved, *(Unjudged(c, (why,)) for c in CAUSES[1:]), _busy(seen, first)]
    return [_transfer(seen, first), _launch(seen, first), _throttling(seen, first), _busy(seen, first)]


def device_busy_share(rank: RankSeen) -> float | None:
    """Share of a step in which the device had work queued, by its own clock; None without one, or on a CPU.

    Gaps between small kernels are inside: it is an upper bound.
    """
    if not rank.cuda or rank.device is None:
        return None
    whole = sum(rank.device.values())
    return 1 - rank.device.get(DATA, 0.0) / whole if whole > 0 else None


def kernel_share(seen: Observations, rank: RankSeen) -> tuple[float | None, str]:
    """Share of a step in which kernels ran, and where it is known from."""
    profile = seen.profile
    busy, steps, step = profile.get("device_busy_s"), profile.get("steps"), profile.get("step_s")
    around = profile.get("around_s") or step
    if busy is not None and steps and around:
        # The profiler slows the host and not the kernels: compared with the steps around it.
        return min(1.0, busy / steps / around), "the kernels of the profile window"
    util = known(rank.gpu.util) if not isinstance(rank.gpu, Unknown) else None
    return util, "NVML's utilisation"


def _transfer(seen: Observations, rank: RankSeen) -> Finding | Unjudged:
    if rank.cuda and rank.device is None:
        return Unjudged("transfer", ("the device's clock: not recorded",))
    seconds = rank.device.get(TRANSFER, 0.0) if rank.device is not None else rank.phase(TRANSFER)
    weight = seen.share(seconds)
    moved, pinned = known(rank.bytes), rank.conditions.get("pin_memory")
    clock = "on its clock" if rank.device is not None else "on the host's clock"
    evidence = [
        f"moving and converting a batch takes {duration(seconds)} of a step of {duration(rank.step_s)}, {clock}"
    ]
    against = []
    if moved and seconds > 0:
        evidence.append(f"{size(moved)} a step move at {rate(moved / seconds)}")
        if moved / seconds > NEAR_LINK:
            against.append("that is near what PCIe carries: fewer bytes would help, not pinning")
    if pinned is False and rank.cuda:
        evidence.append("the batches are not in pinned memory: each copy goes through a buffer, and the host waits")
    elif pinned is True:
        against.append("the batches are in pinned memory")
    host = rank.phase(TRANSFER)
    if rank.device is not None and host > 1.5 * seconds and host >= 0.02 * rank.step_s:
        against.append(f"the host stands {duration(host)} in the copy: mostly waiting for earlier work of the device")
    missing = () if pinned is not None else ("pinned memory: not recorded",)
    return Finding(
        "transfer", f"{share(weight)} of the time goes to moving batches to the device", weight, tuple(evidence),
        tuple(against), next_check="a profile window (profile_steps=20): look at the copies and their bytes",
        refuted_by="copies that overlap with kernels in the trace", missing=missing,
        detail={"advice": _transfer_advice(rank, seconds, moved), "seconds": seconds, "bytes": moved,
                "pin_memory": pinned},
    )  # fmt: skip


def _transfer_advice(rank: RankSeen, seconds: float, moved: float | None) -> str:
    batch, side = rank.conditions.get("rank_batch"), rank.conditions.get("image_size")
    if rank.cuda and rank.conditions.get("pin_memory") is False:
        return "Pin the batches' memory and copy without blocking"
    if not moved or not batch or not side or moved > 1.5 * 3 * batch * side**2:
        return "Move 8-bit images and convert them on the device"
    if not rank.cuda:
        return "Look at what converts the batch: on a CPU there is nowhere to move it"
    if seconds > 0 and moved / seconds > NEAR_LINK:
        return "Train on smaller images: they are moved as 8 bits already"
    return "Have the GPU's link looked at (`nvidia-smi -q`, Link Width): the images are moved as 8 bits already"


def queueing_share(rank: RankSeen) -> float | None:
    """Host time of forward and backward over the device's: near 1 the host may be the slower; None without its clock.

    In these phases the host has no reason to wait for the device; in the loss and the optimizer it may.
    """
    if rank.device is None:
        return None
    work = sum(rank.device.get(p, 0.0) for p in QUEUES)
    return rank.phase(*QUEUES) / work if work > 0 else None


def _launch(seen: Observations, rank: RankSeen) -> Finding | Unjudged:
    kernels, source = kernel_share(seen, rank)
    queues, profiled = queueing_share(rank), seen.profile.get("device_busy_s") is not None
    if rank.step_s <= 0:
        return Unjudged("kernel_launch", ("time of the steps",))
    if queues is not None and queues <= QUICK and not profiled:
        host = duration(rank.phase(*QUEUES))
        return Finding(
            "kernel_launch", "the host queues work faster than the GPU gets through it", 0.0,
            against=(f"forward and backward are queued in {host}, {share(queues)} of the device's time for them",),
            next_check="none needed while the host is so far ahead",
            refuted_by="gaps between the kernels of a profile window", detail={"queueing": queues},
        )  # fmt: skip
    no_profile = "kernels: no profile window in this run (profile_steps=20)"
    if kernels is None:
        why = rank.gpu.reason if isinstance(rank.gpu, Unknown) else reason(rank.gpu.util)
        return Unjudged("kernel_launch", (f"utilisation of the GPU: {why}", no_profile))
    starved = (rank.device or {}).get(DATA, rank.phase(DATA)) / rank.step_s
    copied = (rank.device or {}).get(TRANSFER, rank.phase(TRANSFER)) / rank.step_s
    gaps = max(0.0, 1 - kernels - starved - copied)
    queueing = rank.phase(*COMPUTE, OPTIMIZER) / rank.step_s
    thread = known(rank.thread)
    # Gaps are the host's only as far as the host is queueing in them.
    gaps = min(gaps, queueing)
    evidence, against = [], []
    evidence.append(f"kernels run {share(kernels)} of the time ({source}), waiting for images and copies take "
                    f"{share(starved + copied)}: {share(gaps)} is gaps while the host queues")  # fmt: skip
    if thread is not None:
        if thread >= SATURATED:
            evidence.append(f"the busiest thread of the process uses {cores(thread)}: Python cannot queue faster")
        else:
            against.append(f"the busiest thread uses only {cores(thread)}: the host waits for something else")
            gaps *= thread / SATURATED
    count, steps, busy = seen.profile.get("kernels"), seen.profile.get("steps"), seen.profile.get("device_busy_s")
    if count and steps and busy:
        each = busy / count
        (evidence if each <= 2 * SMALL_KERNEL else against).append(
            f"{count / steps:,.0f} kernels a step of {duration(each)} each"
        )
    weight = seen.share(gaps * rank.step_s)
    if not profiled and weight < BAR and queues is not None and queues >= LEVEL:
        # Utilisation counts any kernel in its period, small ones with gaps between them as well.
        return Unjudged(
            "kernel_launch", (f"{no_profile}: the host takes as long to queue forward and backward as the device for "
                              "them, and utilisation does not tell which of them waits",),
        )  # fmt: skip
    batch = rank.conditions.get("rank_batch")
    return Finding(
        "kernel_launch", f"{share(weight)} of the time the GPU waits for its next kernel", weight, tuple(evidence),
        tuple(against),
        next_check="the same run with twice the batch: it must take far less than twice as long; or a profile window "
        "(profile_steps=20), which counts kernels and gaps",
        refuted_by="steps that grow with the batch, or kernels without gaps in the trace",
        missing=() if count else ("number and length of kernels: no profile window in this run",),
        detail={"advice": "Try a larger batch" + (f" than {batch:.0f} a rank" if batch else "")
                + ", or compile the model (fewer and larger kernels)",
                "kernel_share": kernels, "source": source, "gaps": gaps, "thread": thread},
    )  # fmt: skip


def _throttling(seen: Observations, rank: RankSeen) -> Finding | Unjudged:
    gpu = rank.gpu
    if isinstance(gpu, Unknown):
        return Unjudged("gpu_throttling", (f"readings of the GPU: {gpu.reason}",))
    if isinstance(gpu.slowed, Unknown):
        return Unjudged("gpu_throttling", (f"reasons of its clocks: {gpu.slowed.reason}",))
    often = max(gpu.slowed.values(), default=0.0)
    if not gpu.slowed:
        return Finding(
            "gpu_throttling", "the GPU never slowed down for heat or power", 0.0,
            against=("no sample shows a reason that slows it",),
            next_check="none needed",
            refuted_by="clocks below the usual ones for this device", detail={"reasons": {}},
        )  # fmt: skip
    heat = any("thermal" in n or n.startswith("hw_") for n in gpu.slowed)
    slow, top = known(gpu.clock_slowed), known(gpu.top_clock)
    if heat:
        # At its power limit a GPU at full work never reaches the board's highest clock; heat is measured by it.
        top = max(top or 0.0, known(gpu.board_clock) or 0.0) or None
    if slow is None or not top:
        why = reason(gpu.clock_slowed) or reason(gpu.top_clock)
        return Unjudged("gpu_throttling", (f"the clock that the GPU would have: {why}",))
    deficit = max(0.0, 1 - slow / top)
    names = ", ".join(f"{n.replace('_', ' ')} {share(s)}" for n, s in sorted(gpu.slowed.items(), key=lambda p: -p[1]))
    busy = device_busy_share(rank)
    weight = seen.share(often * deficit * rank.step_s * (busy if busy is not None else 1.0))
    evidence = [f"in {share(often)} of the samples the GPU slows itself down ({names})",
                f"its clock is then {slow:,.0f} MHz, without that up to {top:,.0f} MHz"]  # fmt: skip
    against = []
    if deficit < 0.1:
        against.append("its clock hardly drops: a GPU at full work often touches its power limit")
    return Finding(
        "gpu_throttling",
        f"{share(weight)} of the time is lost to a GPU that slows itself down, {share(often)} of the time to "
        f"{slow / top:.0%} of its clock", weight, tuple(evidence), tuple(against),
        next_check="`nvidia-smi -q -d TEMPERATURE,POWER,CLOCK` on the node while it runs: temperature and limit",
        refuted_by="a clock that stays low while temperature and draw are low",
        detail={"advice": "Have the node's cooling and the GPU's power limit looked at" if heat
                else "Have the GPU's power limit looked at", "reasons": dict(gpu.slowed), "clock_mhz": slow,
                "top_mhz": top},
    )  # fmt: skip


def _busy(seen: Observations, rank: RankSeen) -> Finding:
    """Health: how much of the time is computing."""
    evidence, against, missing = [], [], []
    if seen.cuda:
        clock = device_busy_share(rank)
        kernels, source = kernel_share(seen, rank)
        known_ones = [s for s in (clock, kernels) if s is not None]
        of_step = min(known_ones, default=rank.computing / rank.step_s if rank.step_s else 0.0)
        if rank.step_s:
            # Waiting for other ranks is a kernel as well.
            of_step = max(0.0, of_step - waits_for_others(seen, rank) / rank.step_s)
        if clock is not None:
            evidence.append(f"the device has work {share(clock)} of a step, by its own clock")
        if kernels is not None:
            evidence.append(f"kernels run {share(kernels)} of the time ({source})")
        else:
            missing.append(
                "utilisation: " + (rank.gpu.reason if isinstance(rank.gpu, Unknown) else reason(rank.gpu.util))
            )
        if not known_ones:
            missing.append("the device's clock: what the host queued stands in for it")
    else:
        waits = waits_for_others(seen, rank)
        of_step = max(0.0, rank.computing - waits) / rank.step_s if rank.step_s else 0.0
        evidence.append(f"forward, loss, backward and optimizer take {share(of_step)} of a step on the CPU")
        if waits >= 0.02 * rank.step_s:
            evidence.append(f"without the {duration(waits)} a step that rank {rank.rank} waits in backward for others")
    weight = seen.share(of_step * rank.step_s)
    if weight < 0.5:
        against.append("more than half of the time is something else")
    return Finding(
        "device_busy", f"{share(weight)} of the time is computing", weight, tuple(evidence), tuple(against),
        next_check="a larger batch, lower precision or a smaller model change this; nothing around it does",
        refuted_by="a faster step on images held in memory (probe_steps)", missing=tuple(missing),
        detail={"share_of_step": of_step},
    )  # fmt: skip
