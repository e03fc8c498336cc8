"""`TrainingSpec` in, `Outcome` out, whatever the backend."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.outcome import Outcome


def launch(spec: Any, options: LaunchOptions, out: Path) -> Outcome:
    """Start the ranks, follow them to their end, and explain it.

    Args:
        spec: the `TrainingSpec` that every rank gets.
        options: backend and resources.
        out: the folder that receives rank 0's model after a success; replaced if it exists.

    Raises:
        InvalidInput: the backend cannot start what was asked for.
        Unavailable: the cluster did not answer, after retries.
    """
    text = spec_text(spec)
    if options.backend == "processes":
        from kfp_gate.launching.processes import run_processes

        return run_processes(text, options, out)
    from kfp_gate.launching.cluster import run_on_cluster

    return run_on_cluster(text, options, out)


def spec_text(spec: Any) -> str:
    """The specification as the JSON that the worker reads; equal specifications give equal text."""
    if isinstance(spec, str):
        return spec
    if hasattr(spec, "to_json"):
        return str(spec.to_json())
    return json.dumps(dataclasses.asdict(spec), sort_keys=True)
