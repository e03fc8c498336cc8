"""Kubeflow Trainer v2: the TrainJob for the installed release, and the runtime that keeps the evidence."""

from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.api import Api, Refused
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.worker_pod import (
    JobRequest,
    command,
    environment,
    metadata,
    mounts,
    pod_labels,
    resources,
    volumes,
)

GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
CRD = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/trainjobs.trainer.kubeflow.org"
OPENAPI = "/openapi/v3/apis/trainer.kubeflow.org/v1alpha1"
OVERRIDE_FIELDS = ("runtimePatches", "podTemplateOverrides", "podSpecOverrides")
"""The field that changes pods, newest release first: 2.2 and later, 2.1, 2.0."""

CONTAINER = "node"
"""The container that Trainer gives the PET_ variables to; any other name gets none."""

BACKSTOP_SECONDS = 600
"""The server's own deadline lies this much behind ours: it deletes the pods with all evidence."""


def spec_fields(api: Api) -> set[str]:
    """The names below `spec` that the installed TrainJob knows.

    Reads the CRD; where that is not allowed, the published schema, which every authenticated user may read.

    Raises:
        InvalidInput: no TrainJob of a known version is installed, or neither may be read.
        Unavailable: the server stays away.
    """
    try:
        crd = api.call("GET", CRD)
        for version in crd.get("spec", {}).get("versions", ()):
            if version.get("name") == "v1alpha1" and version.get("served"):
                return set(version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"])
        raise _not_installed("no served version v1alpha1")
    except Refused as refused:
        if refused.status == 404:
            raise _not_installed("no such CustomResourceDefinition") from None
    try:
        schemas = api.call("GET", OPENAPI).get("components", {}).get("schemas", {})
    except Refused as refused:
        raise _not_installed(str(refused)) from None
    for schema in schemas.values():
        kinds = [kind.get("kind") for kind in schema.get("x-kubernetes-group-version-kind", ())]
        if "TrainJob" in kinds:
            return set(schema["properties"]["spec"]["properties"])
    raise _not_installed("the API group has no TrainJob")


def override_field(fields: set[str]) -> str:
    """Which of the three override fields this release has.

    Raises:
        InvalidInput: none of them: a release this version does not know.
    """
    for field in OVERRIDE_FIELDS:
        if field in fields:
            return field
    raise _not_installed(f"a TrainJob with none of the fields {', '.join(OVERRIDE_FIELDS)}")


def manifest(request: JobRequest, fields: set[str]) -> dict[str, Any]:
    """The TrainJob for one attempt.

    Raises:
        InvalidInput: a setting that a TrainJob cannot carry.
    """
    options = request.options
    if options.priority_class and not options.queue:
        raise InvalidInput(
            f"priority_class={options.priority_class!r} without a queue",
            expected="a Kueue queue, which takes the class as a label", where="launch_training parameters",
            next_step=f"set queue, or put priorityClassName into the TrainingRuntime {options.runtime!r}",
        )  # fmt: skip
    spec: dict[str, Any] = {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org",
            "kind": "TrainingRuntime",  # the default is the cluster's, which restarts pods and loses their logs
            "name": options.runtime,
        },
        "trainer": {
            "image": options.worker_image,
            "command": command(request),
            "env": environment(request),
            "numNodes": options.nodes,
            "numProcPerNode": 1,
            "resourcesPerNode": resources(options),
        },
        override_field(fields): [_override(override_field(fields), request)],
    }
    if options.deadline_seconds and "activeDeadlineSeconds" in fields:
        spec["activeDeadlineSeconds"] = options.deadline_seconds + BACKSTOP_SECONDS
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": metadata(request),
        "spec": spec,
    }


def _override(field: str, request: JobRequest) -> dict[str, Any]:
    options = request.options
    pod: dict[str, Any] = {
        "volumes": volumes(options),
        "containers": [{"name": CONTAINER, "volumeMounts": mounts(options)}],
    }
    if options.node_selector:
        pod["nodeSelector"] = options.node_selector
    if options.tolerations:
        pod["tolerations"] = list(options.tolerations)
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    target = {"targetJobs": [{"name": "node"}]}
    if field == "podSpecOverrides":
        return target | pod  # release 2.0 has no place for pod labels; Trainer's own labels find the pods
    template = {"metadata": {"labels": pod_labels(request)}, "spec": pod}
    if field == "podTemplateOverrides":
        return target | template
    job = {"name": "node", "template": {"spec": {"template": template}}}
    return {
        "manager": "kfp-gate/launcher",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}},
    }


def runtime_manifest(name: str, namespace: str, *, ttl_seconds: int, image: str = "") -> dict[str, Any]:
    """The TrainingRuntime that a namespace needs: no restarts, so that a dead pod keeps its log and last state."""
    container: dict[str, Any] = {"name": CONTAINER, "image": image or "kfp-gate/worker"}
    pod = {
        "metadata": {"labels": {"app.kubernetes.io/managed-by": "kfp-gate"}},
        "spec": {"restartPolicy": "Never", "containers": [container]},
    }
    job = {
        "name": "node",
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": pod},
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app.kubernetes.io/managed-by": "kfp-gate"}},
        "spec": {
            "mlPolicy": {"numNodes": 1, "torch": {}},
            "template": {
                "spec": {
                    "ttlSecondsAfterFinished": ttl_seconds,
                    "failurePolicy": {"maxRestarts": 0},
                    "replicatedJobs": [job],
                }
            },
        },
    }


def pod_selector(name: str) -> str:
    """The label selector of the ranks' pods."""
    return f"jobset.sigs.k8s.io/jobset-name={name}"


def rank_of(labels: dict[str, str], _options: LaunchOptions) -> int | None:
    """A pod's rank: its index in the Indexed Job of the replicated job `node`; None for other pods."""
    if labels.get("jobset.sigs.k8s.io/replicatedjob-name") != "node":
        return None
    index = labels.get("batch.kubernetes.io/job-completion-index", "")
    return int(index) if index.isdigit() else None


def _not_installed(found: str) -> InvalidInput:
    return InvalidInput(
        f"no usable Kubeflow Trainer: {found}", expected="Kubeflow Trainer 2.0 or later", where="trainer.kubeflow.org",
        next_step="install Kubeflow Trainer (docs/cluster.md), or use backend='pytorchjob' or 'processes'",
    )  # fmt: skip
