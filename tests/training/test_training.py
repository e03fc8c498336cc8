"""One short training through the worker's own door, and everything a user finds afterwards."""

import gzip
import json
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.data.manifest import read_manifest
from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.model_folder import read_card, read_fingerprints
from kfp_gate.observing.timeline import read_timeline
from kfp_gate.training import base_model, report
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.stored_steps import find_latest

from .scene import SCALED, Scene, make_scene

CLASSES = ("square", "원뿔 (소형)", "50% @night", "ghost")
LOCK = f"sha256:{'c' * 64}"
MONITORS = ("map50_95", "class/원뿔 (소형)/map50", "false_alarm_rate")


@dataclass(frozen=True)
class Trained:
    scene: Scene
    out: Path
    output: str
    spec: TrainingSpec

    @property
    def record(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.out / "training" / "record.json").read_text())
        return found


def worker(
    spec: TrainingSpec, out: Path, environment: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    import os

    out.mkdir(parents=True, exist_ok=True)
    (out / "spec.json").write_text(spec.to_json(), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "kfp_gate.training.worker", "--spec", str(out / "spec.json"), "--out", str(out)],
        capture_output=True, text=True, timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1", "KFP_GATE_RUN_ID": "run-1", **(environment or {})},
    )  # fmt: skip


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return make_scene(
        tmp_path_factory.mktemp("scene") / "data", train=8, val=6, classes=CLASSES, absent_in_val=("ghost",)
    )


