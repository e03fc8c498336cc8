"""Whose job it is: the Argo Workflow of the step that launches, never the step's own pod.

A finished step's pod may be deleted while its job is still wanted by a retry; the Workflow lives as long as the run.
"""

import os
from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.api import Api, Away, Refused

WORKFLOWS = "/apis/argoproj.io/v1alpha1/namespaces"
QUICK_SECONDS = 0.4


def find_owner(api: Api, namespace: str) -> dict[str, Any] | None:
    """The owner reference to give to the job; None outside a pipeline step."""
    reference = _workflow(_own_pod(api, namespace))
    if reference is None:
        return None
    return {
        "apiVersion": reference["apiVersion"],
        "kind": "Workflow",
        "name": reference["name"],
        "uid": reference["uid"],
        # True would need a permission on the Workflow's finalizers where owners are enforced.
        "blockOwnerDeletion": False,
    }


def find_run_id(api: Api, namespace: str) -> str:
    """The pipeline run's id: from the environment, else from the label of the step's own pod.

    Raises:
        InvalidInput: neither is there. Without it a retried launcher could not find its job.
    """
    if run_id := os.environ.get("KFP_GATE_RUN_ID", ""):
        return run_id
    pod = _own_pod(api, namespace)
    if pod and (run_id := (pod.get("metadata", {}).get("labels") or {}).get("pipeline/runid", "")):
        return str(run_id)
    raise InvalidInput(
        "no run id", expected="KFP_GATE_RUN_ID, or a pod with the label pipeline/runid", where="environment",
        next_step="set KFP_GATE_RUN_ID to a name of this run; the same name finds the same job again",
    )  # fmt: skip


def terminated_by_user(api: Api, namespace: str) -> bool:
    """Whether the pipeline run was terminated, asked in a hurry: False when there is no quick answer."""
    try:
        name = os.environ.get("KFP_POD_NAME", "")
        if not name:
            return False
        pod = api.once("GET", f"/api/v1/namespaces/{namespace}/pods/{name}", read_seconds=QUICK_SECONDS)
        reference = _workflow(pod)
        if reference is None:
            return False
        workflow = api.once("GET", f"{WORKFLOWS}/{namespace}/workflows/{reference['name']}", read_seconds=QUICK_SECONDS)
    except (Refused, Away):
        return False
    spec = workflow.get("spec") or {}
    return spec.get("activeDeadlineSeconds") == 0 or spec.get("shutdown") in ("Terminate", "Stop")


def _own_pod(api: Api, namespace: str) -> dict[str, Any] | None:
    name = os.environ.get("KFP_POD_NAME", "")
    if not name:
        return None
    try:
        return api.find(f"/api/v1/namespaces/{namespace}/pods/{name}")
    except Refused:
        return None


def _workflow(pod: dict[str, Any] | None) -> dict[str, Any] | None:
    for reference in (pod or {}).get("metadata", {}).get("ownerReferences") or ():
        if reference.get("kind") == "Workflow" and str(reference.get("apiVersion", "")).startswith("argoproj.io/"):
            return dict(reference)
    return None
