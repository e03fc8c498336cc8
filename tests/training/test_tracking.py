"""Tracking against a real server: bad names, values that are none, and outages at every moment."""

import gzip
import json
import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from registry.server import Server
from typer.testing import CliRunner

from kfp_gate.metric_names import from_mlflow, per_class
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.tracking import PIPELINE_RUN_TAG, ROLE_TAG, Tracker

from .launch import start
from .scene import SCALED, make_scene

pytestmark = pytest.mark.all_only

HOSTILE = ("a@b", "50%", "cone (parked)", "원뿔 (소형)", "a/b", "..", "a,b#c", " ", "x" * 300)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file whose migrations have run: they take longer than all tests here."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("prepared") / "mlflow.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def server(prepared: Path, tmp_path: Path) -> Iterator[Server]:
    found = Server(tmp_path / "server", prepared)
    yield found
    found.stop()


def tracker(server: Server, tmp_path: Path, **more: object) -> Tracker:
    return Tracker(uri=server.uri, experiment="e", spool=tmp_path / "spool.jsonl", **more)  # type: ignore[arg-type]


def metrics_of(server: Server, run_id: str) -> dict[str, list[tuple[int, float]]]:
    """Straight from the server's database: what is really there."""
    rows = sqlite3.connect(server.folder / "mlflow.db").execute(
        "select key, step, value from metrics where run_uuid = ? order by key, step", (run_id,)
    )
    found: dict[str, list[tuple[int, float]]] = {}
    for key, step, value in rows:
        found.setdefault(key, []).append((step, value))
    return found


def test_hostile_names_and_values_cost_nothing_but_themselves(server: Server, tmp_path: Path) -> None:
    server.start()
    track = tracker(server, tmp_path, params={"epochs": 3, "long": "x" * 9000}, tags={ROLE_TAG: "training"})
    names = [per_class(c, "map50") for c in HOSTILE]
    values: dict[str, float | None] = {n: 0.01 * i for i, n in enumerate(names)}
    track.log({**values, "nan": math.nan, "inf": math.inf, "none": None, "map50": 0.5}, step=1)
    assert track.flush(60)
    # A name that did not go through the map, as other code may send it: the server refuses the whole batch.
    track._add(("metrics", [["good", 1.0, 1, 2], ["bad@name", 1.0, 1, 2], ["also good", 2.0, 1, 2]]))
    delivery = track.close(status="FINISHED")
    found = metrics_of(server, track.run_id)
    decoded = {from_mlflow(k, track._names): v[0][1] for k, v in found.items() if k not in ("good", "also good")}
    assert decoded == {**values, "map50": 0.5}
    assert found["good"] == [(2, 1.0)] and found["also good"] == [(2, 2.0)]
    assert list(delivery.refused) == ["bad@name"] and delivery.not_finite == {"nan": 1, "inf": 1}
    assert delivery.waiting == 0 and delivery.delivered == len(names) + 3
    # The same run goes on after a resume with other settings: MLflow keeps parameters for good, and takes the values.
    again = tracker(server, tmp_path, run_id=track.run_id, params={"epochs": 4, "patience": 2})
    again.log({"map50": 0.7}, step=2)
    delivery = again.close(status="FINISHED")
    assert list(delivery.refused) == ["epochs"] and delivery.waiting == 0
    assert metrics_of(server, track.run_id)["map50"] == [(1, 0.5), (2, 0.7)]


def test_a_server_that_is_down_at_first_then_in_the_middle_gets_every_value_once(
    server: Server, tmp_path: Path
) -> None:
    track = tracker(server, tmp_path)
    track.log({"map50": 0.1}, step=1)
    assert not track.flush(3) and track.run_id == ""
    server.start()
    track.log({"map50": 0.2}, step=2)
    assert track.flush(60)
    server.kill()
    started = time.monotonic()
    for step in range(3, 60):
        track.log({"map50": 0.001 * step}, step=step)
    assert time.monotonic() - started < 5, "an outage must not hold training"
    server.start()
    delivery = track.close(status="FINISHED", timeout_s=90)
    assert delivery.waiting == 0
    found = metrics_of(server, track.run_id)["map50"]
    assert [s for s, _ in found] == list(range(1, 60))
    assert not (tmp_path / "spool.jsonl").exists()