@pytest.fixture(scope="module")
def trained(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    out = tmp_path_factory.mktemp("trained")
    with socket.socket() as dead:
        # A port that is bound and does not listen: a tracking server that is down from the start to the end.
        dead.bind(("127.0.0.1", 0))
        spec = TrainingSpec(
            train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=2, image_size=64,
            batch=4, monitors=MONITORS, sanity_batches=1, checkpoint_uri=str(out / "storage"),
            tracking_uri=f"http://127.0.0.1:{dead.getsockname()[1]}",
            overrides={"optimizer": "AdamW", "lr0": 0.004},
        )  # fmt: skip
        secrets = {"MLFLOW_TRACKING_USERNAME": "user", "MLFLOW_TRACKING_PASSWORD": "hunter22"}
        done = worker(spec, out, {**secrets, "KFP_GATE_IMAGE_LOCK": LOCK})
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return Trained(scene, out, done.stdout, spec)


def test_the_model_artifact_says_how_it_was_made(trained: Trained) -> None:
    card = read_card(trained.out / "model")
    assert card.image_lock == LOCK
    assert card.classes == CLASSES and card.image_size == 64
    assert card.monitors == MONITORS and card.chosen_by == "map50_95"
    assert card.settings["overrides"] == {"optimizer": "AdamW", "lr0": 0.004}
    assert card.manifests == {n: read_manifest(getattr(trained.scene, n)).digest for n in ("train", "val")}
    assert {"torch", "torchvision", "ultralytics", "numpy"} <= set(card.versions)
    fingerprints = read_fingerprints(trained.out / "model")
    assert fingerprints is not None and fingerprints.num_rows == 14
    assert set(card.other_weights) <= set(MONITORS[1:])


def test_the_log_has_its_lines(trained: Trained) -> None:
    assert len(re.findall(r"memory epoch \d/2: rss .* GiB|memory epoch \d/2: rss .* MiB", trained.output)) >= 2
    assert len(re.findall(r"phases epoch \d/2: data .* steps, ", trained.output)) == 2
    assert re.search(r"sanity pass: \d+ images through the whole path in \d+\.\d s", trained.output)
    progress = [
        json.loads(x.split(" ", 1)[1]) for x in trained.output.splitlines() if x.startswith("KFP_GATE_PROGRESS ")
    ]
    assert [p["epoch"] for p in progress] == [1, 2] and progress[-1]["eta_s"] == 0
    assert set(progress[0]["monitors"]) == set(MONITORS)


def test_a_tracking_server_that_never_answers_costs_nothing_but_is_said(trained: Trained) -> None:
    tracking = trained.record["tracking"]
    assert "not delivered" in tracking["summary"] and tracking["run_id"] == ""
    spool = trained.out / "rank0" / "tracking-spool.jsonl"
    assert spool.is_file() and len(spool.read_text().splitlines()) >= 4
    assert any("tracking" in r for r in trained.record["sanity"]["remarks"])
    stored = (trained.out / "storage" / "tracking").glob("*.jsonl")
    assert list(stored), "what was not delivered is kept where it can be delivered later"


def test_no_secret_is_written_anywhere(trained: Trained) -> None:
    assert "hunter22" not in trained.output
    for path in trained.out.rglob("*"):
        if path.is_file() and path.name != "spec.json" and path.suffix not in (".png", ".parquet"):
            assert b"hunter22" not in path.read_bytes(), path


def test_a_class_without_objects_has_no_value(trained: Trained) -> None:
    state = trained.record["not_computed"]
    assert "class/ghost/map50" in state
    lines = [x for x in read_timeline(trained.out / "training" / "timeline.jsonl") if x["kind"] == "epoch"]
    assert all(x["values"]["class/ghost/map50"] is None for x in lines) and len(lines) == 2


def test_the_timeline_has_what_a_diagnosis_needs(trained: Trained) -> None:
    lines = list(read_timeline(trained.out / "training" / "timeline.jsonl"))
    kinds = [x["kind"] for x in lines]
    assert kinds[0] == "start" and {"sanity", "phases", "memory", "epoch", "checkpoint", "stop"} <= set(kinds)
    phases = next(x for x in lines if x["kind"] == "phases")
    assert {"data", "transfer", "forward", "loss", "backward", "optimizer", "validation", "checkpoint"} <= set(
        phases["seconds"]
    )
    windows = [x for x in lines if x["kind"] == "window"]
    assert [w["batches"] for w in windows] == [[0, 0], [1, 1], [2, 2], [3, 3]], "no step is missing"
    assert [w["warmup"] for w in windows] == [True, True, True, False] and [w["epoch"] for w in windows] == [1, 1, 2, 2]
    for window in windows:
        assert window["images"] == 4 and window["bytes"] == 4 * 3 * 64 * 64 and window["device"] is None
        assert {"data", "transfer", "forward", "loss", "backward"} <= set(window["seconds"])
        (data, total), *_ = window["each"]
        assert 0 < data < total and total == pytest.approx(sum(window["seconds"].values()), abs=0.25)
        parts = window["loader"]["parts"]
        assert {"resize", "labels", "transform:Mosaic", "transform:Format", "collate", "other"} <= set(parts)
        # Without loader processes the same work is inside of the wait for data.
        assert sum(wall for wall, _, _ in parts.values()) <= data + 0.001
        assert window["loader"]["batches"] == 1 and window["loader"]["ready"] is None
    assert {"open", "read", "decode"} <= set(windows[0]["loader"]["parts"]) and windows[0]["loader"]["bytes"] > 0
    (conditions,) = [x for x in lines if x["kind"] == "conditions"]
    assert kinds.index("conditions") < kinds.index("window")
    assert (conditions["workers"], conditions["prefetch"], conditions["gpu_name"]) == (0, None, None)
    assert conditions["steps_per_epoch"] == 2 and conditions["train_images"] == 8 and conditions["val_images"] == 6
    assert conditions["precision"] == "fp32" and conditions["settings"]["workers"] == -1 and conditions["ranks"] == 1
    validations = [x for x in lines if x["kind"] == "validation"]
    assert [v["epoch"] for v in validations] == [1, 2] and all(v["images"] == 6 for v in validations)
    assert {"weights", "load", "forward", "suppress", "match", "gather", "metrics"} <= set(validations[0]["parts"])
    assert validations[0]["threads"] == 1 and sum(validations[0]["parts"].values()) > 0.1 * validations[0]["seconds"]
    uploads = {x["epoch"]: x for x in lines if x["kind"] == "upload"}
    assert uploads[1]["ok"] and uploads[1]["bytes"] > 10_000 and uploads[1]["seconds"] > 0
    assert all(x["seconds"] >= x["waited_s"] >= 0 for x in lines if x["kind"] == "checkpoint")
    first, second = (x for x in lines if x["kind"] == "memory")
    assert {"train", "validate", "checkpoint"} <= set(first["by_phase"]) and first["by_phase"]["train"]["rss"] > 0
    assert first["children_count"] == 0 and 0 < first["process_anon"] < first["rss"]
    assert first["at_start"]["process_anon"] > 0 and "at_start" not in second
    assert all(x["gpu"] is None for x in lines)
    assert all(x["run"] == "run-1" and x["rank"] == 0 and x["node"] for x in lines)
    assert all(re.search(r"[+-]\d\d:\d\d$", x["time"]) for x in lines)


def test_the_timeline_is_in_storage(trained: Trained) -> None:
    (stored,) = (trained.out / "storage" / "timelines").glob("*/rank0.jsonl.gz")
    kinds = [json.loads(x)["kind"] for x in gzip.decompress(stored.read_bytes()).splitlines()]
    assert kinds[0] == "start" and "stop" in kinds
    step = sorted((trained.out / "storage" / "steps").glob("*/timeline.jsonl.gz"))[-1]
    assert stored.parent.name in step.parent.name
    assert [json.loads(x)["kind"] for x in gzip.decompress(step.read_bytes()).splitlines()].count("window") == 4


def test_checkpoints_lie_in_storage_and_nothing_of_the_sanity_pass_does(trained: Trained) -> None:
    latest = find_latest(str(trained.out / "storage"))
    assert latest is not None and latest.epoch == 2 and latest.finished
    assert {"state.pt", "record.json"} <= set(latest.files)
    assert not [p for p in (trained.out / "storage").rglob("*") if p.is_file() and "sanity" in str(p)]


def test_the_data_is_untouched(trained: Trained) -> None:
    assert sorted(p.name for p in trained.scene.root.iterdir()) == ["images", "train.parquet", "val.parquet"]
    import hashlib

    for split in ("train", "val"):
        for row in read_manifest(getattr(trained.scene, split)).rows():
            assert hashlib.sha256((trained.scene.root / row.image).read_bytes()).hexdigest() == row.sha256


def test_the_weights_name_no_place_of_the_machine(trained: Trained) -> None:
    import zipfile

    with zipfile.ZipFile(trained.out / "model" / "model.pt") as archive:
        content = b"".join(archive.read(n) for n in archive.namelist() if n.endswith(".pkl"))
    assert str(trained.out).encode() not in content and str(trained.scene.root).encode() not in content


def test_the_report_is_one_page_that_escapes_names(trained: Trained, tmp_path: Path) -> None:
    page = report.page(trained.out / "training")
    assert "class/원뿔 (소형)/map50" in page and "Where the time went" in page and "Sanity pass" in page
    assert "not delivered" in page
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?https?:""", page)
    hostile = json.loads((trained.out / "training" / "record.json").read_text())
    hostile["monitors"][0]["monitor"] = "<script>alert(1)</script>"
    hostile["epochs"], hostile["sanity"], hostile["resumed"] = [], {}, {}
    (tmp_path / "record.json").write_text(json.dumps(hostile))
    page = report.page(tmp_path)
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page
    assert "left no record.json" in report.page(tmp_path / "nowhere")
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(InvalidInput, match="no readable training record"):
        report.page(tmp_path)


def test_input_to_change_ends_with_2_before_anything_is_trained(scene: Scene, tmp_path: Path) -> None:
    """Two starts: one that fails before torch is imported, one after."""
    good = TrainingSpec(train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=1)
    done = worker(good.with_changes(monitors=("class/ghots/map50",)), tmp_path / "a")
    assert done.returncode == 2 and "did you mean 'class/ghost/map50'" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    failure = json.loads(done.stdout.split("KFP_GATE_FAILURE ")[1].splitlines()[0])
    assert failure["kind"] == "user" and failure["exit_code"] == 2
    (tmp_path / "b").mkdir()
    bad = tmp_path / "b" / "spec.json"
    bad.write_text('{"epochs": 0}')
    done = subprocess.run(
        [sys.executable, "-m", "kfp_gate.training.worker", "--spec", str(bad), "--out", str(tmp_path)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2 and "missing" in done.stdout and "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "name", ["yolo11n.pt", "yolo99.yaml", "yolo11n.yaml:wdth=1", "yolo11n.yaml:width=x", "", "s3x"]
)
def test_unknown_base_models_are_refused_and_never_downloaded(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput):
        base_model.resolve(name, tmp_path)


def test_a_scaled_variant_is_written_from_the_installed_architecture(tmp_path: Path) -> None:
    import yaml

    path = base_model.resolve("yolo11n.yaml:depth=0.33,width=0.125", tmp_path)
    written = yaml.safe_load(path.read_text())
    assert written["scales"] == {"n": [0.33, 0.125, 1024]} and path.name == "yolo11n.yaml"
    assert base_model.resolve("yolo11n.yaml", tmp_path) == Path("yolo11n.yaml")
