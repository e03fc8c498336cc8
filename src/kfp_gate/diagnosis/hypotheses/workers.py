"""Too few or too many loader processes."""

from kfp_gate.diagnosis.amounts import cores, duration, share
from kfp_gate.diagnosis.findings import BAR, Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.crowding import (
    CROWDED,
    active,
    core_lost,
    crowd,
    fewer,
    idle_cores,
    own_share,
    robbed,
    without_crowd,
)
from kfp_gate.diagnosis.hypotheses.feeding import SATURATED, Feeding, feeding, number, processes, wanted
from kfp_gate.diagnosis.hypotheses.loading import NEARLY, blocked_seconds, outlier
from kfp_gate.diagnosis.measured.observations import Observations
from kfp_gate.diagnosis.measured.quantities import Unknown, known, reason


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Both hypotheses."""
    fed = feeding(seen)
    if fed is None:
        return [Unjudged(c, ("no steady steps",)) for c in ("too_few_workers", "too_many_workers")]
    return [_too_few(seen, fed), _too_many(seen, fed)]


def _too_few(seen: Observations, fed: Feeding) -> Finding | Unjudged:
    idle = idle_cores(seen)
    waits = seen.share(fed.wait)
    if waits < NEARLY:
        return Finding(
            "too_few_workers", f"nothing waits for images ({duration(fed.wait)} a step)", 0.0,
            against=(f"a step waits {share(waits)} of the time for images",),
            next_check="none needed while the wait is this short", refuted_by="a step that waits longer for images",
            detail={"workers": fed.workers, "wait_s": fed.wait, "idle_cores": idle},
        )  # fmt: skip
    missing = []
    if fed.workers is None:
        missing.append("loader processes: their number was not recorded")
    if idle is None:
        missing.append("cores: " + (reason(fed.rank.cpu) or "how many this run may use was not recorded"))
    if isinstance(fed.loading, Unknown):
        missing.append(f"parts of loading: {fed.loading.reason}")
    if fed.workers is None or idle is None or isinstance(fed.loading, Unknown):
        return Unjudged("too_few_workers", tuple(missing))
    want = wanted(fed, fed.loading, idle / seen.ranks_on_node)
    gained = max(0.0, fed.wait - max(0.0, want.made / want.workers - fed.rest)) if want.possible > fed.workers else 0.0
    busy = fed.busy
    if busy is not None:
        low, high = SATURATED
        gained *= min(1.0, max(0.0, (busy - low) / (high - low)))
    # Processes that wait for storage, or for one transform that stands out, are not too few: they are held up.
    reads, opens = blocked_seconds(fed)
    holding = [reads or 0.0, opens or 0.0, outlier(fed)[1]]
    held = fed.saved(sum(holding))
    if max(seen.share(fed.saved(seconds)) for seconds in holding) < BAR:
        # None of them is worth a name of its own: then it is the processes that lack.
        held = 0.0
    weight = seen.share(max(0.0, gained - held))
    evidence: list[str] = []
    against: list[str] = []
    if fed.workers == 0:
        evidence.append(f"there are no loader processes: each step prepares its images itself, {duration(fed.wait)}")
    elif busy is not None:
        (evidence if busy >= SATURATED[1] else against).append(
            f"{processes(fed.workers)} {'are' if fed.workers > 1 else 'is'} busy {share(busy)} of the time"
        )
    (evidence if want.possible > fed.workers else against).append(
        f"of {cores(seen.cores)} this run leaves {number(idle)} idle; a loader process uses {cores(want.each)}"
    )
    if fed.loading.ready is not None:
        (evidence if fed.loading.ready < 0.5 else against).append(
            f"{fed.loading.ready:.1f} batches are ready when one is asked for"
        )
    if held > 0.5 * fed.wait:
        against.append("preparation is held up by something else first: slow reads, or the transform that stands out")
    pressure = known(fed.rank.pressure["cpu"])
    if pressure is not None and pressure >= 0.5:
        against.append(f"some task waits for a core {share(pressure)} of the time: others may use the idle cores")
    have = "no loader process prepares them" if fed.workers == 0 else f"{processes(fed.workers)} cannot keep up"
    title = (
        f"{share(weight)} of the time waits for images, since {have}, with {number(idle)} of {cores(seen.cores)} idle"
        if weight >= NEARLY else f"more loader processes would bring {share(weight)} of the time"
    )  # fmt: skip
    return Finding(
        "too_few_workers", title, weight, tuple(evidence), tuple(against),
        next_check=f"a short run with workers={want.workers}: the wait must shrink from {duration(fed.wait)} to "
        f"{duration(max(0.0, fed.wait - gained))} a step, or nearly" if want.workers > fed.workers
        else f"none: a training on this node starts no more than {processes(fed.workers)}",
        refuted_by=f"a wait for images that is as long with workers={want.workers}",
        detail={"advice": f"Try workers={want.workers}", "workers": fed.workers, "wanted": want.workers,
                "wait_s": fed.wait, "busy": busy, "idle_cores": idle, "ready": fed.loading.ready},
    )  # fmt: skip


def _too_many(seen: Observations, fed: Feeding) -> Finding | Unjudged:
    cause, rank = "too_many_workers", fed.rank
    if fed.workers is None or seen.cores is None:
        lacking = "loader processes: their number" if fed.workers is None else "cores: how many this run may use"
        return Unjudged(cause, (f"{lacking} was not recorded",))
    count = (fed.workers + 1) * seen.ranks_on_node
    plain = f"{count} process{'es' if count > 1 else ''} on {cores(seen.cores)}"
    if not fed.workers or count <= seen.cores:
        return Finding(
            cause, f"{plain}: too many loader processes is not it", 0.0, against=(plain,), next_check="none needed",
            refuted_by="a quota or an affinity that leaves fewer cores than processes",
            detail={"workers": fed.workers, "cores": seen.cores},
        )  # fmt: skip
    if isinstance(fed.loading, Unknown):
        return Unjudged(cause, (f"parts of loading: {fed.loading.reason}",))
    crowded, stretch, lost = crowd(seen, rank), fed.loading.stretch, core_lost(seen, rank)
    own = own_share(seen, rank)
    late = fed.saved(fed.loading.wall * (1 - 1 / stretch)) * own if crowded >= CROWDED else 0.0
    few = fewer(seen)
    weight = seen.share(too_many_seconds(seen, fed, late))
    evidence, against = [plain], list[str]()
    (evidence if crowded >= CROWDED else against).append(
        f"on average {active(rank):.1f} loader processes and the step itself want a core at the same time"
    )
    (evidence if stretch >= 1.3 else against).append(f"preparation takes {stretch:.1f} times the CPU seconds it uses")
    if lost is not None:
        (evidence if lost >= 0.1 else against).append(
            f"the step's own thread waits {share(lost)} of the time for a core"
        )
    if own < 0.5:
        against.append(f"of the cores that the step leaves, its loader processes use {share(own)}")
    pressure = known(rank.pressure["cpu"])
    if pressure is not None:
        (evidence if pressure >= 0.3 else against).append(f"some task waits for a core {share(pressure)} of the time")
    better = without_crowd(seen, rank)
    if better is not None and better > 0.95 * rank.step_s:
        against.append(f"with {few} of them the cores would need {duration(better)} a step all the same")
    return Finding(
        cause, f"{share(weight)} of the time is lost to {plain}", weight, tuple(evidence), tuple(against),
        next_check=f"a short run with workers={few}: steps must get faster, though fewer processes prepare",
        refuted_by=f"steps as slow, or slower, with workers={few}",
        missing=() if lost is not None else (f"how long the step waits for a core: {reason(rank.queued)}",),
        detail={"advice": f"Try workers={few}", "workers": fed.workers, "wanted": few, "cores": seen.cores,
                "active": active(rank), "stretch": stretch, "lost": lost, "wait_s": fed.wait},
    )  # fmt: skip


def too_many_seconds(seen: Observations, fed: Feeding, late: float = 0.0) -> float:
    """Seconds a step that fewer loader processes would bring: what the crowd costs, less what the work itself needs."""
    if not fed.workers or seen.cores is None:
        return 0.0
    held = max(late, robbed(seen, fed.rank))
    better = without_crowd(seen, fed.rank)
    return min(held, max(0.0, fed.rank.step_s - better)) if better is not None else held
