"""Trainings on 1, 2 and 3 ranks, each in a mount namespace of its own: equal numbers, common ends, no hidden share.

Few starts, many assertions: a start of torch costs more than a training here.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_gate.data.manifest import read_manifest
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.evaluate import evaluate
from kfp_gate.evaluation.model_folder import read_card, read_fingerprints
from kfp_gate.evaluation.predict import Detector, PredictSettings
from kfp_gate.observing.timeline import read_timeline
from kfp_gate.training.heartbeat import beat
from kfp_gate.training.spec import TrainingSpec

from .launch import Rank, start
from .scene import SCALED, Scene, make_scene

pytestmark = pytest.mark.all_only

BATCHES = (1, 7, 16, 32)
CLASSES = ("square", "원뿔 (소형)", "50% @night")
EASY = {"optimizer": "AdamW", "lr0": 0.01, "mosaic": 0.0, "close_mosaic": 0, "nbs": 4, "warmup_epochs": 1, "scale": 0.1,
        "translate": 0.05, "erasing": 0.0}  # fmt: skip
HARD = {"optimizer": "AdamW", "lr0": 0.004, "close_mosaic": 1, "nbs": 12, "warmup_epochs": 1}
"""Batches that do not divide into steps, warm-up over several epochs, and mosaics that end: resume must keep all."""


@dataclass(frozen=True)
class Place:
    home: Path
    scene: Scene
    weights: str = ""

    def spec(self, name: str, **changes: Any) -> dict[str, str]:
        values: dict[str, Any] = {
            "train_manifest": str(self.scene.train), "val_manifest": str(self.scene.val), "base_model": SCALED,
            "epochs": 4, "image_size": 64, "batch": 4, "overrides": HARD, "sanity_batches": 0,
            "checkpoint_uri": str(self.home / "storage" / name), **changes,
        }  # fmt: skip
        path = self.home / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TrainingSpec(**values).to_json(), encoding="utf-8")
        return {"spec": str(path)}

    def equality(self) -> list[dict[str, str]]:
        """One epoch from trained weights for each validation batch."""
        return [
            self.spec(f"batch{b}", base_model=self.weights, epochs=1, validation_batch=b, checkpoint_uri="",
                      overrides={**EASY, "lr0": 1e-4}, monitors=("map50_95", f"class/{CLASSES[1]}/map50"))
            for b in BATCHES
        ]  # fmt: skip


def state_of(home: Path, name: str, epoch: int) -> Any:
    found = sorted((home / "storage" / name / "steps").glob(f"{epoch:06d}-*/state.pt"))
    assert found, f"no state of epoch {epoch} in {name}"
    state = torch.load(found[-1], weights_only=True)
    for key in ("settings", "run_id"):
        state["extra"].pop(key)
    return state


def assert_same(found: Any, expected: Any, where: str = "state") -> None:
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), where
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for i, value in enumerate(expected):
            assert_same(found[i], value, f"{where}[{i}]")
    else:
        assert found == expected, where


def assert_equals_the_gate(place: Place, folder: Path, *, ranks: int) -> None:
    """Every value of every epoch in `folder`'s record against the gate's evaluator on the model artifact."""
    manifest = read_manifest(place.scene.val)
    paths = [place.scene.root / row.image for row in manifest.rows()]
    for number, batch in enumerate(BATCHES):
        out = folder / str(number)
        record = json.loads((out / "training" / "record.json").read_text())
        assert record["ranks"] == ranks
        detector = Detector.load(out / "model" / "model.pt")
        settings = PredictSettings(image_size=64, batch=batch, device="cpu")
        shapes = BoxReference.from_json(dict(read_card(out / "model").boxes))
        values = evaluate(detector, manifest, paths, settings, reference=shapes).metrics.numbers()
        row = record["epochs"][0]["values"]
        assert row["map50_95"] > 0.02, "a comparison of zeros says nothing"
        for name, value in row.items():
            if value is None:
                assert name not in values
            else:
                assert abs(values[name] - value) <= 1e-9, (name, batch)


def first_line(ranks: list[Rank], number: int = -1) -> str:
    return ranks[number].output[-3000:]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    home = tmp_path_factory.mktemp("ranks")
    return Place(home, make_scene(home / "data", classes=CLASSES))


@pytest.fixture(scope="module")
def one(place: Place) -> tuple[Place, Rank]:
    """One rank: a model that finds something; each batch; a whole run; a run that dies; a full disk."""
    home = place.home / "one"
    one = Place(home, place.scene)
    plan = [one.spec("trained", epochs=24, overrides=EASY, checkpoint_uri="")]
    one = Place(home, place.scene, weights=str(home / "out" / "0" / "model" / "model.pt"))
    plan += one.equality()
    plan += [
        one.spec("whole", sanity_batches=1),
        {**one.spec("full", epochs=3), "fault": "disk_full_in_epoch_2"},
        {**one.spec("cut"), "fault": "dies_in_epoch_3"},
    ]
    (rank,) = start(home, place.scene.root, plan, ranks=1).wait()
    assert rank.code == 99, rank.output[-3000:]
    return one, rank


def test_one_rank_equals_the_gate(one: tuple[Place, Rank]) -> None:
    place, rank = one
    assert_equals_the_gate(place, _from(rank.folder, 1), ranks=1)


def test_a_full_disk_costs_one_checkpoint_and_is_said(one: tuple[Place, Rank]) -> None:
    _, rank = one
    assert "the checkpoint of epoch 2 could not be written" in rank.output
    record = json.loads((rank.folder / "6" / "training" / "record.json").read_text())
    assert [e["epoch"] for e in record["epochs"]] == [1, 2, 3]
    weights, monitor = record["weights"]["map50_95"], record["monitors"][0]
    # The best epoch's weights were kept in memory and written when there was room again.
    assert weights["epoch"] == monitor["best_epoch"]
    assert read_card(rank.folder / "6" / "model").chosen_by == "map50_95"


@pytest.fixture(scope="module")
def resumed(one: tuple[Place, Rank]) -> tuple[Place, Rank]:
    """A new process: the cut run, a run that continues it with more epochs, and the finished run once more."""
    place, _ = one
    # The newest checkpoint is damaged, as by a disk: the one before is taken.
    for state in sorted((place.home / "storage" / "cut" / "steps").glob("*/state.pt"))[1:]:
        state.write_bytes(b"damaged")
    plan = [
        place.spec("cut"),
        place.spec("longer", epochs=5, resume_from=str(place.home / "storage" / "cut")),
        place.spec("cut"),
    ]
    (rank,) = start(place.home / "again", place.scene.root, plan, ranks=1).wait()
    assert rank.code == 0, rank.output[-3000:]
    return place, rank


def test_a_resumed_run_is_bit_for_bit_the_run_that_was_not_cut(resumed: tuple[Place, Rank]) -> None:
    """Also with a sanity pass in one of them only: the pass changes nothing."""
    place, rank = resumed
    whole = state_of(place.home, "whole", 4)
    assert whole["gradients"], "the case of a checkpoint between two steps is not covered"
    assert_same(state_of(place.home, "cut", 4), whole)
    record = json.loads((rank.folder / "0" / "training" / "record.json").read_text())
    assert record["resumed"]["epoch"] >= 1 and record["resumed"]["notes"] == []
    assert [e["epoch"] for e in record["epochs"]] == [1, 2, 3, 4]


def test_resume_from_says_what_differs_and_goes_on(resumed: tuple[Place, Rank]) -> None:
    place, rank = resumed
    record = json.loads((rank.folder / "1" / "training" / "record.json").read_text())
    assert record["resumed"]["differences"] == {"epochs": {"earlier": 4, "now": 5}}
    assert record["resumed"]["epoch"] == 4 and len(record["epochs"]) == 5
    assert "resume: epochs was 4 and is now 5" in rank.output
    # The best weights of the earlier run came along, into this run's own store.
    assert list((place_storage(place, "longer") / "steps").rglob("best-*.pt"))


def test_a_finished_training_is_not_trained_again(resumed: tuple[Place, Rank]) -> None:
    _, rank = resumed
    first, last = (read_card(rank.folder / n / "model") for n in ("0", "2"))
    assert first.sha256 == last.sha256
    assert "the training ended at epoch 4 already" in rank.output


@pytest.fixture(scope="module")
def two(one: tuple[Place, Rank]) -> tuple[Place, list[Rank]]:
    place = Place(one[0].home.parent / "two", one[0].scene, weights=_weights(one))
    plan = [
        *place.equality(),
        {**place.spec("nan", epochs=4, monitors=("map50_95", f"class/{CLASSES[2]}/recall")),
         "fault": "nan_on_rank_1_and_storage_down_in_epoch_2"},
        place.spec("stops", epochs=9, patience=2, sanity_batches=1),
        {**place.spec("whole"), "fault": "says_what_it_sees_and_ends_with"},
        {**place.spec("cut"), "fault": "dies_in_epoch_3"},
    ]  # fmt: skip
    ranks = start(place.home, place.scene.root, plan, ranks=2).wait()
    assert [r.code for r in ranks] == [99, 99], first_line(ranks)
    return place, ranks


def test_two_ranks_equal_the_gate(two: tuple[Place, list[Rank]]) -> None:
    place, ranks = two
    assert_equals_the_gate(place, ranks[0].folder, ranks=2)


def test_only_rank_0_writes_the_model_and_no_rank_writes_beside_the_data(two: tuple[Place, list[Rank]]) -> None:
    place, ranks = two
    assert (ranks[0].folder / "0" / "model" / "model.json").is_file()
    assert not (ranks[1].folder / "0" / "model").exists()
    assert sorted(p.name for p in place.scene.root.iterdir()) == ["images", "train.parquet", "val.parquet"]
    fingerprints = read_fingerprints(ranks[0].folder / "0" / "model")
    assert fingerprints is not None and fingerprints.num_rows == 26


def test_every_ranks_timeline_is_in_storage_and_beside_rank_0s(two: tuple[Place, list[Rank]]) -> None:
    place, ranks = two
    stored = sorted((place_storage(place, "whole") / "timelines").glob("*/rank*.jsonl.gz"))
    assert [p.name for p in stored] == ["rank0.jsonl.gz", "rank1.jsonl.gz"]
    assert len({p.parent for p in stored}) == 1
    training = ranks[0].folder / "6" / "training"
    for number, name in enumerate(("timeline.jsonl", "timeline-rank1.jsonl")):
        lines = list(read_timeline(training / name))
        assert all(x["rank"] == number for x in lines)
        assert {"start", "conditions", "window", "phases", "validation", "memory", "stop"} <= {x["kind"] for x in lines}
        conditions = next(x for x in lines if x["kind"] == "conditions")
        assert (conditions["batch"], conditions["rank_batch"], conditions["ranks"]) == (4, 2, 2)
        windows = [x for x in lines if x["kind"] == "window"]
        assert sum(w["steps"] for w in windows) == 4 * conditions["steps_per_epoch"]
        assert all(w["seconds"]["loss"] > 0 for w in windows)
        validation = next(x for x in lines if x["kind"] == "validation")
        assert validation["images"] == 5 and {"wait", "gather", "broadcast"} <= set(validation["parts"])


def test_two_ranks_see_disjoint_images_and_end_with_equal_parameters(two: tuple[Place, list[Rank]]) -> None:
    place, ranks = two
    sums = [re.findall(r"PARAMETERS (\w+)", rank.output) for rank in ranks]
    assert len(sums[0]) == 1 and sums[0] == sums[1]
    seen = [re.findall(r"SEEN (\d+) (.+)", rank.output) for rank in ranks]
    names = {row.image for row in read_manifest(place.scene.train).rows()}
    for epoch in sorted({epoch for epoch, _ in seen[0]}):
        first, second = ([name for e, name in rank if e == epoch] for rank in seen)
        # 16 images on 2 ranks need no padding: each image once, on one rank.
        assert len(first) == len(second) == len(names) // 2
        assert not set(first) & set(second)
        assert len({*first, *second}) == len(names)


def test_nan_on_one_rank_goes_back_one_epoch_on_all(two: tuple[Place, list[Rank]]) -> None:
    _, ranks = two
    for rank in ranks:
        lines = [x for x in read_timeline(rank.folder / "4" / f"rank{ranks.index(rank)}" / "timeline.jsonl")]
        assert [x["kind"] for x in lines].count("recover") == 1
        assert lines[-1]["kind"] == "end"
    record = json.loads((ranks[0].folder / "4" / "training" / "record.json").read_text())
    assert [e["epoch"] for e in record["epochs"]] == [1, 2, 3, 4]
    # Weights are compared between ranks, bit by bit, in every epoch after the recovery too.
    assert "hold other weights" not in ranks[0].output


def test_storage_that_is_down_costs_that_checkpoint_and_is_said(two: tuple[Place, list[Rank]]) -> None:
    _, ranks = two
    assert "the checkpoint of epoch 2 did not reach" in ranks[0].output
    record = json.loads((ranks[0].folder / "4" / "training" / "record.json").read_text())
    assert record["checkpoints"]["lost_epochs"] == [2] and record["checkpoints"]["uploaded_epoch"] == 4
    assert read_card(ranks[0].folder / "4" / "model").other_weights


def test_early_stop_reaches_all_ranks(two: tuple[Place, list[Rank]]) -> None:
    _, ranks = two
    record = json.loads((ranks[0].folder / "5" / "training" / "record.json").read_text())
    assert record["stopped"] == "map50_95 did not improve for 2 epochs" and len(record["epochs"]) < 9
    for rank in ranks:
        stops = [
            x for x in read_timeline(next((rank.folder / "5").glob("rank*/timeline.jsonl"))) if x["kind"] == "stop"
        ]
        assert stops[0]["reason"] == record["stopped"] or rank is ranks[1]
    assert record["sanity"]["images"] == 8 and set(record["sanity"]["parts"]) >= {"metric names", "checkpoint: upload"}


@pytest.fixture(scope="module")
def two_again(two: tuple[Place, list[Rank]]) -> tuple[Place, list[Rank], float]:
    place, _ = two
    plan = [
        place.spec("cut"),
        {**place.spec("broken", epochs=50), "fault": "rank_0_fails_in_the_validation_of_epoch_2"},
    ]
    ranks = start(place.home / "again", place.scene.root, plan, ranks=2).wait()
    return place, ranks, 0.0


def test_two_ranks_resume_bit_for_bit(two_again: tuple[Place, list[Rank], float]) -> None:
    place, ranks, _ = two_again
    assert "CODE 0" in ranks[0].output, first_line(ranks)
    whole, cut = state_of(place.home, "whole", 4), state_of(place.home, "cut", 4)
    assert len(whole["ranks"]) == 2 and whole["gradients"]
    assert_same(cut, whole)


def test_rank_0_alone_fails_in_validation_and_all_stop(two_again: tuple[Place, list[Rank], float]) -> None:
    _, ranks, _ = two_again
    assert [r.code for r in ranks] == [1, 1], first_line(ranks)
    assert ranks[0].failure["kind"] == "broken" and "made by the test" in ranks[0].failure["message"]
    assert ranks[1].failure["kind"] == "peer" and ranks[1].failure["peer"] == 0
    assert "made by the test" in ranks[1].failure["message"]
    moments = []
    for number, rank in enumerate(ranks):
        evidence = json.loads((rank.folder / "1" / f"rank{number}" / f"failure-rank{number}.json").read_text())
        assert evidence["settings"]["epochs"] == 50 and evidence["versions"]["torch"] and evidence["memory"]["rss"]
        assert any("epoch 1/50" in line for line in evidence["last_lines"])
        moments.append(evidence["time"])
    assert "ZeroDivisionError" in ranks[0].output and "Traceback" not in ranks[1].output
    stored = place_storage(two_again[0], "broken")
    assert (stored / "evidence" / "failure-rank0.json").is_file()
    assert list((stored / "steps").glob("000001-*/manifest.json")), "the epoch before survives"


def test_a_killed_rank_stops_the_other_in_seconds(one: tuple[Place, Rank]) -> None:
    place = Place(one[0].home.parent / "killed", one[0].scene)
    plan = [{**place.spec("killed", epochs=50), "fault": "rank_1_is_killed_in_epoch_2"}]
    running = start(place.home, place.scene.root, plan, ranks=2)
    assert running.processes[1].wait(120) in (-signal.SIGKILL, 128 + signal.SIGKILL)
    killed = time.monotonic()
    ranks = running.wait(60)
    assert time.monotonic() - killed < 30
    assert ranks[0].code == 1
    assert ranks[0].failure["kind"] == "peer" and ranks[0].failure["peer"] == 1
    assert list((place.home / "storage" / "killed" / "steps").glob("000001-*/manifest.json"))


@pytest.fixture(scope="module")
def three(one: tuple[Place, Rank]) -> tuple[Place, list[Rank]]:
    """Three ranks, the second set with two val images, so that one rank has none; then SIGTERM to rank 2 alone."""
    home = one[0].home.parent / "three"
    place = Place(home, one[0].scene, weights=_weights(one))
    small = Place(home, make_scene(one[0].scene.root / "small", val=2, classes=CLASSES), weights=place.weights)
    plan = [
        *place.equality(),
        small.spec("empty-shard", base_model=place.weights, epochs=1, batch=6, sanity_batches=2),
        {**place.spec("slow", epochs=50), "fault": "slow_epochs"},
    ]
    running = start(home, place.scene.root, plan, ranks=3)
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and running.logs[2].read_text().count("memory epoch 1/50") == 0:
        assert running.processes[2].poll() is None, running.logs[2].read_text()[-3000:]
        time.sleep(0.2)
    running.processes[2].send_signal(signal.SIGTERM)
    return place, running.wait(60)


def test_three_ranks_equal_the_gate(three: tuple[Place, list[Rank]]) -> None:
    place, ranks = three
    assert_equals_the_gate(place, ranks[0].folder, ranks=3)


def test_a_rank_without_val_images_takes_part(three: tuple[Place, list[Rank]]) -> None:
    _, ranks = three
    record = json.loads((ranks[0].folder / "4" / "training" / "record.json").read_text())
    assert record["sanity"]["images"] == 2 and len(record["epochs"]) == 1


def test_sigterm_ends_one_rank_with_evidence_and_the_others_with_it(three: tuple[Place, list[Rank]]) -> None:
    place, ranks = three
    assert [r.code for r in ranks] == [1, 1, 143], first_line(ranks, 0)
    assert ranks[2].failure["kind"] == "terminated"
    assert {r.failure["kind"] for r in ranks[:2]} == {"peer"} and ranks[0].failure["peer"] == 2
    evidence = json.loads((ranks[2].folder / "5" / "rank2" / "failure-rank2.json").read_text())
    assert evidence["kind"] == "terminated" and evidence["phase"] in ("train", "validate", "checkpoint", "")
    assert list((place.home / "storage" / "slow" / "steps").glob("000001-*/manifest.json"))


def test_torchrun_with_two_processes_on_one_node(place: Place, tmp_path: Path) -> None:
    spec = Place(tmp_path, place.scene).spec("torchrun", epochs=1)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
         "kfp_gate.training.worker", "--spec", spec["spec"], "--out", str(tmp_path / "out")],
        capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "rank 0 of 2 on cpu, node 0" in done.stdout and "rank 1 of 2 on cpu, node 0" in done.stdout
    assert json.loads((tmp_path / "out" / "training" / "record.json").read_text())["ranks"] == 2


def test_a_training_that_nobody_follows_ends_itself(place: Place) -> None:
    home = Place(place.home / "alone", place.scene)
    plan = [{**home.spec("alone", epochs=500, heartbeat_bound_s=3.0), "fault": "slow_epochs"}]
    beat(str(place_storage(home, "alone")))
    (rank,) = start(home.home, place.scene.root, plan, ranks=1).wait(120)
    assert rank.code == 143, rank.output[-2000:]
    assert rank.failure["kind"] == "terminated" and "nobody follows this training any more" in rank.failure["message"]
    assert (place_storage(home, "alone") / "evidence" / "failure-rank0.json").is_file()


def place_storage(place: Place, name: str) -> Path:
    return place.home / "storage" / name


def _weights(one: tuple[Place, Rank]) -> str:
    """The trained weights, brought out of the rank's private folder into the data, where every rank may read."""
    place, rank = one
    target = place.scene.root.parent / "base" / "trained.pt"
    target.parent.mkdir(exist_ok=True)
    target.write_bytes((rank.folder / "0" / "model" / "model.pt").read_bytes())
    return str(target)


def _from(folder: Path, first: int) -> Path:
    """A view in which the trainings of `equality` have the numbers 0, 1, ..."""
    view = folder.parent / f"view-{folder.name}"
    view.mkdir(exist_ok=True)
    for number in range(len(BATCHES)):
        link = view / str(number)
        if not link.exists():
            link.symlink_to(folder / str(first + number))
    return view


def values_of(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in row["values"].items() if v is not None}