def test_what_was_never_delivered_is_delivered_later_from_the_spool(server: Server, tmp_path: Path) -> None:
    track = tracker(server, tmp_path)
    track.log({"map50": 0.1, "class/a@b/recall": 0.2}, step=1)
    delivery = track.close(status="FINISHED", timeout_s=3)
    assert delivery.waiting >= 2 and "not delivered" in delivery.text()
    spool = tmp_path / "spool.jsonl"
    assert spool.is_file()
    server.start()
    from kfp_gate.cli import app

    with spool.open("a", encoding="utf-8") as handle:
        handle.write('["metric", {"na')  # cut by the end of its process
    done = CliRunner().invoke(app, ["deliver", str(spool), "--tracking-uri", server.uri, "--experiment", "e"])
    assert (done.exit_code, done.stdout) == (0, "2 values delivered\n")
    keys = [k for (k,) in sqlite3.connect(server.folder / "mlflow.db").execute("select key from metrics")]
    assert sorted(from_mlflow(k) for k in keys) == ["class/a@b/recall", "map50"]


def test_delivering_later_needs_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kfp_gate.cli import app
    from kfp_gate.errors import InvalidInput

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    done = CliRunner().invoke(app, ["deliver", str(tmp_path / "spool.jsonl")])
    assert isinstance(done.exception, InvalidInput) and "--tracking-uri" in str(done.exception)


def test_the_run_lies_below_the_pipelines(server: Server, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    server.start()
    client = MlflowClient(server.uri)
    experiment = client.create_experiment("e")
    parent = client.create_run(experiment, tags={PIPELINE_RUN_TAG: "p7", ROLE_TAG: "pipeline"}).info.run_id
    track = tracker(server, tmp_path, tags={PIPELINE_RUN_TAG: "p7", ROLE_TAG: "training"})
    track.log({"map50": 1.0}, step=1)
    track.close(status="FINISHED")
    run = client.get_run(track.run_id)
    assert run.data.tags["mlflow.parentRunId"] == parent and run.info.status == "FINISHED"


def test_a_failing_rank_leaves_its_evidence_in_the_run(server: Server, tmp_path: Path) -> None:
    """A whole training on two ranks: what rank 0 logged, and the failure files of both ranks."""
    from mlflow import MlflowClient

    server.start()
    home = tmp_path / "ranks"
    scene = make_scene(home / "data", train=8, val=4, classes=("a@b (50%)", "plain"))
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=9, image_size=64,
        batch=4, monitors=("map50_95", per_class("a@b (50%)", "map50")), run_id="p9",
        tracking_uri=server.uri, experiment="e", checkpoint_uri=str(home / "storage"), overrides={"optimizer": "AdamW"},
    )  # fmt: skip
    (home / "spec.json").write_text(spec.to_json())
    plan = [{"spec": str(home / "spec.json"), "fault": "rank_1_raises_in_epoch_2"}]
    ranks = start(home, scene.root, plan, ranks=2).wait()
    assert [r.code for r in ranks] == [1, 1], ranks[0].output[-2000:]
    assert ranks[1].failure["kind"] == "broken" and ranks[0].failure == {**ranks[0].failure, "kind": "peer", "peer": 1}
    client = MlflowClient(server.uri)
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert run.info.status == "FAILED" and run.data.tags[PIPELINE_RUN_TAG] == "p9"
    assert "made by the test" in run.data.tags["kfp_gate.failure"]
    names = {from_mlflow(k) for k in run.data.metrics}
    assert {"map50_95", "class/a@b (50%)/map50", "train/box_loss"} <= names
    kept = {a.path for a in client.list_artifacts(run.info.run_id, "evidence")}
    assert kept == {"evidence/failure-rank0.json", "evidence/failure-rank1.json"}
    kept = {a.path for a in client.list_artifacts(run.info.run_id, "training")}
    assert kept == {"training/timeline-rank0.jsonl.gz", "training/record.json"}
    stored = sorted((home / "storage" / "timelines").glob("*/rank*.jsonl.gz"))
    assert [p.name for p in stored] == ["rank0.jsonl.gz", "rank1.jsonl.gz"]
    for path in stored:
        assert json.loads(gzip.decompress(path.read_bytes()).splitlines()[-1])["kind"] in ("failure", "sample")
    for rank in ranks:
        assert "hunter22" not in rank.output
    assert sorted(p.name for p in (home / "storage" / "evidence").glob("failure-*")) == [
        "failure-rank0.json",
        "failure-rank1.json",
    ]


def test_without_an_address_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track = Tracker(uri="", experiment="e", spool=tmp_path / "spool.jsonl")
    track.log({"map50": 1.0}, step=1)
    assert not track.active and track.close(status="FINISHED").text() == "0 values delivered"
    assert not (tmp_path / "spool.jsonl").exists()
