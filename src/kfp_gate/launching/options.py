"""What a launch is asked for: backend, ranks, and what each rank gets. Names are the pipeline's parameters."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput, Problem

BACKENDS = ("processes", "trainjob", "pytorchjob")
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGTPE]i?|Ki)?$")
LABEL_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """How the ranks are started.

    Args:
        backend: `processes` (this machine), `trainjob` (Kubeflow Trainer v2) or `pytorchjob` (v1).
        nodes: pods on a cluster; on this machine a factor of the number of processes.
        processes_per_node: on this machine only; a pod runs one process.
        gpus_per_node: 0 trains on the CPU; on a cluster 0 or 1, as each pod runs one process.
        memory: memory request and limit of a pod, as a Kubernetes quantity.
        command: replaces the worker; the words `{spec}` and `{out}` become the rank's files.
        records: folder that receives what each rank wrote beside the model, also after a failure.
        deadline_seconds: 0 for none.
        say: receives each line of output; the default writes to standard output.

    Raises:
        InvalidInput: with all wrong fields at once.
    """

    backend: str = "processes"
    nodes: int = 1
    processes_per_node: int = 1
    gpus_per_node: int = 0
    memory: str = "16Gi"
    cpu: str = "2"
    worker_image: str = ""
    namespace: str = ""
    runtime: str = "kfp-gate-training"
    queue: str = ""
    priority_class: str = ""
    service_account: str = ""
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    node_selector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    claims: dict[str, str] = field(default_factory=dict)
    shared_memory: str = "2Gi"
    checkpoint_uri: str = ""
    deadline_seconds: int = 0
    pending_seconds: int = 3600
    max_restarts: int = 3
    keep_failed: bool = True
    ttl_seconds: int = 7 * 24 * 3600
    heartbeat_bound_seconds: int = 1800
    run_id: str = ""
    task: str = "training"
    records: Path | None = None
    say: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        problems = [Problem(name, f"{value!r}; {rule}") for name, value, rule in self._broken_rules()]
        if problems:
            raise InvalidInput(
                f"{len(problems)} launch setting{'s' if len(problems) > 1 else ''} cannot be used",
                expected="settings that fit the backend", where="launch_training parameters",
                next_step="change the parameters listed", problems=problems,
            )  # fmt: skip

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.nodes * self.processes_per_node

    def _broken_rules(self) -> list[tuple[str, object, str]]:
        broken: list[tuple[str, object, str]] = []

        def rule(name: str, fine: bool, text: str) -> None:
            if not fine:
                broken.append((name, getattr(self, {"memory_per_node": "memory"}.get(name, name)), text))

        rule("backend", self.backend in BACKENDS, f"one of {', '.join(BACKENDS)}")
        rule("nodes", self.nodes >= 1, "at least 1")
        rule("processes_per_node", self.processes_per_node >= 1, "at least 1")
        rule("gpus_per_node", self.gpus_per_node >= 0, "0 or more")
        rule("max_restarts", self.max_restarts >= 0, "0 or more")
        rule("deadline_seconds", self.deadline_seconds >= 0, "0 for none, else seconds")
        if self.backend in BACKENDS[1:]:
            rule("processes_per_node", self.processes_per_node <= 1, "1: a pod runs one process, ask for more nodes")
            rule("gpus_per_node", self.gpus_per_node <= 1, "0 or 1: a pod runs one process, ask for more nodes")
            rule("worker_image", bool(self.worker_image), "the image of the training ranks, with its registry")
            rule("memory_per_node", bool(QUANTITY.match(self.memory)), "a quantity such as 16Gi")
            rule("shared_memory", bool(QUANTITY.match(self.shared_memory)), "a quantity such as 2Gi")
            rule("cpu", bool(QUANTITY.match(self.cpu)), "a quantity such as 2 or 500m")
            rule("runtime", bool(LABEL_NAME.match(self.runtime)), "the name of a TrainingRuntime")
            rule("namespace", not self.namespace or bool(LABEL_NAME.match(self.namespace)), "a namespace's name")
            rule(
                "checkpoint_uri", self.checkpoint_uri.startswith("s3://") or bool(self.claims),
                "an s3:// prefix: pods share no files, and the model comes back through it",
            )  # fmt: skip
        return broken
