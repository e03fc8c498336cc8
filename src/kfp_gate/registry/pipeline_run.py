"""The MLflow run that stands for a whole pipeline run, found by a tag that every step knows beforehand.

Steps run on different pods, in any order, some at the same time, and the exit task may take no step's output. So
the run is found by the pipeline run's id. Where the KFP backend opened runs of its own (`MLFLOW_RUN_ID`), theirs
is adopted. MLflow has no "create if absent": two steps that start at once may each make a run. None is removed while
steps still write to it; readers read all of them, and the exit handler, when all is over, makes one of them.
"""

import logging
from typing import Any

from kfp_gate.registry.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Tracking, quoted

log = logging.getLogger(__name__)

PARENT_TAG = "mlflow.parentRunId"
NOTE_TAG = "mlflow.note.content"
WRITTEN_LAST = frozenset({"kfp_gate.verdict_id", "kfp_gate.registered"})
"""Tags of a gate's or registration's run that was really used."""

PIPELINE, TRAINING, GATE, REGISTRATION = "pipeline", "training", "gate", "registration"


def parent_run(tracking: Tracking, run_id: str) -> str:
    """The id of the MLflow run of pipeline run `run_id`; it is made if there is none.

    Raises:
        InvalidInput, Unavailable, Broken: see `Tracking.call`.
    """
    if tracking.address.injected_run:
        return _adopt(tracking, run_id)
    found = find_runs(tracking, run_id, PIPELINE)
    if found:
        return str(found[0].info.run_id)
    tracking.call(
        "opening the pipeline's run", tracking.client.create_run, tracking.experiment_id,
        run_name=f"pipeline {run_id}", tags={PIPELINE_RUN_TAG: run_id, ROLE_TAG: PIPELINE},
    )  # fmt: skip
    return str(find_runs(tracking, run_id, PIPELINE)[0].info.run_id)


def merge_parents(tracking: Tracking, run_id: str) -> str:
    """Make one run of those that stand for pipeline run `run_id`: tags and children move to the first one.

    Only for the exit handler, when no step writes any more.

    Returns:
        The id of the run that stays.
    """
    kept = parent_run(tracking, run_id)
    client = tracking.client
    doubled = [run for run in find_runs(tracking, run_id, PIPELINE) if run.info.run_id != kept]
    for run in doubled:
        there = client.get_run(kept).data.tags
        for key, value in run.data.tags.items():
            if key.startswith("kfp_gate.") and key not in there:
                tracking.call("moving tags of a doubled run", client.set_tag, kept, key, value)
        children = tracking.call(
            "looking for children of a doubled run", client.search_runs, [tracking.experiment_id],
            f"tags.`{PARENT_TAG}` = {quoted(run.info.run_id)}",
        )  # fmt: skip
        for child in children:
            tracking.call("moving a child of a doubled run", client.set_tag, child.info.run_id, PARENT_TAG, kept)
        tracking.call("removing a doubled run", client.delete_run, run.info.run_id)
    for role in (GATE, REGISTRATION):
        for run in find_runs(tracking, run_id, role)[1:]:
            if not run.data.metrics and not [key for key in run.data.tags if key in WRITTEN_LAST]:
                tracking.call("removing an empty run", client.delete_run, run.info.run_id)
    return kept


def child_run(tracking: Tracking, run_id: str, role: str, name: str) -> str:
    """The id of the run for one role of pipeline run `run_id`, below the parent; a retry finds the first one's."""
    found = find_runs(tracking, run_id, role)
    if found:
        return str(found[0].info.run_id)
    parent = parent_run(tracking, run_id)
    tags = {PIPELINE_RUN_TAG: run_id, ROLE_TAG: role, PARENT_TAG: parent}
    tracking.call(
        f"opening the run for {role}", tracking.client.create_run, tracking.experiment_id, run_name=name, tags=tags
    )
    # If the first request's answer was lost there are two: all use the first one.
    return str(find_runs(tracking, run_id, role)[0].info.run_id)


def find_runs(tracking: Tracking, run_id: str, role: str) -> list[Any]:
    """MLflow runs of one role of a pipeline run, the one made first at the head."""
    runs = tracking.call(
        "looking for the pipeline's run", tracking.client.search_runs, [tracking.experiment_id],
        f"tags.`{PIPELINE_RUN_TAG}` = {quoted(run_id)} and tags.`{ROLE_TAG}` = {quoted(role)}", max_results=100,
    )  # fmt: skip
    return sorted(runs, key=lambda run: (run.info.start_time, run.info.run_id))


def _adopt(tracking: Tracking, run_id: str) -> str:
    """The run that KFP opened for the pipeline: the injected one, or, if that stands for one task, its parent."""
    injected = tracking.call("reading the run that KFP opened", tracking.client.get_run, tracking.address.injected_run)
    parent = str(injected.data.tags.get(PARENT_TAG) or injected.info.run_id)
    if not find_runs(tracking, run_id, PIPELINE):
        for key, value in {PIPELINE_RUN_TAG: run_id, ROLE_TAG: PIPELINE}.items():
            tracking.call("marking the run that KFP opened", tracking.client.set_tag, parent, key, value)
    return parent
