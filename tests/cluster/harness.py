"""Launch on the double and collect what the user sees."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from double import Cluster, JobHandle
from double.cluster import RUNTIME

from kfp_gate.launching.api import Api
from kfp_gate.launching.cluster import run_on_cluster
from kfp_gate.launching.delivery import upload_folder
from kfp_gate.launching.following import Patience
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.outcome import Outcome
from kfp_gate.launching.rank import END_PREFIX
from kfp_gate.launching.trainjob import runtime_manifest

QUICK = Patience(poll=0.1, say=0.5, start=0.6, settle=1.5, drain=5.0, stragglers=0.4, no_pods=0.3)
SPEC = '{"epochs": 2, "train_manifest": "s3://b/train.parquet", "val_manifest": "s3://b/val.parquet"}'


class Launcher:
    """One training on a double; `run` may be called again, as a retried step would."""

    def __init__(self, cluster: Cluster, folder: Path, backend: str = "trainjob", **options: Any) -> None:
        self.cluster = cluster
        self.folder = folder
        self.said: list[str] = []
        settings: dict[str, Any] = {
            "backend": backend,
            "nodes": 2,
            "worker_image": "registry.example/worker:1",
            "namespace": "ns1",
            "run_id": "run-1",
            "claims": {"data": "/data"},
            "checkpoint_uri": str(folder / "checkpoints"),
            "say": self.said.append,
            "pending_seconds": 2,
        }
        self.options = LaunchOptions(**(settings | options))
        self.out = folder / "model"
        if backend == "trainjob" and not cluster.store.all(RUNTIME, "ns1"):
            body = runtime_manifest("kfp-gate-training", "ns1", ttl_seconds=600)
            cluster.store.put(RUNTIME, body)

    def run(
        self, script: Callable[[JobHandle], None] | None = None, patience: Patience = QUICK, **changes: Any
    ) -> Outcome:
        if script is not None:
            self.cluster.scripts = [script]
        options = replace(self.options, **changes)
        api = Api(self.cluster.api_client(), outage_seconds=20)
        return run_on_cluster(SPEC, options, self.out, api=api, patience=patience)

    def lines(self, rank: int) -> list[str]:
        return [line.removeprefix(f"[rank {rank}] ") for line in self.said if line.startswith(f"[rank {rank}] ")]


def deliver(job: JobHandle, folder: Path) -> None:
    """What rank 0 does at its end."""
    model = folder / f"made-by-{job.name}"
    model.mkdir(exist_ok=True)
    (model / "model.pt").write_text(f"weights of {job.name}")
    command = job.command
    upload_folder(model, command[command.index("--deliver") + 1] + "/model")


def end_line(**values: Any) -> str:
    return END_PREFIX + json.dumps(values)


def neutral(text: str, folder: Path) -> str:
    """User texts without what differs between two runs."""
    text = text.replace(str(folder), "FOLDER")
    text = re.sub(r"kg-training-[0-9a-f]{12}", "JOB", text)
    text = re.sub(r"-node-0-(\d)-[0-9a-f]{5}", r"-node-0-\1-PODID", text)
    text = re.sub(r"waited \d+ s", "waited N s", text)
    return re.sub(r"127\.0\.0\.1:\d+", "SERVER", text)
