"""What `kfp-gate doctor` finds, and how it says it."""

import copy

import pytest
from double import Cluster
from double.cluster import CLAIMS, QUOTAS, RUNTIME, SECRETS
from harness import Launcher, neutral

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.api import Api
from kfp_gate.launching.doctor import doctor, quantity, refuse_errors, text


def ask(cluster: Cluster, launcher: Launcher, tracking_uri: str = "", **changes):
    from dataclasses import replace

    return doctor(replace(launcher.options, **changes), tracking_uri=tracking_uri, api=Api(cluster.api_client(), 5))


def put(cluster: Cluster, resource, name: str, **parts) -> None:
    cluster.store.put(
        resource, {"apiVersion": "v1", "kind": resource.kind, "metadata": {"name": name, "namespace": "ns1"}} | parts
    )


def prepared(cluster: Cluster, tmp_path) -> Launcher:
    launcher = Launcher(cluster, tmp_path)
    put(cluster, SECRETS, "kfp-gate-credentials", data={})
    put(cluster, CLAIMS, "data", spec={"accessModes": ["ReadWriteMany"]})
    return launcher


def test_a_prepared_namespace(cluster, tmp_path):
    findings = ask(cluster, prepared(cluster, tmp_path))
    assert [finding.level for finding in findings] == ["ok"] * len(findings)
    refuse_errors(findings, "ns1")
    assert neutral(text(findings), tmp_path) == (
        "ok       API server: v1.36.2\n"
        "ok       Kubeflow Trainer: TrainJob with runtimePatches\n"
        "ok       permissions: all 13 granted in namespace ns1\n"
        "ok       TrainingRuntime ns1/kfp-gate-training: no restarts, evidence is kept\n"
        "ok       Secret ns1/kfp-gate-credentials\n"
        "ok       PersistentVolumeClaim ns1/data\n"
        "ok       quota: none set\n"
        "ok       storage FOLDER/checkpoints: writes, reads and deletes"
    )


def test_everything_that_is_missing_at_once(cluster, tmp_path):
    launcher = Launcher(cluster, tmp_path)
    cluster.denied += [("create", "trainer.kubeflow.org", "trainjobs"), ("list", "", "events")]
    runtime = copy.deepcopy(cluster.store.all(RUNTIME, "ns1")[0])
    job = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backoffLimit"] = 3
    job["template"]["spec"]["restartPolicy"] = "OnFailure"
    cluster.store.put(RUNTIME, runtime)
    put(
        cluster,
        QUOTAS,
        "team",
        spec={"hard": {"requests.memory": "16Gi"}},
        status={
            "hard": {"requests.memory": "16Gi", "requests.nvidia.com/gpu": "4"},
            "used": {"requests.memory": "8Gi", "requests.nvidia.com/gpu": "3"},
        },
    )
    blocked = tmp_path / "blocked"
    blocked.write_text("a file")
    findings = ask(
        cluster,
        launcher,
        "http://127.0.0.1:9",
        checkpoint_uri=str(blocked / "x"),
        secrets=("nothing",),
        queue="gpu",
        gpus_per_node=1,
    )
    shown = neutral(text(findings), tmp_path)
    assert shown == (
        "ok       API server: v1.36.2\n"
        "ok       Kubeflow Trainer: TrainJob with runtimePatches\n"
        "ERROR    permission to create trainjobs.trainer.kubeflow.org: missing in namespace ns1\n"
        "         kubectl apply -k deploy/ (docs/cluster.md)\n"
        "warning  permission to list events: missing in namespace ns1\n"
        "         kubectl apply -k deploy/ (docs/cluster.md)\n"
        "warning  TrainingRuntime ns1/kfp-gate-training: restartPolicy is not Never: a restarted container loses its "
        "log; backoffLimit is not 0: at the limit the crashed pod is deleted with its log\n"
        "         copy deploy/training-runtime.yaml\n"
        "ERROR    Secret ns1/nothing: does not exist\n"
        "         kubectl -n ns1 create secret generic nothing ...\n"
        "ERROR    PersistentVolumeClaim ns1/data: does not exist\n"
        "         create it, or correct the mount\n"
        "ERROR    quota team, requests.memory: 16Gi in all, 8Gi used, this launch asks for 32Gi\n"
        "         ask for less, or have the quota raised\n"
        "warning  quota team, requests.nvidia.com/gpu: 4 in all, 3 used, this launch asks for 2\n"
        "         wait until others end, or ask for less\n"
        "ERROR    LocalQueue ns1/gpu: does not exist, or Kueue is not installed: the job would wait for ever\n"
        "         kubectl get localqueues\n"
        "ERROR    storage FOLDER/blocked/x: NotADirectoryError: Not a directory\n"
        "         check the path and its permissions\n"
        "ERROR    tracking http://SERVER: does not answer: [Errno 111] Connection refused\n"
        "         check the URI, and the network between here and the server"
    )
    with pytest.raises(InvalidInput) as error:
        refuse_errors(findings, "ns1")
    assert len(error.value.problems) == 7


@pytest.mark.parametrize("what", ["missing", "no node", "wrong container"])
def test_runtimes_that_cannot_work(cluster, tmp_path, what):
    launcher = prepared(cluster, tmp_path)
    runtime = copy.deepcopy(cluster.store.all(RUNTIME, "ns1")[0])
    jobs = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    if what == "missing":
        cluster.store.remove(RUNTIME, "ns1", "kfp-gate-training")
    elif what == "no node":
        jobs[0]["name"] = "launcher"
        cluster.store.put(RUNTIME, runtime)
    else:
        jobs[0]["template"]["spec"]["template"]["spec"]["containers"][0]["name"] = "main"
        cluster.store.put(RUNTIME, runtime)
    (finding,) = [finding for finding in ask(cluster, launcher) if finding.level == "error"]
    assert finding.what == "TrainingRuntime ns1/kfp-gate-training"


def test_pytorchjob_needs_no_trainer(tmp_path):
    with Cluster(tmp_path, trainjob_crd="").running() as cluster:
        launcher = Launcher(cluster, tmp_path, "pytorchjob", claims={}, checkpoint_uri="s3://bucket/prefix")
        from dataclasses import replace

        options = replace(launcher.options, claims={"data": "/data"}, checkpoint_uri=str(tmp_path))
        put(cluster, CLAIMS, "data", spec={"accessModes": ["ReadWriteOnce"]})
        findings = doctor(options, api=Api(cluster.api_client(), 5))
        assert not [finding for finding in findings if finding.level == "error"]
        assert any("access modes ['ReadWriteOnce']" in finding.why for finding in findings)


@pytest.mark.parametrize(
    ("value", "number"), [("16Gi", 16 * 2**30), ("500m", 0.5), ("2", 2), ("1.5G", 1.5e9), ("x", 0)]
)
def test_quantities(value, number):
    assert quantity(value) == number
