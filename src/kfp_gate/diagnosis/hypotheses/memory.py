"""Memory: pressure, growth towards a limit, copies in loader processes. Judged by `diagnosis.memory.growth`."""

from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.measured.observations import Observations
from kfp_gate.diagnosis.memory.growth import memory_findings


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """The three causes; each exactly once."""
    return list(memory_findings(seen.run))
