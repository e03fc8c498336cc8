"""One table of everything that would fail later.

The wording is pinned in `snapshots/`; `KFP_GATE_RENEW=1 pytest tests/preflight` writes it anew on purpose.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_gate.errors import InvalidInput, Unavailable
from kfp_gate.gate.settings import GateSettings
from kfp_gate.preflight import tracking_checks
from kfp_gate.preflight.checks import Check, error, markdown, text
from kfp_gate.preflight.criteria_checks import check_names
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.preflight.run import find_all, preflight
from kfp_gate.registry.tracking import connect
from kfp_gate.registry.versions import aliases

from .conftest import Dataset

Request = Callable[..., PreflightRequest]
SNAPSHOTS = Path(__file__).parent / "snapshots"
RENEW = bool(os.environ.get("KFP_GATE_RENEW"))


def snapshot(name: str, found: str, **hidden: object) -> None:
    for word, value in hidden.items():
        found = found.replace(str(value), f"<{word}>")
    found = re.sub(r"\b[0-9a-f]{16}\b", "<digest>", found)
    found = re.sub(r"MLflow [0-9.]+", "MLflow <version>", found)
    found = re.sub(r"[0-9.]+ [KMGT]iB", "<size>", found)
    path = SNAPSHOTS / f"{name}.txt"
    if RENEW:
        path.parent.mkdir(exist_ok=True)
        path.write_text(found + "\n", encoding="utf-8")
    assert path.read_text(encoding="utf-8") == found + "\n"


def errors(checks: list[Check]) -> list[str]:
    return [c.what for c in checks if c.level == "error"]


def test_a_sound_pipeline_has_no_error_and_leaves_no_model_behind(
    request_for: Request, tracking_uri: str, tmp_path: Path
) -> None:
    table = tmp_path / "checks.md"
    checks = preflight(request_for(run_id="r1"), table=table)
    assert not errors(checks)
    assert table.read_text(encoding="utf-8").startswith("# Checks before training\n\n0 errors, ")
    tracking = connect(tracking_uri)
    assert aliases(tracking, "det") is None
    assert list(tracking.client.search_registered_models()) == []


def test_all_problems_are_listed_at_once(
    request_for: Request, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking_checks, "PATIENCE", 0.1)
    (dataset.folder / dataset.manifests["test"].table["image"][0].as_py()).unlink()
    bad = request_for(
        gate=GateSettings(
            bounds={"min_map50": 1.5, "min_mAP": 0.5},
            class_thresholds={"conee": {"map50": 0.5}, "cone": {"mAP50": 0.5}},
        ),
        monitors=["map50_95", "class/cone/mAP50", "class/Cone/map50"],
        registered_model="a/b", alias="latest", tracking_uri="http://127.0.0.1:9", base_model="yolo99.yaml",
        checkpoint_uri=str(tmp_path / "file" / "below"),
    )  # fmt: skip
    (tmp_path / "file").write_text("a file where a folder should be")
    table = tmp_path / "checks.md"
    with pytest.raises(InvalidInput) as caught:
        preflight(bad, table=table)
    snapshot("all_problems", str(caught.value), folder=tmp_path)
    found = table.read_text(encoding="utf-8")
    assert all(word in found for word in ("conee", "mAP50", "a/b", "latest", "127.0.0.1:9", "yolo99"))


@pytest.mark.parametrize("how", ["missing", "not a manifest", "changed"])
def test_a_manifest_that_cannot_be_read_is_one_finding(how: str, request_for: Request, dataset: Dataset) -> None:
    path = dataset.path("test")
    if how == "missing":
        path.unlink()
    elif how == "not a manifest":
        path.write_bytes(b"PAR1 and no more")
    else:
        dataset.change("test", source_uri="/elsewhere")
    found = errors(find_all(request_for()))
    assert len(found) == 1
    assert {"missing": "does not exist", "not a manifest": "no dataset manifest", "changed": "is not there"}[
        how
    ] in found[0]


def test_a_test_split_that_the_gate_would_not_judge_on_is_refused(request_for: Request, dataset: Dataset) -> None:
    import pyarrow as pa

    train, test = dataset.manifests["train"].table, dataset.manifests["test"].table
    same, near, group = (dict(test.to_pylist()[i]) for i in range(3))
    learned = train.to_pylist()
    same["sha256"], same["phash"] = learned[0]["sha256"], learned[0]["phash"]
    near["phash"] = learned[1]["phash"] ^ 1
    group["group"] = learned[2]["group"]
    dataset.change("test", table=pa.Table.from_pylist([same, near, group], schema=test.schema))
    (found,) = errors(find_all(request_for()))
    assert found.startswith(
        "the test split shares 1 images, 1 near-duplicates and 1 images of a group with train and val"
    )
    # A model that exists may have been trained on other images: the gate asks its fingerprints.
    assert not any("shares" in e for e in errors(find_all(request_for(model_uri=str(dataset.folder)))))


def test_a_val_split_from_the_train_images_is_a_warning(request_for: Request, dataset: Dataset) -> None:
    dataset.change("val", table=dataset.manifests["train"].table.slice(0, 3))
    checks = find_all(request_for())
    assert not errors(checks)
    assert any(c.level == "warning" and "the val split shares 3 images" in c.what for c in checks)


def test_splits_that_disagree_on_the_classes_are_refused(request_for: Request, dataset: Dataset) -> None:
    dataset.change("val", classes=("cone", "50%", "원뿔 (소형)"))
    assert "the manifests disagree on the classes" in errors(find_all(request_for()))[0]


def test_a_class_without_evidence_blocks_now_and_not_after_the_training(request_for: Request, dataset: Dataset) -> None:
    thresholds = {"cone": {"map50": {"min": 0.5, "min_instances": 100}}}
    (found,) = errors(find_all(request_for(gate=GateSettings(class_thresholds=thresholds))))
    assert found == "too few objects in the test set: 'cone' has 3 of 100"
    allowed = GateSettings(class_thresholds=thresholds, on_insufficient="allow")
    checks = find_all(request_for(gate=allowed))
    assert not errors(checks)
    assert any(c.level == "warning" and "'cone' has 3 of 100" in c.what for c in checks)

    import pyarrow as pa

    empty = dataset.manifests["test"].table.to_pylist()
    for row in empty:
        row["boxes"], row["crowd"] = [b for b in row["boxes"] if b["class"] != 1], [False, False]
    dataset.change("test", table=pa.Table.from_pylist(empty, schema=dataset.manifests["test"].table.schema))
    checks = find_all(request_for())
    assert errors(checks) == ["too few objects in the test set: '원뿔 (소형)' has 0 of 1"]


def test_a_monitor_that_never_gets_a_value_is_refused(request_for: Request, dataset: Dataset) -> None:
    import pyarrow as pa

    rows = dataset.manifests["val"].table.to_pylist()
    for row in rows:
        row["boxes"], row["crowd"] = row["boxes"][1:], [False, False]
    dataset.change("val", table=pa.Table.from_pylist(rows, schema=dataset.manifests["val"].table.schema))
    found = errors(find_all(request_for(monitors=["class/cone/map50", "map50"])))
    assert found == ["monitor 'class/cone/map50': no object of 'cone' in the validation split"]
    assert "monitors is []" in errors(find_all(request_for(monitors=[])))[0]


def test_an_alias_that_the_registration_could_not_move_is_told_before_the_training(
    request_for: Request, tracking_uri: str
) -> None:
    client = connect(tracking_uri).client
    client.create_registered_model("det")
    client.create_model_version("det", "s3://nowhere/model", tags={"sha256": "00"})
    client.set_registered_model_alias("det", "champion", "1")
    (found,) = errors(find_all(request_for()))
    assert found == "alias 'champion' of 'det' stands at version 1, and the gate compares with nothing"
    compared = GateSettings(class_thresholds={"*": {"map50": 0.5}}, champion="models:/det@champion")
    assert not errors(find_all(request_for(gate=compared)))
    assert not errors(find_all(request_for(alias="")))


def test_storage_is_written_read_and_left_clean(request_for: Request, tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"
    assert not errors(find_all(request_for(checkpoint_uri=str(place))))
    assert list(place.iterdir()) == []


def test_a_worker_image_of_ones_own_is_told(request_for: Request) -> None:
    checks = find_all(request_for(backend="trainjob", worker_image="mine:1", checkpoint_uri=""))
    told = "\n".join(c.what for c in checks if c.level == "warning")
    assert "worker_image 'mine:1' is not the one of this release" in told
    assert "checkpoint_uri is empty" in told


def test_a_gpu_that_is_asked_for_and_not_there_is_an_error(request_for: Request) -> None:
    import torch

    found = errors(find_all(request_for(gate_gpu=True)))
    assert bool(found) != torch.cuda.is_available()


def test_further_checks_run_and_their_failures_are_findings(request_for: Request) -> None:
    def cluster(_: PreflightRequest) -> list[Check]:
        return [error("no permission to create trainjobs", why="x", cure="y")]

    def down(_: PreflightRequest) -> list[Check]:
        raise Unavailable("no answer", expected="an API server", where="cluster", next_step="look")

    def wrong(_: PreflightRequest) -> list[Check]:
        raise KeyError("spec")

    found = errors(find_all(request_for(), [cluster, down, wrong]))
    assert found == ["no permission to create trainjobs", "cluster: no answer", "wrong broke: KeyError: 'spec'"]


def test_class_names_that_meet_in_mlflow_are_told() -> None:
    assert [c.level for c in check_names(["a", "b"])] == ["ok"]
    assert "given twice: 'a'" in check_names(["a", "a"])[0].what
    assert "differ only in case" in check_names(["Car", "car"])[0].what
    assert "are shortened" in check_names(["x" * 300])[0].what
    assert [c.level for c in check_names([f"class {i}" for i in range(200)])] == ["ok"]


def test_the_table_cannot_be_broken_out_of() -> None:
    checks = [error("<script>|\n`x`](http://e)", why="w|", cure="c")]
    assert markdown(checks).splitlines()[-1] == ("| **error** | &lt;script&gt;\\|<br>\\`x\\`\\](http://e) | w\\| | c |")
    assert text(checks).startswith("error    <script>")


def test_a_secret_in_a_finding_is_blanked_out(request_for: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2-hunter2")

    def leaky(_: PreflightRequest) -> list[Check]:
        return [error("said hunter2-hunter2", why="hunter2-hunter2", cure="hunter2-hunter2")]

    assert "hunter2" not in text(find_all(request_for(), [leaky]))
