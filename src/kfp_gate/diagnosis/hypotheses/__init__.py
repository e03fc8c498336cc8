"""Every cause, judged from a run's observations: what speaks for it and against it, and what to look at next."""

from kfp_gate.diagnosis.findings import CAUSES, Finding, Unjudged
from kfp_gate.diagnosis.hypotheses import container, device, epochs, loading, memory, progress, ranks, workers
from kfp_gate.diagnosis.measured.observations import Observations

FAMILIES = (loading, workers, container, device, ranks, epochs, progress, memory)


def judge(seen: Observations) -> tuple[Finding | Unjudged, ...]:
    """One judgement for each of `findings.CAUSES`, the heaviest first and the unjudged last."""
    found = {j.cause: j for family in FAMILIES for j in family.judge(seen)}
    order = list(CAUSES)
    return tuple(sorted((found[c] for c in order if c in found), key=lambda j: (_weight(j), order.index(j.cause))))


def _weight(judgement: Finding | Unjudged) -> float:
    return -judgement.weight if isinstance(judgement, Finding) else 1.0
