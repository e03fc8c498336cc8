"""What every rank's pod needs, whichever kind of job makes it: command, environment, resources, volumes."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from kfp_gate.launching.options import LaunchOptions

SECRET_KEYS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL_S3",
    "AWS_REGION",
    "MLFLOW_TRACKING_URI",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "KFP_GATE_TRACKING_HOSTS",
)
"""What ranks read from a Secret: by reference, so that no value is ever in a manifest."""

DEFAULT_SECRET = "kfp-gate-credentials"  # noqa: S105  # the name of a Secret, not a secret
WORK = "/tmp/kfp-gate"  # noqa: S108  # inside the pod's own filesystem, which no other rank sees
LABEL_RUN = "kfp-gate/run"
LABEL_ATTEMPT = "kfp-gate/attempt"
NOTE_DIGEST = "kfp-gate/spec-digest"
NOTE_OUTCOME = "kfp-gate/outcome"
SHM = "kfp-gate-shm"


@dataclass(frozen=True)
class JobRequest:
    """One attempt at a training: what the manifests are rendered from."""

    name: str
    base: str
    attempt: int
    namespace: str
    spec: str
    options: LaunchOptions
    owner: dict[str, Any] | None = None

    @property
    def storage(self) -> str:
        """Where launcher and ranks of all attempts meet: inputs and delivered models."""
        return f"{self.options.checkpoint_uri.rstrip('/')}/launch/{self.base}"

    @property
    def delivery(self) -> str:
        """Below this rank 0 of this attempt puts its model and its record of the training."""
        return f"{self.storage}/{self.name}"

    def digest(self) -> str:
        """Identifies what is trained and how; the same for all attempts, whoever launches them."""
        irrelevant = ("say", "records", "pending_seconds", "max_restarts", "keep_failed", "run_id")
        fields = {f.name: getattr(self.options, f.name) for f in dataclasses.fields(self.options)}
        for name in irrelevant:
            del fields[name]
        text = json.dumps([fields, self.spec], sort_keys=True, default=list)
        return hashlib.sha256(text.encode()).hexdigest()


def base_name(run_id: str, task: str) -> str:
    """A job name from run and task: a DNS label, short enough for the host names that Kubernetes adds to it."""
    slug = "".join(c if c.isascii() and c.isalnum() else "-" for c in task.lower()).strip("-")[:12].rstrip("-")
    return f"kg-{slug or 'training'}-{hashlib.sha256(f'{run_id}/{task}'.encode()).hexdigest()[:12]}"


def attempt_name(base: str, attempt: int) -> str:
    """The first attempt bears the base name, successors `-a2`, `-a3`, ..."""
    return base if attempt == 1 else f"{base}-a{attempt}"


def metadata(request: JobRequest) -> dict[str, Any]:
    """Name, labels and annotations of a job; Kueue's labels if a queue is asked for."""
    labels = {LABEL_RUN: request.base, LABEL_ATTEMPT: str(request.attempt), "app.kubernetes.io/managed-by": "kfp-gate"}
    if request.options.queue:
        labels["kueue.x-k8s.io/queue-name"] = request.options.queue
        if request.options.priority_class:
            labels["kueue.x-k8s.io/priority-class"] = request.options.priority_class
    data: dict[str, Any] = {
        "name": request.name,
        "namespace": request.namespace,
        "labels": labels,
        "annotations": {NOTE_DIGEST: request.digest()},
    }
    if request.owner is not None:
        data["ownerReferences"] = [request.owner]
    return data


def pod_labels(request: JobRequest) -> dict[str, str]:
    """The labels that every rank's pod bears."""
    return {LABEL_RUN: request.base, LABEL_ATTEMPT: str(request.attempt)}


def command(request: JobRequest) -> list[str]:
    """The container's command: the wrapper, then the worker or the user's own command."""
    worker = request.options.command or (
        "python", "-m", "kfp_gate.training.worker", "--spec", "{spec}", "--out", "{out}",
    )  # fmt: skip
    wrapper = ["python", "-m", "kfp_gate.launching.rank", "--work", WORK, "--deliver", request.delivery]
    if request.options.heartbeat_bound_seconds and request.options.command:
        wrapper += [
            "--heartbeat",
            request.options.checkpoint_uri,
            "--heartbeat-bound",
            str(request.options.heartbeat_bound_seconds),
        ]
    return [*wrapper, "--", *worker]


def environment(request: JobRequest) -> list[dict[str, Any]]:
    """Environment of a rank; credentials only by reference."""
    plain = {"KFP_GATE_SPEC": request.spec, "KFP_GATE_RUN_ID": request.options.run_id, "LOCAL_RANK": "0",
             "PYTHONUNBUFFERED": "1", **request.options.environment}  # fmt: skip
    entries: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in plain.items()]
    referenced = set(plain)
    for secret in request.options.secrets or (DEFAULT_SECRET,):
        for key in SECRET_KEYS:
            if key not in referenced:
                reference = {"name": secret, "key": key, "optional": True}
                entries.append({"name": key, "valueFrom": {"secretKeyRef": reference}})
                referenced.add(key)
    return entries


def resources(options: LaunchOptions) -> dict[str, Any]:
    """Requests equal limits for memory and GPU, so that what is promised is what is there."""
    fixed = {"memory": options.memory}
    if options.gpus_per_node:
        fixed["nvidia.com/gpu"] = str(options.gpus_per_node)
    return {"requests": {"cpu": options.cpu, **fixed}, "limits": dict(fixed)}


def volumes(options: LaunchOptions) -> list[dict[str, Any]]:
    """Shared memory of the asked size, and the claims."""
    entries: list[dict[str, Any]] = [
        {"name": SHM, "emptyDir": {"medium": "Memory", "sizeLimit": options.shared_memory}},
    ]
    for number, claim in enumerate(options.claims):
        entries.append({"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim}})
    return entries


def mounts(options: LaunchOptions) -> list[dict[str, Any]]:
    """Where the volumes are mounted."""
    entries = [{"name": SHM, "mountPath": "/dev/shm"}]  # noqa: S108  # the mount point that loader workers use
    entries += [{"name": f"claim-{n}", "mountPath": path} for n, path in enumerate(options.claims.values())]
    return entries
