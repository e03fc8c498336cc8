"""The two kinds of cluster job, seen the same way: where they live, how they say that they ended."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kfp_gate.launching import pytorchjob, trainjob
from kfp_gate.launching.options import LaunchOptions

JobState = Literal["running", "suspended", "succeeded", "failed"]


@dataclass(frozen=True)
class Kind:
    """One kind of job."""

    name: str
    group: str
    plural: str
    container: str
    success: str
    selector: Callable[[str], str]
    rank_of: Callable[[dict[str, str], LaunchOptions], int | None]

    def path(self, namespace: str, name: str = "") -> str:
        return f"{self.group}/namespaces/{namespace}/{self.plural}" + (f"/{name}" if name else "")

    def state(self, job: dict[str, Any]) -> tuple[JobState, str, str]:
        """State, reason and message by the job's own conditions, whatever their order."""
        true = {
            condition.get("type"): condition
            for condition in (job.get("status") or {}).get("conditions") or ()
            if condition.get("status") == "True"
        }
        if "Failed" in true:
            return "failed", str(true["Failed"].get("reason", "")), str(true["Failed"].get("message", ""))
        if self.success in true:
            return "succeeded", "", ""
        if "Suspended" in true:
            return "suspended", str(true["Suspended"].get("reason", "")), str(true["Suspended"].get("message", ""))
        return "running", "", ""


TRAINJOB = Kind(
    "TrainJob", trainjob.GROUP, "trainjobs", trainjob.CONTAINER, "Complete", trainjob.pod_selector, trainjob.rank_of
)
PYTORCHJOB = Kind(
    "PyTorchJob", pytorchjob.GROUP, "pytorchjobs", pytorchjob.CONTAINER, "Succeeded",
    pytorchjob.pod_selector, pytorchjob.rank_of,
)  # fmt: skip
KINDS = {"trainjob": TRAINJOB, "pytorchjob": PYTORCHJOB}
