"""Memory: pressure, growth towards a limit, copies in loader processes. Judged by `diagnosis.growth`."""

from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.observations import Observations

CAUSES = ("memory_pressure", "memory_growth", "forked_copies")


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """The three causes; each exactly once."""
    try:
        from kfp_gate.diagnosis.growth import memory_findings
    except ImportError:
        return [Unjudged(cause, ("memory: not judged by this version",)) for cause in CAUSES]
    return list(memory_findings(seen.run))
