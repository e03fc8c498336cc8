"""The answer to "what held this run back": every cause judged, ranked, and put into one sentence."""

from kfp_gate.diagnosis.answer import sentence
from kfp_gate.diagnosis.findings import BAR, HEALTH, Diagnosis, Finding, Unjudged
from kfp_gate.diagnosis.hypotheses import judge
from kfp_gate.diagnosis.hypotheses.feeding import feeding
from kfp_gate.diagnosis.measured.measuring import observe
from kfp_gate.diagnosis.measured.observations import GpuReadings, Observations
from kfp_gate.diagnosis.measured.quantities import Unknown
from kfp_gate.diagnosis.memory.growth import growth
from kfp_gate.diagnosis.pacing.counterfactual import Estimate, estimate, phase_shares
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.diagnosis.remarks import remarks

ENOUGH_STEPS = 10
"""Steady steps below which times say nothing."""

MOSTLY = 0.5
"""Share of a step below which computing is not most of it."""

LOADING = ("slow_reads", "small_files", "preparation_cpu", "too_few_workers")


def diagnose(run: Run) -> Diagnosis:
    """Judge a run; never fails for what a timeline says or lacks.

    Returns:
        state `cause`: at least one cause explains `BAR` of the time, or memory that reaches its limit. `no_cause`:
        all that could matter was judged and stays below. `not_enough`: too little was observed to say either.
    """
    seen = observe(run)
    judged = judge(seen)
    few = sum(r.steps for r in seen.ranks[:1]) < ENOUGH_STEPS
    faults = [j for j in judged if isinstance(j, Finding) and j.cause != HEALTH]
    if few:
        # Times of a handful of steps are no ground; memory and lost work do not rest on them.
        untimed = ("memory_growth", "memory_pressure", "forked_copies", "discarded_work")
        faults = [f for f in faults if f.cause in untimed]
    named = tuple(f for f in faults if f.weight >= BAR)
    lacking = _lacking(seen, judged, few)
    state = "cause" if named else "not_enough" if lacking else "no_cause"
    table = estimate(run)
    unjudged = [j for j in judged if isinstance(j, Unjudged)]
    if few:
        timed = [j for j in judged if isinstance(j, Finding) and j not in faults]
        unjudged += [Unjudged(j.cause, (_few(seen),)) for j in timed]
    return Diagnosis(
        where=run.where, state=state, answer=sentence(seen, state, named, judged, lacking), findings=named,
        minor=tuple(j for j in judged if isinstance(j, Finding) and j not in named and (not few or j in faults)),
        unjudged=tuple(unjudged), phases=phase_shares(run), epoch_s=table.epoch_s, scenarios=table.scenarios,
        growth=growth(run), running=run.running, conditions=dict(run.conditions),
        notes=(*run.notes, *remarks(seen), *_without_row(table)),
    )  # fmt: skip


def _without_row(table: Estimate) -> tuple[str, ...]:
    """What the table of changes does not say, and why: a row that is missing must not be read as "no gain"."""
    if table.epoch_s is None or not table.unknown:
        return ()
    return (f"changes that are not in the table, as their gain is unknown: {'; '.join(table.unknown)}",)


def _lacking(seen: Observations, judged: tuple[Finding | Unjudged, ...], few: bool) -> tuple[str, ...]:
    """What would have to be known before one may say that nothing holds the run back."""
    if few:
        return (_few(seen),)
    found = []
    unjudged = {j.cause: j for j in judged if isinstance(j, Unjudged)}
    fed = feeding(seen)
    explained = max((j.weight for j in judged if isinstance(j, Finding) and j.cause in LOADING), default=0.0)
    if fed is not None and seen.share(fed.wait) >= BAR > explained:
        missing = [m for c in LOADING if c in unjudged for m in unjudged[c].missing]
        found += missing or ["what the loader processes did meanwhile: they were not busy all the time"]
    if seen.cuda and "kernel_launch" in unjudged:
        # The device's clock has the gaps between small kernels inside: it cannot say that there are none.
        found += unjudged["kernel_launch"].missing
    if "gpu_throttling" in unjudged and _is_hot(seen):
        found += unjudged["gpu_throttling"].missing
    idle = "" if found else _unexplained(seen, judged)
    if idle:
        found += list(unjudged["kernel_launch"].missing) if seen.cuda and "kernel_launch" in unjudged else [idle]
    return tuple(dict.fromkeys(found))


def _is_hot(seen: Observations) -> bool:
    """Whether the GPU says that heat slows it, most of the time."""
    gpu = seen.first.gpu if seen.first is not None else None
    if not isinstance(gpu, GpuReadings) or isinstance(gpu.slowed, Unknown):
        return False
    return any(often >= MOSTLY for name, often in gpu.slowed.items() if "thermal" in name)


def _unexplained(seen: Observations, judged: tuple[Finding | Unjudged, ...]) -> str:
    """A run that mostly does something else than computing is not healthy, even if no cause stands out."""
    busy = next((j for j in judged if isinstance(j, Finding) and j.cause == HEALTH), None)
    if busy is None or float(busy.detail.get("share_of_step") or 0.0) >= MOSTLY:
        return ""
    if seen.cuda:
        return "what the GPU does in its gaps: a profile window (profile_steps=20) would tell"
    return "what the steps do besides computing: a profile window (profile_steps=20) would tell"


def _few(seen: Observations) -> str:
    steps, run = sum(r.steps for r in seen.ranks[:1]), seen.run
    failed = any(line["kind"] == "failure" for rank in run.ranks for line in run.last_attempt(rank))
    then = " before the run failed (how, is in the notes)" if failed else " yet" if run.running else ""
    if not steps:
        return f"steps after the warm-up: none was recorded{then}"
    return f"steps after the warm-up: only {steps} of the {ENOUGH_STEPS} that an answer needs{then}"
