"""What a pipeline fixes when it is compiled and a launch needs when it runs: image of the ranks, volumes, Secret.

KFP takes no parameter for them, so that the pipeline leaves them in the environment of the step.
"""

import os
from collections.abc import Mapping
from typing import Any

from kfp_gate.launching.options import LaunchOptions

WORKER_IMAGE, MOUNTS, SECRET = "KFP_GATE_WORKER_IMAGE", "KFP_GATE_MOUNTS", "KFP_GATE_SECRET"  # a name


def step_options(environ: Mapping[str, str] | None = None, **parameters: Any) -> LaunchOptions:
    """Launch options from a step's parameters and from what its pipeline left in the environment.

    Args:
        environ: the step's environment; None: this process's.
        parameters: fields of `LaunchOptions`; an empty `worker_image` is the one that the pipeline was compiled for.

    Raises:
        InvalidInput: with all fields that do not fit.
    """
    env = os.environ if environ is None else environ
    claims = dict(mount.split(":", 1) for mount in env.get(MOUNTS, "").split(",") if mount)
    found: dict[str, Any] = {"claims": claims, "secrets": (env[SECRET],) if env.get(SECRET) else ()}
    image = parameters.pop("worker_image", "") or env.get(WORKER_IMAGE, "")
    return LaunchOptions(**found, **parameters, worker_image=image)
