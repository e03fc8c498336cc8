"""A rank's pod as Kubernetes describes it, and what that says about the rank."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kfp_gate.launching.outcome import Cause

IMAGE_REASONS = (
    "ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "SignatureValidationFailed",
)  # fmt: skip
HOPELESS_REASONS = ("InvalidImageName", "ErrImageNeverPull")
CREATE_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError")

DISRUPTIONS: dict[str, Cause] = {
    "PreemptionByScheduler": "preempted",
    "PreemptionByKubeScheduler": "preempted",
    "TerminationByKubelet": "evicted",
    "EvictionByEvictionAPI": "evicted",
    "DeletionByTaintManager": "node-lost",
    "DeletionByPodGC": "node-lost",
}
"""Reasons of the condition DisruptionTarget, as scheduler, kubelet and controllers of Kubernetes 1.36 set them."""

POD_REASONS: dict[str, Cause] = {
    "Evicted": "evicted",
    "Preempting": "preempted",
    "NodeLost": "node-lost",
    "Terminated": "node-lost",
    "NodeShutdown": "node-lost",
    "Shutdown": "node-lost",
    "DeadlineExceeded": "deadline",
    "UnexpectedAdmissionError": "container-start",
    "NodeAffinity": "node-lost",
}


@dataclass(frozen=True)
class Pod:
    """One reading of a pod and its training container."""

    name: str
    uid: str
    rank: int | None
    body: dict[str, Any]
    container: str

    @property
    def status(self) -> dict[str, Any]:
        return self.body.get("status") or {}

    @property
    def node(self) -> str:
        return str((self.body.get("spec") or {}).get("nodeName", ""))

    @property
    def created(self) -> str:
        return str(self.body.get("metadata", {}).get("creationTimestamp", ""))

    @property
    def phase(self) -> str:
        return str(self.status.get("phase", "Pending"))

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.body.get("metadata", {})

    @property
    def container_status(self) -> dict[str, Any]:
        for status in self.status.get("containerStatuses") or ():
            if status.get("name") == self.container:
                return dict(status)
        return {}

    @property
    def container_id(self) -> str:
        return str(self.container_status.get("containerID", ""))

    @property
    def restarts(self) -> int:
        return int(self.container_status.get("restartCount", 0))

    @property
    def terminated(self) -> dict[str, Any] | None:
        """The end of the container, if it has ended and will not start again."""
        state = self.container_status.get("state") or {}
        if "terminated" in state:
            return dict(state["terminated"])
        return None

    @property
    def started(self) -> bool:
        """Whether there is or was a container whose log can be asked for."""
        state = self.container_status.get("state") or {}
        return "running" in state or "terminated" in state or bool(self.container_status.get("lastState"))

    @property
    def finished(self) -> bool:
        """Whether this pod will run nothing more."""
        return self.phase in ("Succeeded", "Failed") or (
            self.terminated is not None and self._restart_policy == "Never"
        )

    @property
    def _restart_policy(self) -> str:
        return str((self.body.get("spec") or {}).get("restartPolicy", "Always"))

    def condition(self, kind: str) -> dict[str, Any]:
        for condition in self.status.get("conditions") or ():
            if condition.get("type") == kind:
                return dict(condition)
        return {}


def waiting(pod: Pod) -> tuple[Cause, str] | None:
    """Why a pod does not run yet, in a cause and the server's own words; None if it runs or ended."""
    if pod.started or pod.finished:
        return None
    scheduled = pod.condition("PodScheduled")
    if scheduled.get("status") == "False":
        reason = scheduled.get("reason", "")
        return "unschedulable", f"{reason}: {scheduled.get('message', 'no message')}"
    state = (pod.container_status.get("state") or {}).get("waiting") or {}
    for status in (pod.status.get("initContainerStatuses") or []) + [{"state": {"waiting": state}}]:
        init = (status.get("state") or {}).get("waiting") or {}
        reason, message = str(init.get("reason", "")), str(init.get("message", ""))
        text = f"{reason}: {message}" if message else reason
        if reason in IMAGE_REASONS:
            return "image-pull", text
        if reason in CREATE_REASONS:
            return "container-start", text
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return "unknown", text
    return "unknown", str(state.get("reason", "")) or ("waiting for a node" if not pod.node else "starting")


def ending(pod: Pod) -> tuple[Cause | None, int | None, float | None, tuple[str, ...]]:
    """Cause (None: ask the output), exit code, time of the end in seconds, and the evidence for it."""
    evidence: list[str] = []
    cause: Cause | None = None
    end = pod.terminated or {}
    code = end.get("exitCode")
    ended_at = seconds(end.get("finishedAt"))
    where = f" on node {pod.node}" if pod.node else ""
    if reason := pod.status.get("reason"):
        evidence.append(f"pod {pod.name}{where}: {reason}: {pod.status.get('message', '')}".rstrip(": "))
        cause = POD_REASONS.get(str(reason))
    target = pod.condition("DisruptionTarget")
    if target.get("status") == "True":
        evidence.append(f"condition DisruptionTarget: {target.get('reason')}: {target.get('message', '')}".rstrip(": "))
        # Node shutdown and eviction share the condition's reason: the pod's own reason is the finer one.
        cause = cause or DISRUPTIONS.get(str(target.get("reason")))
        ended_at = ended_at or seconds(target.get("lastTransitionTime"))
    if reason := end.get("reason"):
        text = f"container {pod.container} of pod {pod.name}{where}: {reason}, exit code {code}"
        if (message := str(end.get("message", ""))) and not message.startswith("KFP_GATE_RANK_END"):
            text += f": {message[:300]}"
        if reason != "Completed":
            evidence.append(text)
    if cause is None:
        if end.get("reason") == "OOMKilled":
            # Whatever the exit code: the kernel may have killed a child, and the worker ended with 1.
            cause = "out-of-memory"
        elif end.get("reason") == "ContainerStatusUnknown":
            cause = "node-lost"
        elif end.get("reason") in ("ContainerCannotRun", "StartError"):
            cause = "container-start"
    return cause, code, ended_at, tuple(evidence)


def seconds(stamp: object) -> float | None:
    """Seconds since the epoch of an RFC 3339 time; None if there is none."""
    try:
        return datetime.fromisoformat(str(stamp)).astimezone(UTC).timestamp()
    except ValueError:
        return None
