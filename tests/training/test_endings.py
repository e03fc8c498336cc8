"""Ends that go wrong: nothing hangs, nothing is called finished that has no model, no best weights are mixed up."""

import gzip
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.training.best import slot
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.stored_steps import find_latest

from .launch import free_port
from .scene import SCALED, make_scene
from .test_training import worker


def lines(packed: Path) -> list[str]:
    return [json.loads(x)["kind"] for x in gzip.decompress(packed.read_bytes()).splitlines()]


DIES = """
import threading
from pathlib import Path
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.session import Session
from kfp_gate.training.spec import TrainingSpec
place = Path({place!r})
session = Session(TrainingSpec(train_manifest="a", val_manifest="b"), Ranks(), out=place, private=place, node="n")
# Whoever read this process's output is gone: the last line cannot be written.
import kfp_gate.training.leaving as module
def closed(*_, **__):
    raise BrokenPipeError
module.say = closed
threading.Thread(target=session.heartbeat_stale, args=("nobody",), daemon=True).start()
threading.Event().wait(60)
"""


def test_a_process_whose_evidence_fails_ends_all_the_same(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES.format(place=str(tmp_path))], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1, done.stderr[-2000:]
    assert "nobody follows this training" in (tmp_path / "failure-rank0.json").read_text()


def test_best_weights_of_a_step_that_a_full_disk_cost_travel_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next step's manifest would name older weights than its monitors say are best."""
    from kfp_gate.training import course as module

    epochs: list[int] = []

    def write_state(_state: object, path: Path) -> None:
        epochs.append(1)
        if len(epochs) == 2:
            raise OSError(28, "No space left on device")
        path.write_bytes(b"state")

    monkeypatch.setattr(module.weights, "weights_bytes", lambda _trainer, *, epoch: f"best {epoch}".encode())
    monkeypatch.setattr(module.states, "write_state", write_state)
    store = tmp_path / "store"
    checkpoints = Checkpoints(str(store), tmp_path / "uploads", bound_s=10)
    spec = TrainingSpec(train_manifest="a", val_manifest="b")
    course = module.TrainingCourse(
        spec, group=SimpleNamespace(rank=0, device=SimpleNamespace(type="cpu")),  # type: ignore[arg-type]
        validation=None, folder=tmp_path, whole={"train": 1, "val": 1},  # type: ignore[arg-type]
        timeline=module.Timeline(tmp_path / "timeline.jsonl"), phases=module.Phases(),
        record=module.Record({}, {}, ("a",), 1, "cpu"), tracker=None, checkpoints=checkpoints, train_images=(),
        control_group=None, resume=None,
    )  # fmt: skip
    course.timeline.write("start")
    for epoch, improved in ((1, ("map50_95",)), (2, ("map50_95",)), (3, ())):
        course._values = {"map50_95": 0.1 * epoch}
        seen = SimpleNamespace(improved=improved)
        try:
            course._write(None, epoch, seen, {}, finished=epoch == 3)  # type: ignore[arg-type]
        except OSError:
            assert epoch == 2
        checkpoints.finish()
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 3
    best = latest.files[f"best/{slot('map50_95')}.pt"]
    assert (store / best.key).read_bytes() == b"best 2"
    assert course.record.weights["map50_95"]["epoch"] == 2


JOINS = """
import sys, time
from datetime import timedelta
import torch
from kfp_gate.training.group import Group
from kfp_gate.training.ranks import Ranks
rank, port = int(sys.argv[1]), int(sys.argv[2])
time.sleep(9 * rank)
group = Group(Ranks(rank=rank, world_size=2, port=port), torch.device("cpu"), timeout_s=2)
print(group.broadcast({"from": 0} if rank == 0 else None), group.store.timeout == timedelta(seconds=2))
group.close()
"""


@pytest.mark.all_only
def test_a_rank_that_comes_later_than_a_collective_may_take_is_waited_for() -> None:
    """Its node or its image may take longer than ten minutes; the others are there already."""
    port = str(free_port())
    ranks = [
        subprocess.Popen([sys.executable, "-c", JOINS, str(rank), port], stdout=subprocess.PIPE, text=True)
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said == ["{'from': 0} True\n"] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


@pytest.mark.all_only
def test_a_training_whose_model_cannot_be_written_is_not_finished_in_tracking(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "data", train=4, val=2, classes=("a", "b"))
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=1, image_size=64,
        batch=4, sanity_batches=0, tracking_uri=f"sqlite:///{tmp_path}/mlflow.db", experiment="e",
    )  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    (out / "model").write_text("a file where the folder should be")
    done = worker(spec, out)
    assert done.returncode == 1, done.stdout[-2000:]
    ((status,),) = sqlite3.connect(tmp_path / "mlflow.db").execute("select status from runs").fetchall()
    assert status == "FAILED"


@pytest.mark.all_only
def test_a_timeline_that_cannot_be_kept_costs_no_model(tmp_path: Path) -> None:
    """It is written last: after days it is large, and the disk may hold the model and not it."""
    scene = make_scene(tmp_path / "data", train=4, val=2, classes=("a", "b"))
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=1, image_size=64,
        batch=4, sanity_batches=0,
    )  # fmt: skip
    out = tmp_path / "out"
    (out / "training" / "timeline.jsonl").mkdir(parents=True)
    done = worker(spec, out)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "timeline or profile could not be kept" in done.stdout
    assert read_card(out / "model").sha256 and (out / "training" / "record.json").is_file()


@pytest.mark.all_only
def test_a_second_pipeline_run_with_the_same_checkpoint_uri_trains_its_own_model(tmp_path: Path) -> None:
    scene = make_scene(tmp_path / "data", train=4, val=2, classes=("a", "b"))
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=1, image_size=64,
        batch=4, sanity_batches=0, checkpoint_uri=str(tmp_path / "store"),
    )  # fmt: skip
    first = worker(spec, tmp_path / "first", {"KFP_GATE_RUN_ID": "monday"})
    other = worker(spec.with_changes(seed=7), tmp_path / "other", {"KFP_GATE_RUN_ID": "tuesday"})
    again = worker(spec, tmp_path / "again", {"KFP_GATE_RUN_ID": "monday"})
    for done in (first, other, again):
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "holds checkpoints of another run (monday), which are left alone" in other.stdout
    assert "resuming from" not in other.stdout and "KFP_GATE_PROGRESS" in other.stdout
    # The first run's retry, on a new pod, finds its own: trained already, though the pointer is the other run's.
    assert "the training ended at epoch 1 already" in again.stdout
    stored = [lines(p) for p in (tmp_path / "store" / "timelines").rglob("rank0.jsonl.gz")]
    assert len(stored) == 3 and all("stop" in kinds for kinds in stored), "none looks as if it still ran"
    models = [read_card(tmp_path / name / "model").sha256 for name in ("first", "other", "again")]
    assert models[0] == models[2] != models[1]
