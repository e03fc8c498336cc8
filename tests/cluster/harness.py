"""Launch on the double and collect what the user sees."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from double import Cluster, JobHandle, PodHandle
from double.cluster import RUNTIME

from kfp_gate.launching.api import Api
from kfp_gate.launching.cluster import run_on_cluster
from kfp_gate.launching.delivery import upload_folder
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.outcome import Outcome
from kfp_gate.launching.rank import END_PREFIX
from kfp_gate.launching.trainjob import runtime_manifest
from kfp_gate.launching.waits import Patience

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
    # Whether a deleted pod's end was seen before the pod itself was gone is the cluster's timing.
    text = re.sub(
        r"\n +evidence: (container node of pod .* exit code 143|ended by signal 15 \(SIGTERM\)|exit code 143)", "", text
    )
    text = text.replace("no exit code seen", "exit code 143")
    return re.sub(r"127\.0\.0\.1:\d+", "SERVER", text)


def run_for_real(folder: Path) -> Callable[[JobHandle], None]:
    """A kubelet that runs what the pods say, as processes: the manifest's own command and environment.

    Each pod gets a work folder of its own in place of its filesystem, and the variables that the real
    controllers inject. What they write goes to the pod's log as it comes.
    """

    def script(job: JobHandle) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        pods = job.start()
        processes = []
        for rank in range(len(pods)):
            command = [sys.executable if word == "python" else word for word in job.command]
            work = folder / f"{job.name}-{rank}"
            command[command.index("--work") + 1] = str(work)
            world = str(len(pods))
            injected = {"PET_NNODES": world, "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(rank),
                        "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}  # fmt: skip
            if job.resource.kind == "PyTorchJob":
                injected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": world, "RANK": str(rank)}
            plain = {name: value for name, value in job.environment.items() if value}
            environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"} | plain | injected
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            )
        readers = [threading.Thread(target=_copy, args=pair) for pair in zip(processes, pods, strict=True)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        codes = [process.wait() for process in processes]
        if any(codes):
            job.fail_as_jobset(pods)
        else:
            job.complete()

    return script


def _copy(process: "subprocess.Popen[bytes]", pod: PodHandle) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        pod.write(line.rstrip(b"\n"))
    pod.exit(process.wait())
