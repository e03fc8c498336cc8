"""What the body of every component is wrapped in: its start, its end, and the exit code in between.

A step ends in one of three ways. It is done; it met an `InvalidInput` (exit code 2, the message alone, no
traceback); or it broke (exit code 1). Each leaves a tag in MLflow, from which `record_outcome` tells later
what happened (the backend hands an exit task neither the step nor the error), and, where
`KFP_GATE_EVENTS` names a file, one JSON line that `kfp-gate run` shows in the terminal.
"""

import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kfp_gate.errors import Broken, KfpGateError

EVENTS_VARIABLE = "KFP_GATE_EVENTS"
RUN_ID_VARIABLE = "KFP_GATE_RUN_ID"


def run_id() -> str:
    """The pipeline run's id: a pod label on a cluster, set by the command line locally; "" when unknown."""
    return os.environ.get(RUN_ID_VARIABLE, "")


@contextmanager
def step(name: str, *, tracking_uri: str = "", experiment: str = "") -> Iterator[dict[str, Any]]:
    """Run a component's body; yields a dict whose content is told with the step's end.

    Args:
        name: the component's name.
        tracking_uri: the MLflow server for the step's tags; empty: the environment's, if any.
        experiment: the MLflow experiment.

    Raises:
        SystemExit: the body raised; the code is 2 for `InvalidInput` and 1 for everything else.
    """
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    result: dict[str, Any] = {}

    def tell(state: str, message: str = "", **more: Any) -> None:
        _event(name, state, **({"message": message} if message else {}), **more)
        if run_id() and (tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
            from kfp_gate.registry import step_tags

            step_tags.leave(name, state, message, run_id=run_id(), tracking_uri=tracking_uri, experiment=experiment)

    tell("started")
    try:
        yield result
    except KfpGateError as error:
        failure = error
    except Exception as error:
        traceback.print_exc()
        failure = Broken(
            f"{type(error).__name__}: {error}", expected="the step to end", where=name,
            next_step="read the traceback above; if your input is sound, report it",
        )  # fmt: skip
    else:
        tell("done", result=result)
        return
    print(f"\n{name} {'refused its input' if failure.exit_code == 2 else 'broke'}\n{failure}", flush=True)  # noqa: T201  # a step's log is its stdout
    tell("failed", str(failure), exit_code=failure.exit_code)
    raise SystemExit(failure.exit_code)


def _event(name: str, state: str, **more: Any) -> None:
    target = os.environ.get(EVENTS_VARIABLE)
    if not target:
        return
    line = json.dumps({"step": name, "state": state, "time": time.time(), **more}, default=str)
    with Path(target).open("a", encoding="utf-8") as events:
        events.write(line + "\n")
