"""SIGTERM to the launcher: a terminated pipeline takes its job along, an evicted step leaves it for its retry."""

import os
import signal
import time

import pytest
from double.cluster import PODS, TRAINJOB, WORKFLOWS
from harness import Launcher
from test_killed_launcher import start


def step_pod(cluster, workflow_spec: dict) -> None:
    """The launcher's own pod, owned by its workflow, in the namespace of the kubeconfig."""
    workflow = cluster.store.put(
        WORKFLOWS,
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": "wf", "namespace": "ns1"},
            "spec": workflow_spec,
        },
    )
    owner = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "wf", "uid": workflow["metadata"]["uid"]}
    cluster.store.put(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "step", "namespace": "ns1", "ownerReferences": [owner]},
            "spec": {"containers": [{"name": "main"}], "nodeName": "n"},
            "status": {"phase": "Running"},
        },
    )


@pytest.mark.all_only
@pytest.mark.parametrize(
    ("workflow_spec", "goes"),
    [({"activeDeadlineSeconds": 0}, True), ({"shutdown": "Terminate"}, True), ({}, False)],
    ids=["terminated by KFP", "terminated by Argo", "step evicted"],
)
def test_sigterm(cluster, tmp_path, monkeypatch, workflow_spec, goes):
    Launcher(cluster, tmp_path)
    step_pod(cluster, workflow_spec)
    monkeypatch.setenv("KFP_POD_NAME", "step")
    cluster.scripts = [lambda job: [pod.write("epoch 1/9") for pod in job.start()]]
    launcher = start(cluster, tmp_path)
    while "epoch 1/9" not in launcher.stdout.readline():
        pass
    began = time.monotonic()
    os.kill(launcher.pid, signal.SIGTERM)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 143
    assert time.monotonic() - began < 10
    (left,) = (len(cluster.store.all(TRAINJOB, "ns1")),)
    assert left == (0 if goes else 1)
