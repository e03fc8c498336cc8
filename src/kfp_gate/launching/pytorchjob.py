"""Kubeflow Training Operator v1: the PyTorchJob with the same ranks."""

from typing import Any

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

GROUP = "/apis/kubeflow.org/v1"
CONTAINER = "pytorch"
"""The container that the operator gives its variables to."""


def manifest(request: JobRequest) -> dict[str, Any]:
    """The PyTorchJob for one attempt: rank 0 is the master, the others are workers."""
    options = request.options
    policy: dict[str, Any] = {
        # None keeps the failed pods; the launcher itself ends those that still run.
        "cleanPodPolicy": "None",
        "ttlSecondsAfterFinished": options.ttl_seconds,
        # Restarts are the launcher's: the operator would retry an out-of-memory kill for ever.
        "backoffLimit": 0,
    }
    replicas = {"Master": _replica(request, 1)}
    if options.nodes > 1:
        replicas["Worker"] = _replica(request, options.nodes - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": metadata(request),
        "spec": {"nprocPerNode": "1", "runPolicy": policy, "pytorchReplicaSpecs": replicas},
    }


def _replica(request: JobRequest, count: int) -> dict[str, Any]:
    options = request.options
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "volumes": volumes(options),
        "containers": [
            {
                "name": CONTAINER,
                "image": options.worker_image,
                "command": command(request),
                "env": environment(request),
                "resources": resources(options),
                "volumeMounts": mounts(options),
            }
        ],
    }
    if options.node_selector:
        pod["nodeSelector"] = options.node_selector
    if options.tolerations:
        pod["tolerations"] = list(options.tolerations)
    if options.service_account:
        pod["serviceAccountName"] = options.service_account
    if options.priority_class and not options.queue:
        pod["priorityClassName"] = options.priority_class
    return {
        "replicas": count,
        "restartPolicy": "Never",
        "template": {"metadata": {"labels": pod_labels(request)}, "spec": pod},
    }


def pod_selector(name: str) -> str:
    """The label selector of the ranks' pods."""
    return f"training.kubeflow.org/job-name={name}"


def rank_of(labels: dict[str, str], _options: LaunchOptions) -> int | None:
    """A pod's rank: 0 for the master, index + 1 for workers."""
    index = labels.get("training.kubeflow.org/replica-index", "")
    if not index.isdigit():
        return None
    return int(index) if labels.get("training.kubeflow.org/replica-type") == "master" else int(index) + 1
