"""Too few or too many loader processes."""

import math

from kfp_gate.diagnosis.amounts import cores, duration, share
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.feeding import (
    CROWDED,
    READING,
    SATURATED,
    Feeding,
    active,
    crowd,
    feeding,
    idle_cores,
    own_share,
)
from kfp_gate.diagnosis.hypotheses.loading import NEARLY, blocked_seconds, outlier
from kfp_gate.diagnosis.observations import Loading, Observations
from kfp_gate.diagnosis.quantities import Unknown, known, reason


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
    if missing or fed.workers is None or idle is None or isinstance(fed.loading, Unknown):
        return Unjudged("too_few_workers", tuple(missing))
    made = sum(fed.work(n) if n not in READING else p.wall for n, p in fed.loading.parts.items())
    each = _cores_each(fed, fed.loading)
    possible = fed.workers + int((idle + 0.25) / each)
    needed = math.ceil(made / fed.rest) if fed.rest > 0 else possible
    wanted = max(fed.workers + 1, min(needed, possible))
    gained = max(0.0, fed.wait - max(0.0, made / wanted - fed.rest)) if possible > fed.workers else 0.0
    busy = fed.busy
    if busy is not None:
        low, high = SATURATED
        gained *= min(1.0, max(0.0, (busy - low) / (high - low)))
    # Processes that wait for storage, or for one transform that stands out, are not too few: they are held up.
    reads, opens = blocked_seconds(fed)
    held = fed.saved((reads or 0.0) + (opens or 0.0) + outlier(fed)[1])
    weight = seen.share(max(0.0, gained - held))
    evidence: list[str] = []
    against: list[str] = []
    none = fed.workers == 0
    if none:
        evidence.append(f"there are no loader processes: each step prepares its images itself, {duration(fed.wait)}")
    elif busy is not None:
        (evidence if busy >= SATURATED[1] else against).append(
            f"the {fed.workers} loader process{'es are' if fed.workers > 1 else ' is'} busy {share(busy)} of the time"
        )
    (evidence if possible > fed.workers else against).append(
        f"of {cores(seen.cores)} this run leaves {cores(idle)} idle; a loader process uses {cores(each)}"
    )
    if fed.loading.ready is not None:
        (evidence if fed.loading.ready < 0.5 else against).append(
            f"{fed.loading.ready:.1f} batches are ready when one is asked for"
        )
    if held > 0.5 * fed.wait:
        against.append(
            "preparation is held up by something else first: see slow reads and the transform that stands out"
        )
    pressure = known(fed.rank.pressure["cpu"])
    if pressure is not None and pressure >= 0.5:
        against.append(f"some task waits for a core {share(pressure)} of the time: others may use the idle cores")
    have = (
        "no loader process prepares"
        if none
        else f"{fed.workers} loader process{'es' if fed.workers > 1 else ''} cannot keep up"
    )
    return Finding(
        "too_few_workers", f"{share(waits)} of the time waits for images, since {have} while {cores(idle)} are idle",
        weight, tuple(evidence), tuple(against),
        next_check=f"a short run with workers={wanted}: the wait for images must shrink to about "
        f"{duration(max(0.0, fed.wait - gained))} a step",
        refuted_by="the same wait with more loader processes",
        detail={"advice": f"Try workers={wanted}", "workers": fed.workers, "wanted": wanted, "wait_s": fed.wait,
                "busy": busy, "idle_cores": idle, "ready": fed.loading.ready},
    )  # fmt: skip


def _cores_each(fed: Feeding, loading: Loading) -> float:
    """Cores that one loader process uses while it works; those that wait for files use little."""
    cpu = loading.cpu
    if cpu is None or loading.wall <= 0:
        return 1.0
    # Freed of the competition for a core it would use as much of one as its parts do.
    return max(0.1, min(1.0, cpu * loading.stretch / loading.wall))


def _too_many(seen: Observations, fed: Feeding) -> Finding | Unjudged:
    cause = "too_many_workers"
    if fed.workers is None or seen.cores is None:
        lacking = "loader processes: their number" if fed.workers is None else "cores: how many this run may use"
        return Unjudged(cause, (f"{lacking} was not recorded",))
    processes = (fed.workers + 1) * seen.ranks_on_node
    plain = f"{processes} processes on {cores(seen.cores)}"
    if not fed.workers or processes <= seen.cores:
        return Finding(
            cause, f"{plain}: there is a core for each", 0.0, against=(plain,), next_check="none needed",
            refuted_by="fewer cores than processes", detail={"workers": fed.workers, "cores": seen.cores},
        )  # fmt: skip
    if isinstance(fed.loading, Unknown):
        return Unjudged(cause, (f"parts of loading: {fed.loading.reason}",))
    crowded, stretch, lost = crowd(seen, fed.rank), fed.loading.stretch, _lost(seen, fed)
    own = own_share(seen, fed.rank)
    waited = fed.saved(fed.loading.wall * (1 - 1 / stretch)) if stretch > 1 else 0.0
    held = max(waited, (lost or 0.0) * fed.rank.step_s)
    weight = seen.share(held * own) if crowded >= CROWDED else 0.0
    evidence, against = [plain], list[str]()
    (evidence if crowded >= CROWDED else against).append(
        f"on average {active(fed.rank):.1f} loader processes and the step itself want a core at the same time"
    )
    (evidence if stretch >= 1.3 else against).append(f"preparation takes {stretch:.1f} times the CPU seconds it uses")
    if lost is not None:
        (evidence if lost >= 0.1 else against).append(
            f"the computing of the step is off a core {share(lost)} of the time"
        )
    pressure = known(fed.rank.pressure["cpu"])
    if pressure is not None:
        (evidence if pressure >= 0.3 else against).append(f"some task waits for a core {share(pressure)} of the time")
    fewer = max(1, int(seen.cores / seen.ranks_on_node) - 1)
    return Finding(
        cause, f"{share(weight)} of the time is lost to {plain}", weight, tuple(evidence), tuple(against),
        next_check=f"a short run with workers={fewer}: steps must get faster, though fewer processes prepare",
        refuted_by=f"steps as slow, or slower, with workers={fewer}",
        missing=() if lost is not None else (f"how long the step waits for a core: {reason(fed.rank.queued)}",),
        detail={"advice": f"Try workers={fewer}", "workers": fed.workers, "wanted": fewer, "cores": seen.cores,
                "active": active(fed.rank), "stretch": stretch, "lost": lost, "wait_s": fed.wait},
    )  # fmt: skip


def _lost(seen: Observations, fed: Feeding) -> float | None:
    """Share of the time in which the main thread could run and got no core, apart from the quota; None: unknown."""
    queued = known(fed.rank.queued)
    if queued is not None:
        return max(0.0, queued - min(known(fed.rank.throttled) or 0.0, queued))
    thread = known(fed.rank.thread)
    if seen.cuda is not False or thread is None or not fed.rank.step_s or len(seen.ranks) > 1:
        # Ranks wait for each other inside backward, off the core; a GPU is waited for as well.
        return None
    return max(0.0, fed.rest / fed.rank.step_s - thread)
