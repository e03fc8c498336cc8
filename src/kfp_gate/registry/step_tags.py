"""What each step leaves on the pipeline's MLflow run, so that the exit handler can tell what happened.

The KFP backend gives an exit task neither the failed step nor its error, and a pod that was killed can say nothing
any more: a step that started and never ended is the one that broke. One tag per step, JSON:

    kfp_gate.step.launch_training = {"state": "failed", "time": 1766000000.0, "message": "found: ..."}

Readers must tolerate further keys.
"""

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp_gate.errors import KfpGateError, hide_secrets
from kfp_gate.registry.pipeline_run import PIPELINE, find_runs, parent_run
from kfp_gate.registry.tracking import Tracking, connect

log = logging.getLogger(__name__)

PREFIX = "kfp_gate.step."
PATIENCE = 3.0
"""Seconds: a step must not wait long for a server that only keeps its diary."""

MESSAGE_LIMIT = 4000
"""MLflow keeps 8000 characters of a tag; JSON may need two for one."""


@dataclass(frozen=True)
class StepTag:
    """What one step left. `state` is `started`, `done` or `failed`; `time` in seconds since 1970."""

    step: str
    state: str
    time: float
    message: str = ""


def started(step: str, **where: str) -> bool:
    """Say that a step started; see `leave`."""
    return leave(step, "started", **where)


def done(step: str, **where: str) -> bool:
    """Say that a step ended well; see `leave`."""
    return leave(step, "done", **where)


def failed(step: str, message: str, **where: str) -> bool:
    """Say that a step failed, and why; see `leave`."""
    return leave(step, "failed", message, **where)


def leave(
    step: str, state: str, message: str = "", *, run_id: str, tracking_uri: str = "", experiment: str = ""
) -> bool:
    """Leave a step's tag on the pipeline's run. Best effort: it never raises for a server's sake.

    Args:
        step: the component's name.
        state: `started`, `done` or `failed`.
        message: for `failed`, the error as text; cut to 4000 characters.
        run_id: the pipeline run's id.
        tracking_uri, experiment: as for `tracking.connect`.

    Returns:
        Whether the tag was written. If not, one warning says why.
    """
    value = json.dumps(
        {"state": state, "time": time.time(), "message": hide_secrets(message)[:MESSAGE_LIMIT]}, ensure_ascii=False
    )
    try:
        tracking = connect(tracking_uri, experiment=experiment, patience=PATIENCE)
        run = parent_run(tracking, run_id)
        tracking.call("leaving the step's tag", tracking.client.set_tag, run, PREFIX + step, value)
    except KfpGateError as error:
        log.warning("step %s goes on without leaving its tag in MLflow: %s", step, error.found)
        return False
    return True


def read(tracking: Tracking, run_id: str) -> list[StepTag]:
    """The tags of all steps of a pipeline run, in the order of their times.

    Tags of runs made twice by accident are read together; of two tags for one step the later one counts.
    """
    latest: dict[str, StepTag] = {}
    for run in find_runs(tracking, run_id, PIPELINE):
        for tag in _parse(run.data.tags):
            if tag.step not in latest or tag.time >= latest[tag.step].time:
                latest[tag.step] = tag
    return sorted(latest.values(), key=lambda tag: tag.time)


def _parse(tags: Mapping[str, str]) -> list[StepTag]:
    found = []
    for key, text in tags.items():
        if not key.startswith(PREFIX):
            continue
        try:
            value: dict[str, Any] = json.loads(text)
            tag = StepTag(
                key.removeprefix(PREFIX), str(value["state"]), float(value["time"]), str(value.get("message", ""))
            )
        except (ValueError, KeyError, TypeError):
            log.warning("tag %s is not one that a step leaves: %.80r", key, text)
            continue
        found.append(tag)
    return found
