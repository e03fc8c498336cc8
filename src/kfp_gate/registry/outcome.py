"""How a pipeline run ended, told once, in one place: `registered`, `refused`, or `broken` at a step.

The exit handler runs whatever happened. The KFP backend tells it a state and no more, and a refused model is a
*successful* run; so the answer comes from what the steps left on the pipeline's MLflow run (`step_tags`) and from the
gate's and the registration's own runs.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal
from urllib.parse import quote

from kfp_gate.errors import KfpGateError, hide_secrets
from kfp_gate.registry.pipeline_run import GATE, NOTE_TAG, REGISTRATION, find_runs, merge_parents
from kfp_gate.registry.step_tags import StepTag, read
from kfp_gate.registry.tracking import Tracking, connect
from kfp_gate.registry.webhook import notify

log = logging.getLogger(__name__)

PATIENCE = 30.0
"""Seconds to wait for the tracking server."""

SELF = "record_outcome"
STEPS = ("split_dataset", "preflight", "launch_training", "validation_gate", "register_model")
"""The order of the `gate` pipeline, for a run in which no tag says where it stopped."""

SUCCEEDED = frozenset({"SUCCEEDED", "COMPLETE", "CACHED"})
"""What the local runner and the backend call success."""

VERDICT_TAG, VERDICT_TEXT_TAG, REGISTERED_TAG = "kfp_gate.verdict", "kfp_gate.verdict_headline", "kfp_gate.registered"


@dataclass(frozen=True)
class RunOutcome:
    """How a pipeline run ended.

    Attributes:
        state: `registered`, `refused`, `broken`, or `passed` for a run that was not to register anything.
        step: for `broken`, the step that broke, or that did not start.
        reason: in words; the step's error, or the verdict's headline.
        model: for `registered`, the `models:/` URI.
        links: what to read: name to address.
    """

    state: Literal["registered", "refused", "broken", "passed"]
    step: str = ""
    reason: str = ""
    model: str = ""
    links: Mapping[str, str] | None = None

    @property
    def headline(self) -> str:
        """One line for tags, notes and messages."""
        at = f" at {self.step}" if self.step else ""
        what = f": {self.model}" if self.model else ""
        return f"{self.state}{at}{what}"


def record_outcome(
    *,
    run_id: str,
    tracking_uri: str = "",
    experiment: str = "",
    pipeline_state: str = "",
    pipeline_error: str = "",
    pipeline: str = "gate",
    links: Mapping[str, str] | None = None,
    webhook: bool = True,
    patience: float = PATIENCE,
) -> RunOutcome:
    """Find out how a pipeline run ended, and write it to the run in MLflow and to the webhook.

    Args:
        run_id: the pipeline run's id. The MLflow run is made if no step got that far.
        pipeline_state, pipeline_error: what KFP tells the exit task; may be empty.
        pipeline: name for messages.
        links: further addresses for the note, for instance of the run in the KFP UI.
        webhook: post to the address in `KFP_GATE_WEBHOOK`, if that is set.

    Raises:
        InvalidInput, Unavailable, Broken: the tracking server cannot be written to. The webhook was called all the
            same, with what is known.
    """
    try:
        tracking = connect(tracking_uri, experiment=experiment, patience=patience)
        # Read before doubled runs are merged: of two tags for one step the later one counts.
        outcome = find_outcome(tracking, run_id, pipeline_state, pipeline_error)
        parent = merge_parents(tracking, run_id)
        outcome = _with_links(tracking, run_id, outcome, parent, links)
        _write(tracking, parent, outcome)
    except KfpGateError as error:
        if webhook:
            state = "unknown" if pipeline_state in SUCCEEDED or not pipeline_state else "broken"
            notify({
                "text": f"kfp-gate {pipeline} {run_id}: {state}; the tracking server could not be asked: {error.found}",
                "run_id": run_id, "state": state,
            })  # fmt: skip
        raise
    if webhook:
        notify({
            "text": f"kfp-gate {pipeline} {run_id}: {outcome.headline}"
            + (f"\n{outcome.reason}" if outcome.reason else "")
            + "".join(f"\n{name}: {address}" for name, address in (outcome.links or {}).items()),
            "run_id": run_id, **{k: v for k, v in asdict(outcome).items() if v},
        })  # fmt: skip
    log.info("outcome of %s: %s", run_id, outcome.headline)
    return outcome


def find_outcome(tracking: Tracking, run_id: str, pipeline_state: str = "", pipeline_error: str = "") -> RunOutcome:
    """What the tags of a pipeline run say about its end; see `decide`."""
    facts: dict[str, str] = {}
    for role in (GATE, REGISTRATION):
        for run in find_runs(tracking, run_id, role):
            facts.update({k: v for k, v in run.data.tags.items() if k.startswith("kfp_gate.")})
    return decide(read(tracking, run_id), facts, pipeline_state, pipeline_error)


def decide(
    tags: Sequence[StepTag], facts: Mapping[str, str], pipeline_state: str = "", pipeline_error: str = ""
) -> RunOutcome:
    """The outcome, from the steps' tags in order of time and the tags of the gate's and registration's runs.

    A step that failed broke the run. So did one that started and never ended: it was killed. If no step did
    either and the pipeline failed all the same, the step after the last one that ended never came to run.
    """
    steps = [t for t in tags if t.step != SELF]
    for tag in steps:
        if tag.state == "failed":
            return RunOutcome("broken", tag.step, tag.message)
    for tag in steps:
        if tag.state == "started":
            return RunOutcome("broken", tag.step, "the step started and never ended: it was killed, or lost its node")
    if model := facts.get(REGISTERED_TAG):
        return RunOutcome("registered", model=model, reason=facts.get(VERDICT_TEXT_TAG, ""))
    failed = bool(pipeline_state) and pipeline_state not in SUCCEEDED
    verdict = facts.get(VERDICT_TAG, "")
    if verdict == "refused":
        return RunOutcome("refused", reason=facts.get(VERDICT_TEXT_TAG, ""))
    if verdict == "passed" and not failed:
        return RunOutcome("passed", reason=facts.get(VERDICT_TEXT_TAG, ""))
    if pipeline_state in SUCCEEDED:
        # The gate's record is best effort. A run that succeeded and did not come to register was refused.
        if any(tag.step == "register_model" for tag in steps):
            return RunOutcome("passed", reason=_UNRECORDED)
        return RunOutcome("refused", reason=_UNRECORDED)
    return RunOutcome("broken", _next_step({t.step for t in steps}), pipeline_error or _UNSTARTED)


_UNRECORDED = "the gate's verdict was not written to MLflow; it is in the step's artifacts"
_UNSTARTED = "the step left no trace: its pod did not start (image, quota, volume, node), or it could not reach MLflow"


def _next_step(ended: set[str]) -> str:
    """The step of the `gate` pipeline after the last one that ended. A step taken from the cache leaves no tag."""
    last = max((i for i, step in enumerate(STEPS) if step in ended), default=-1)
    return STEPS[min(last + 1, len(STEPS) - 1)]


def _with_links(
    tracking: Tracking, run_id: str, outcome: RunOutcome, parent: str, links: Mapping[str, str] | None
) -> RunOutcome:
    found = {name: hide_secrets(address) for name, address in (links or {}).items()}
    gates = find_runs(tracking, run_id, GATE)
    if tracking.address.is_server:
        pages = f"{tracking.where.rstrip('/')}/#"
        runs = f"{pages}/experiments/{tracking.experiment_id}/runs"
        found["MLflow run"] = f"{runs}/{parent}"
        if gates:
            found["verdict and report"] = f"{runs}/{gates[0].info.run_id}/artifacts"
        if outcome.model:
            name, _, number = outcome.model.removeprefix("models:/").rpartition("/")
            found["registered version"] = f"{pages}/models/{quote(name, safe='')}/versions/{number}"
    elif gates:
        found["verdict and report"] = str(gates[0].info.artifact_uri)
    return RunOutcome(outcome.state, outcome.step, hide_secrets(outcome.reason), outcome.model, found)


def _write(tracking: Tracking, parent: str, outcome: RunOutcome) -> None:
    tags = {
        "kfp_gate.outcome": outcome.state,
        "kfp_gate.outcome.step": outcome.step,
        "kfp_gate.outcome.reason": outcome.reason[:5000],
        "kfp_gate.outcome.model": outcome.model,
        NOTE_TAG: note(outcome),
    }
    for key, value in tags.items():
        if value:
            tracking.call("writing the outcome", tracking.client.set_tag, parent, key, value)
    status = "FAILED" if outcome.state == "broken" else "FINISHED"
    if not tracking.address.injected_run:  # a run that KFP opened is closed by KFP
        tracking.call("ending the pipeline's run", tracking.client.set_terminated, parent, status)


def note(outcome: RunOutcome) -> str:
    """The run's note in Markdown, at most 8000 characters."""
    lines = [f"**{outcome.headline}**"]
    if outcome.reason:
        # As code: an error message is not Markdown, and may quote what a user typed.
        reason = outcome.reason[:5000].replace("```", "'''")
        lines += ["", "```", reason, "```"]
    if outcome.links:
        lines += ["", *(f"- {name}: {address}" for name, address in outcome.links.items())]
    return "\n".join(lines)[:7900]


def as_json(outcome: RunOutcome) -> str:
    """The outcome as JSON, for a step's output."""
    values: dict[str, Any] = asdict(outcome)
    return json.dumps(values, ensure_ascii=False)
