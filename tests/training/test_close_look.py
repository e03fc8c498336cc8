"""Whole trainings with a profile window, and whole probes: what they write, and that nothing else changes.

Few starts, many assertions: a start of torch costs more than a training here.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kfp_gate.data.manifest import read_manifest
from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.model_folder import read_card, refuse_probe
from kfp_gate.observing.timeline import read_timeline
from kfp_gate.training import resuming
from kfp_gate.training.group import Group
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.record import Record
from kfp_gate.training.reproduction import nsys
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.stored_steps import find_latest

from .launch import Rank, start
from .scene import SCALED, Scene, make_scene

pytestmark = pytest.mark.all_only

SEES = "says_what_it_sees_and_ends_with"
LOOPS = "a_transform_that_waits_and_loops"


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(tmp_path_factory.mktemp("scene") / "data", train=70, val=24)


def spec(scene: Scene, home: Path, name: str, **changes: Any) -> dict[str, str]:
    values: dict[str, Any] = {
        "train_manifest": str(scene.train), "val_manifest": str(scene.val), "base_model": SCALED, "epochs": 2,
        "image_size": 64, "batch": 4, "sanity_batches": 0, "checkpoint_uri": str(home / "storage" / name),
        "overrides": {"optimizer": "AdamW", "lr0": 0.004, "nbs": 12}, **changes,
    }  # fmt: skip
    path = home / f"{name}.json"
    path.write_text(TrainingSpec(**values).to_json(), encoding="utf-8")
    return {"spec": str(path)}


def lines(out: Path, kind: str, rank: int = 0) -> list[dict[str, Any]]:
    return [x for x in read_timeline(out / f"rank{rank}" / "timeline.jsonl") if x["kind"] == kind]


def run(home: Path, scene: Scene, plan: list[dict[str, str]], ranks: int = 1) -> list[Rank]:
    found = start(home, scene.root, plan, ranks=ranks).wait()
    for rank in found:
        assert rank.code == 0 and rank.output.count("CODE 0") == len(plan), rank.output[-6000:]
    return found


# A training with a window ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rank]:
    """The same training: without a window, with one, with one and two loader processes, and out of memory in it."""
    home = tmp_path_factory.mktemp("trained")
    plan = [
        {**spec(scene, home, "plain"), "fault": SEES},
        {**spec(scene, home, "watched", profile_steps=3), "fault": SEES},
        {**spec(scene, home, "workers", profile_steps=3, workers=2, epochs=1), "fault": LOOPS},
        {**spec(scene, home, "halved", profile_steps=3, epochs=1), "fault": "runs_out_of_memory_in_step_6"},
    ]
    return home, run(home, scene, plan)[0]


def test_a_window_changes_no_bit_of_the_training(trained: tuple[Path, Rank]) -> None:
    _, rank = trained
    plain, watched, _ = rank.output.split("CODE 0")[:3]
    for what in ("SEEN .*", "PARAMETERS .*"):
        assert re.findall(what, plain) == re.findall(what, watched) != []


def test_a_window_is_one_stretch_of_the_first_epoch(trained: tuple[Path, Rank]) -> None:
    _, rank = trained
    out = rank.folder / "1"
    windows = lines(out, "window")
    watched = [w for w in windows if w["profiled"]]
    # 3 of warm-up and 5 around come before; one step warms the profiler.
    assert [(w["epoch"], w["batches"], w["steps"]) for w in watched] == [(1, [8, 11], 4)]
    assert sum(w["steps"] for w in windows) == 2 * 18 and not any(w["profiled"] for w in windows if w["epoch"] == 2)
    assert not [w for w in lines(rank.folder / "0", "window") if w["profiled"]]
    for before, after in pairwise(windows):
        assert after["batches"][0] == before["batches"][1] + 1
    (line,) = lines(out, "profile")
    assert (line["steps"], line["around_steps"], line["problems"], line["phase"]) == (3, 10, [], "train")
    assert line["cost"] == pytest.approx(line["step_s"] / line["around_s"] - 1, abs=1e-3)
    assert any(op["name"].startswith("aten::convolution") for op in line["ops"]) and len(line["ops"]) == 20
    assert line["batches"] >= 3 and any(f["part"] == "transform:RandomPerspective" for f in line["functions"])
    assert sum(line["transforms"].values()) == pytest.approx(1, abs=0.01)
    assert "profile: 3 steps under the profiler" in rank.output and "the instruments cost" in rank.output


def test_what_the_window_leaves_is_kept_beside_the_record(trained: tuple[Path, Rank]) -> None:
    _, rank = trained
    kept = rank.folder / "1" / "training" / "profile"
    assert {p.name for p in kept.iterdir()} == {"trace.json.gz", "spec.json", "train.parquet", "val.parquet"}
    again = json.loads((kept / "spec.json").read_text())
    assert (again["train_manifest"], again["val_manifest"]) == ("train.parquet", "val.parquet")
    assert again["checkpoint_uri"] == again["tracking_uri"] == again["run_id"] == ""


def test_a_slow_transform_is_named_from_inside_loader_processes(trained: tuple[Path, Rank]) -> None:
    _, rank = trained
    (line,) = lines(rank.folder / "2", "profile")
    assert (
        next(iter(line["transforms"])) == "transform:WaitsAndLoops"
        and line["transforms"]["transform:WaitsAndLoops"] > 0.5
    )
    first = line["functions"][0]
    assert first["function"].endswith("<built-in method time.sleep>") and first["part"] == "transform:WaitsAndLoops"
    assert first["own_s"] >= 0.03 * first["calls"] > 0
    assert any(re.search(r"drive\.py:\d+:WaitsAndLoops\.loop", f["function"]) for f in line["functions"])


def test_a_batch_that_is_halved_is_told_and_the_window_comes_again(trained: tuple[Path, Rank]) -> None:
    _, rank = trained
    told = lines(rank.folder / "3", "conditions")
    assert [(c["batch"], c["rank_batch"], c["steps_per_epoch"]) for c in told] == [(4, 4, 18), (2, 2, 35)]
    assert "out of memory with batch 4: training goes on with 2" in rank.output
    whole = [w for w in lines(rank.folder / "3", "window") if w["time"] > told[1]["time"]]
    assert sum(w["images"] for w in whole) == 70 and whole[0]["batches"][0] == 0
    (line,) = lines(rank.folder / "3", "profile")
    assert line["steps"] == 3 and line["problems"] == []


def test_the_command_shows_the_window_once_more(trained: tuple[Path, Rank], tmp_path: Path) -> None:
    """All of it but nsys itself, which is not here; from a folder that was carried away."""
    _, rank = trained
    (line,) = lines(rank.folder / "1", "profile")
    command = shlex.split(line["nsys"])
    prefix = nsys(cuda=False)
    assert command[: len(prefix)] == prefix and command[:2] == ["nsys", "profile"]
    folder = shutil.copytree(rank.folder / "1" / "training" / "profile", tmp_path / "carried away")
    scripts = Path(sys.executable).parent
    done = subprocess.run(
        command[len(prefix) :], cwd=folder, capture_output=True, text=True, timeout=240,
        env={**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    out = folder / "again"
    (shown,) = lines(out, "profile")
    assert shown["steps"] == 3 and shown["around_steps"] == 10
    assert len(lines(out, "epoch")) == 1, "it ends by itself"
    assert lines(out, "conditions")[0]["settings"]["overrides"]["optimizer"] == "AdamW"


def go_on(source: Path, folder: Path) -> object:
    """What a training finds that is told to go on from `source`."""
    folder.mkdir()
    first = json.loads(next(source.rglob("record.json")).read_text())
    record = Record(first["settings"], first["manifests"], tuple(first["classes"]), 1, "cpu")
    told = TrainingSpec(train_manifest="a", val_manifest="b", resume_from=str(source))
    alone = Group(Ranks(), torch.device("cpu"), timeout_s=1)
    return resuming.find(told, str(folder), group=alone, folder=folder, record=record)


# A probe --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def probed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rank]:
    """A probe of a slow transform without loader processes, one with two of them and a window, and then a training at
    the same place."""
    home = tmp_path_factory.mktemp("probed")
    plan = [
        {**spec(scene, home, "slow", probe_steps=6, epochs=50), "fault": LOOPS},
        {
            **spec(scene, home, "both", probe_steps=4, profile_steps=2, workers=2, epochs=50,
                   monitors=("size/large/map50_95", "map50")),
            "fault": SEES,
        },
        spec(scene, home, "wild", probe_steps=2,
             overrides={"optimizer": "SGD", "lr0": 0.5, "nbs": 4, "cls": 1e38, "warmup_epochs": 0}),
        spec(scene, home, "after", epochs=1, checkpoint_uri=str(home / "storage" / "slow")),
    ]  # fmt: skip
    (home / "storage").mkdir()
    return home, run(home, scene, plan)[0]


def test_a_probe_tells_feeding_from_computing(probed: tuple[Path, Rank]) -> None:
    _, rank = probed
    usual, prepared = lines(rank.folder / "0", "probe")
    assert [(p["part"], p["steps"]) for p in (usual, prepared)] == [("usual", 6), ("prepared", 6)]
    for line in (usual, prepared):
        assert 0 < line["low"] <= line["step_s"] <= line["high"]
    # Four images a step, 30 ms each: every usual step holds that much, and no prepared one waits for it.
    assert usual["step_s"] >= 4 * 0.03
    windows = [w for w in lines(rank.folder / "0", "window") if not w["warmup"]]
    data = {w["input"]: w["seconds"].get("data", 0.0) / w["steps"] for w in windows}
    assert data["usual"] >= 4 * 0.03 > data["prepared"]
    assert {w["input"]: w["loader"] is None for w in windows} == {"usual": False, "prepared": True}
    turns = {w["input"]: w["seconds"].get("optimizer", 0) > 0 for w in windows}
    assert turns == {"usual": True, "prepared": True}
    assert re.search(r"probe: 6 steps as usual, .*: (feeding costs 0\.\d+ s a step|no gain beyond)", rank.output)


def test_a_probe_is_bounded_and_ends_by_itself(probed: tuple[Path, Rank]) -> None:
    _, rank = probed
    for name, steps in (("0", 3 + 6 + 3 + 6), ("1", 3 + 2 * 8 + 5 + 1 + 2 + 8 + 5 + 4 + 5 + 4)):
        windows = lines(rank.folder / name, "window")
        assert sum(w["steps"] for w in windows) == steps and {w["epoch"] for w in windows} == {1}
        (conditions,) = lines(rank.folder / name, "conditions")
        assert (conditions["train_images"], conditions["steps_per_epoch"], conditions["epochs"]) == (70, 18, 50)
        (validation,) = lines(rank.folder / name, "validation")
        assert validation["images"] == 16 and conditions["val_images"] == 24
        assert len(lines(rank.folder / name, "checkpoint")) == 1
    order = [(w["input"], w["warmup"], w["profiled"]) for w in lines(rank.folder / "1", "window")]
    changes = [o for i, o in enumerate(order) if i == 0 or o != order[i - 1]]
    assert changes == [
        ("usual", True, False), ("usual", False, False), ("usual", False, True), ("usual", False, False),
        ("prepared", True, False), ("prepared", False, False),
    ]  # fmt: skip
    (line,) = lines(rank.folder / "1", "profile")
    assert (line["steps"], line["around_steps"]) == (2, 10)
    progress = [json.loads(x) for x in re.findall("KFP_GATE_PROGRESS (.*)", rank.output)]
    assert [(p["epoch"], p["epochs"]) for p in progress] == [(1, 1)] * 4
    assert [p["stopped"] for p in progress[:2]] == ["this was a probe of 6 steps", "this was a probe of 4 steps"]


def test_the_model_of_a_probe_says_so_and_no_training_goes_on_from_it(probed: tuple[Path, Rank]) -> None:
    home, rank = probed
    card = read_card(rank.folder / "0" / "model")
    assert card.settings["probe_steps"] == 6 and card.manifests["train"]
    with pytest.raises(InvalidInput, match="a model of a probe"):
        refuse_probe(card, "here")
    record = json.loads((rank.folder / "0" / "training" / "record.json").read_text())
    assert record["settings"]["probe_steps"] == 6
    latest = find_latest(str(home / "storage" / "slow"))
    assert latest is not None and latest.epoch == 1
    assert (
        not lines(rank.folder / "3", "resume") and read_card(rank.folder / "3" / "model").settings["probe_steps"] == 0
    )
    assert find_latest(str(home / "storage" / "slow" / "probe")) is not None
    with pytest.raises(InvalidInput, match="a checkpoint of a probe"):
        go_on(home / "storage" / "slow" / "probe", home / "other")
    # A size band without a value in a few batches is no reason to end without a model.
    assert read_card(rank.folder / "1" / "model").chosen_by == "size/large/map50_95"
    record = json.loads((rank.folder / "1" / "training" / "record.json").read_text())
    assert record["weights"]["size/large/map50_95"]["value"] is None


def test_a_probe_whose_weights_are_not_finite_ends_like_any_other(probed: tuple[Path, Rank]) -> None:
    _, rank = probed
    out = rank.folder / "2"
    assert [p["steps"] for p in lines(out, "probe")] == [2, 2] and not lines(out, "recover")
    assert not lines(out, "validation") and lines(out, "epoch")[0]["values"] == {"map50_95": None}
    assert (out / "model" / "model.pt").is_file() and "not finite; nothing is validated" in rank.output


def test_all_ranks_of_a_probe_take_the_same_steps(scene: Scene, tmp_path: Path) -> None:
    home = tmp_path
    first, second = run(home, scene, [spec(scene, home, "ranks", probe_steps=4, profile_steps=2, epochs=9)], ranks=2)
    counts = []
    for number, rank in enumerate((first, second)):
        out = rank.folder / "0"
        windows = lines(out, "window", number)
        counts.append([(w["input"], w["warmup"], w["profiled"], w["steps"]) for w in windows])
        assert {p["part"]: p["steps"] for p in lines(out, "probe", number)} == {"usual": 4, "prepared": 4}
        (line,) = lines(out, "profile", number)
        assert line["steps"] == 2 and (line["nsys"] is None) == bool(number)
    assert counts[0] == counts[1]
    assert (first.folder / "0" / "training" / "profile" / "trace.json.gz").is_file()
    assert (second.folder / "0" / "rank1" / "profile" / "trace.json.gz").is_file()
    train = read_manifest(first.folder / "0" / "training" / "profile" / "train.parquet")
    assert len(train) == 68
