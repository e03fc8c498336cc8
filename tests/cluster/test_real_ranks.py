"""The manifest's own command and environment, run as processes behind the double: what is in it works."""

import json
import sys
from pathlib import Path

import pytest
from double.cluster import TRAINJOB
from harness import Launcher, run_for_real

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from scene import SCALED, make_scene

PROGRAM = """
import json, os, pathlib, sys
spec, out = map(pathlib.Path, sys.argv[1:])
names = ("PET_NODE_RANK", "PET_NNODES", "LOCAL_RANK", "KFP_GATE_RUN_ID")
print("rank", *[os.environ.get(name) for name in names], json.loads(spec.read_text())["epochs"])
if os.environ["PET_NODE_RANK"] == "0":
    for name in ("model/model.pt", "training/record.json"):
        (out / name).parent.mkdir(parents=True)
        (out / name).write_text(name)
"""


@pytest.mark.parametrize("backend", ["trainjob", "pytorchjob"])
def test_a_command_of_the_users_own(cluster, tmp_path, backend):
    launcher = Launcher(
        cluster, tmp_path, backend, command=("python", "-c", PROGRAM, "{spec}", "{out}"), records=tmp_path / "records"
    )
    outcome = launcher.run(run_for_real(tmp_path))
    assert outcome.state == "succeeded", outcome.text()
    assert "rank 1 2 0 run-1 2" in launcher.lines(1)
    assert (launcher.out / "model.pt").is_file()
    assert (tmp_path / "records/rank-0/training/record.json").is_file()


def test_a_traceback_in_a_real_pod(cluster, tmp_path):
    program = "import os, time; time.sleep(int(os.environ['PET_NODE_RANK'])); {}['cone']"
    outcome = Launcher(cluster, tmp_path, command=("python", "-c", program)).run(run_for_real(tmp_path))
    assert (outcome.cause, outcome.first_failed_rank) == ("exception", 0)
    assert "KeyError: 'cone'" in outcome.summary


@pytest.mark.all_only
@pytest.mark.parametrize(
    # The pipeline's own end-to-end tests run the processes backend in CI.
    "backend",
    [pytest.param("processes", marks=pytest.mark.slow), "trainjob", "pytorchjob"],
)
def test_launch_training_is_the_same_for_every_backend(cluster, tmp_path, monkeypatch, backend):
    """The component itself, with the real worker on two ranks: only the backend differs."""
    from kfp import dsl

    from kfp_gate.components.launch_training.component import launch_training

    Launcher(cluster, tmp_path)  # the runtime
    cluster.scripts = [run_for_real(tmp_path)]
    scene = make_scene(tmp_path / "scene")
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig(tmp_path)))
    monkeypatch.setenv("KFP_GATE_RUN_ID", "run-7")
    monkeypatch.setenv("KFP_GATE_MOUNTS", f"data:{tmp_path}")
    monkeypatch.setenv("KFP_GATE_WORKER_IMAGE", "registry.example/worker:1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    train, val = dsl.Dataset(uri=str(scene.train)), dsl.Dataset(uri=str(scene.val))
    model, training = dsl.Model(uri=str(tmp_path / "model")), dsl.HTML(uri=str(tmp_path / "training.html"))
    record = dsl.Artifact(uri=str(tmp_path / "record"))
    launch_training.python_func(
        train=train, val=val, model=model, training=training, record=record, base_model=SCALED, epochs=1,
        image_size=64, batch=4, backend=backend, nodes=2, namespace="ns1", checkpoint_uri=str(tmp_path / "checkpoints"),
    )  # fmt: skip
    card = json.loads((tmp_path / "model" / "model.json").read_text())
    assert card["classes"] == list(scene.classes)
    assert (tmp_path / "model" / "model.pt").is_file()
    # What diagnose_training reads came with it, of both ranks, from wherever they ran.
    assert {f.name for f in (tmp_path / "record").glob("*.json*")} == {
        "record.json", "timeline.jsonl", "timeline-rank1.jsonl",
    }  # fmt: skip
    if backend == "trainjob":
        (job,) = cluster.store.all(TRAINJOB, "ns1")
        spec = json.loads(next(e["value"] for e in job["spec"]["trainer"]["env"] if e["name"] == "KFP_GATE_SPEC"))
        assert spec["heartbeat_bound_s"] > 0
        assert "/launch/" in spec["train_manifest"]
