"""Memory: pressure, growth towards a limit, copies in loader processes. Judged by `diagnosis.growth`."""

from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.growth import memory_findings
from kfp_gate.diagnosis.observations import Observations


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """The three causes; each exactly once."""
    return list(memory_findings(seen.run))
