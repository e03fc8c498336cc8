"""The cluster that the training job will run on, among the other findings."""

from collections.abc import Sequence

from kfp_gate.launching.options import LaunchOptions
from kfp_gate.preflight.checks import Check
from kfp_gate.preflight.request import PreflightRequest


def cluster_checks(request: PreflightRequest, options: LaunchOptions) -> Sequence[Check]:
    """What `kfp-gate doctor` finds; nothing for a training that runs in the step itself.

    Raises:
        InvalidInput, Unavailable: there is no cluster to ask, or it does not answer.
    """
    if options.backend == "processes" or request.model_uri:
        return []
    from kfp_gate.launching.doctor import doctor

    return [Check(f.level, f.what, f.why, f.cure) for f in doctor(options, tracking_uri=request.tracking_uri)]
