"""Every manifest against the real CRD schemas, as strictly as the server checks them."""

import copy
import json
from pathlib import Path

import pytest
import yaml
from double import schema

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.cluster import render
from kfp_gate.launching.doctor import needed
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.trainjob import runtime_manifest
from kfp_gate.launching.worker_pod import SECRET_KEYS, base_name

ROOT = Path(__file__).parents[2]
CRDS = {
    "2.0": "trainjobs-v2.0.1.yaml",
    "2.1": "trainjobs-v2.1.0.yaml",
    "2.2": "trainjobs.yaml",
    "2.3.0": "trainjobs.yaml",
}
FILES = {"TrainingRuntime": "trainingruntimes.yaml", "PyTorchJob": "pytorchjobs.yaml"}
SPEC = json.dumps({"train_manifest": "s3://b/훈련.parquet", "epochs": 3})


def options(backend: str, **changes) -> LaunchOptions:
    full = {
        "backend": backend,
        "nodes": 4,
        "gpus_per_node": 1,
        "memory": "64Gi",
        "worker_image": "r.example/worker@sha256:0",
        "namespace": "team-a",
        "queue": "gpu",
        "node_selector": {"pool": "h200"},
        "tolerations": ({"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},),
        "claims": {"data": "/data", "cache": "/cache"},
        "shared_memory": "8Gi",
        "checkpoint_uri": "s3://b/run",
        "priority_class": "high",
        "service_account": "trainer",
        "deadline_seconds": 7200,
        "run_id": "run 1",
        "secrets": ("s3", "mlflow"),
        "environment": {"NCCL_DEBUG": "INFO"},
    }
    return LaunchOptions(**(full | changes))


def check(body: dict, file: str) -> dict:
    """What the server would keep; raises if it would refuse or prune."""
    shape = schema.load_crd(file)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    kept = copy.deepcopy(body)
    assert schema.prune(kept, shape) == []
    schema.default(kept, shape)
    assert [cause.json() for cause in schema.validate(kept, shape)] == []
    assert [cause.json() for cause in schema.rules(kept, None, shape)] == []
    return kept


@pytest.mark.parametrize("release", CRDS)
def test_trainjob_of_each_release(release):
    runtime, job = render(SPEC, options("trainjob"), release=release)
    check(runtime, "trainingruntimes.yaml")
    kept = check(job, CRDS[release])
    assert kept["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "TrainingRuntime",
        "name": "kfp-gate-training",
    }
    trainer = kept["spec"]["trainer"]
    assert trainer["numNodes"] == 4
    assert trainer["resourcesPerNode"]["limits"] == {"memory": "64Gi", "nvidia.com/gpu": "1"}
    assert ("activeDeadlineSeconds" in kept["spec"]) == (release not in ("2.0", "2.1"))
    assert kept["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
    text = json.dumps(kept)
    for part in (
        '"sizeLimit": "8Gi"',
        '"claimName": "cache"',
        '"mountPath": "/dev/shm"',
        '"pool": "h200"',
        '"serviceAccountName": "trainer"',
    ):
        assert part in text


def test_the_other_releases_would_drop_what_is_meant_for_one():
    """The schemas differ where we think they do: the wrong field is pruned silently."""
    _, job = render(SPEC, options("trainjob"), release="2.1")
    shape = schema.load_crd("trainjobs.yaml")["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert schema.prune(copy.deepcopy(job), shape) == ["spec.podTemplateOverrides"]


@pytest.mark.parametrize("nodes", [1, 4])
def test_pytorchjob(nodes):
    (job,) = render(SPEC, options("pytorchjob", nodes=nodes))
    kept = check(job, "pytorchjobs.yaml")
    replicas = kept["spec"]["pytorchReplicaSpecs"]
    assert sum(replica["replicas"] for replica in replicas.values()) == nodes
    assert kept["spec"]["runPolicy"]["cleanPodPolicy"] == "None"
    for replica in replicas.values():
        assert replica["restartPolicy"] == "Never"
        assert replica["template"]["spec"]["containers"][0]["name"] == "pytorch"
        assert replica["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("backend", ["trainjob", "pytorchjob"])
def test_credentials_are_references_and_never_values(backend, monkeypatch):
    for key in SECRET_KEYS:
        monkeypatch.setenv(key, "very-secret-value")
    text = json.dumps(render(SPEC, options(backend)))
    assert "very-secret-value" not in text
    assert '"secretKeyRef": {"name": "s3", "key": "AWS_SECRET_ACCESS_KEY", "optional": true}' in text


def test_priority_without_a_queue_belongs_into_the_runtime():
    with pytest.raises(InvalidInput, match="priority_class='high' without a queue"):
        render(SPEC, options("trainjob", queue=""))
    (job,) = render(SPEC, options("pytorchjob", queue=""))
    assert job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["priorityClassName"] == "high"


@pytest.mark.parametrize("release", ["1.9", "newest", ""])
def test_unknown_releases_are_refused(release):
    with pytest.raises(InvalidInput, match="release"):
        render(SPEC, options("trainjob"), release=release)


def test_names_are_labels_and_the_same_for_the_same_run_and_task():
    assert base_name("r", "training") == base_name("r", "training") != base_name("r", "other")
    for task in ("training", "Ärger & 원뿔", "", "-" * 40, "x" * 90):
        name = base_name("run/with/slashes", task)
        assert len(f"{name}-a999-node-0-100-abcde") <= 63
        assert all(c.isascii() and (c.isalnum() or c == "-") for c in name)


def test_deploy_is_what_the_code_needs():
    runtime = yaml.safe_load((ROOT / "deploy/training-runtime.yaml").read_text())
    expected = runtime_manifest("kfp-gate-training", "", ttl_seconds=7 * 24 * 3600)
    del expected["metadata"]["namespace"]
    assert runtime == expected
    check(runtime, "trainingruntimes.yaml")
    rules = yaml.safe_load((ROOT / "deploy/role.yaml").read_text())["rules"]
    granted = {
        (verb, group, resource)
        for rule in rules
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    for backend in ("trainjob", "pytorchjob"):
        for verb, group, resource, sub, _vital in needed(options(backend)):
            assert (verb, group, f"{resource}/{sub}" if sub else resource) in granted
    listed = yaml.safe_load((ROOT / "deploy/kustomization.yaml").read_text())["resources"]
    assert all((ROOT / "deploy" / name).is_file() for name in listed)
    binding = yaml.safe_load((ROOT / "deploy/role-binding.yaml").read_text())
    assert binding["roleRef"]["name"] == yaml.safe_load((ROOT / "deploy/role.yaml").read_text())["metadata"]["name"]
