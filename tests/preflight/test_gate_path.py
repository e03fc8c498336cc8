"""The gate's path is walked before the training, and what breaks in it has a name."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kfp_gate.errors import Broken
from kfp_gate.gate.settings import GateSettings
from kfp_gate.preflight.gate_path import PARTS, import_all, part_of, sample, try_gate
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.preflight.run import find_all

from .conftest import Dataset

SETTINGS = {"image_size": 64, "batch": 4}
MODEL = "yolo11n.yaml:width=0.125,depth=0.33"


@pytest.fixture(autouse=True)
def quiet_upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    import torch

    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "yolo"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_the_whole_path_is_tried_by_preflight(request_for: Callable[..., PreflightRequest]) -> None:
    gate = GateSettings(class_thresholds={"*": {"map50": 0.5}}, decide="confident", champion="")
    checks = find_all(request_for(try_images=3, base_model=MODEL, gate=gate))
    assert [c.what for c in checks if c.level == "error"] == []
    assert "3 train images predicted, judged and reported" in checks[-1].what


def test_base_weights_with_other_classes_are_tried_with_the_data_sets(dataset: Dataset, tmp_path: Path) -> None:
    from kfp_gate.training.base_model import resolve
    from kfp_gate.training.untrained import write_untrained

    weights = tmp_path / "base.pt"
    write_untrained(resolve(MODEL, tmp_path), ["person", "bicycle"], weights)
    train = dataset.manifests["train"]
    assert [c.level for c in try_gate(str(weights), train, GateSettings(), **SETTINGS)] == ["ok"]

    (tmp_path / "broken.pt").write_bytes(weights.read_bytes()[:1000])
    (found,) = try_gate(str(tmp_path / "broken.pt"), train, GateSettings(), **SETTINGS)
    assert found.level == "error"
    assert found.what.startswith("the gate's path breaks in ")


@pytest.mark.parametrize(
    ("module", "name", "part"),
    [
        ("kfp_gate.evaluation.predict", "suppress", "predict"),
        ("kfp_gate.evaluation.evaluate", "Matcher", "evaluation"),
        ("kfp_gate.evaluation.records", "abnormal_bits", "records"),
        ("kfp_gate.evaluation.metrics", "precision_envelope", "metrics"),
        ("kfp_gate.gate.judging", "decide", "verdict"),
        ("kfp_gate.gate.report", "worst_images", "report"),
    ],
)
def test_a_failure_names_the_part_that_broke(
    module: str, name: str, part: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is made to break as a library does that is built for another machine."""
    import importlib

    target = importlib.import_module(module)
    if not hasattr(target, name):
        pytest.fail(f"{module} has no {name} any more: choose another thing to break")

    def breaks(*_: object, **__: object) -> None:
        raise OSError("undefined symbol: _ZN2at")

    monkeypatch.setattr(target, name, breaks)
    (found,) = try_gate(MODEL, dataset.manifests["train"], GateSettings(), **SETTINGS)
    assert found.level == "error"
    assert "undefined symbol" in found.what
    assert found.what.startswith(f"the gate's path breaks in {part}")


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kfp_gate.gate.deciding", raising=False)
    monkeypatch.setitem(sys.modules, "kfp_gate.gate.deciding", None)
    (found,) = import_all()
    assert found.what.startswith("kfp_gate.gate.deciding cannot be imported: ModuleNotFoundError")


def test_the_part_is_that_of_the_innermost_module_of_ours(dataset: Dataset, tmp_path: Path) -> None:
    from kfp_gate.evaluation.letterbox import read_image

    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(Broken) as caught:
        read_image(tmp_path / "x.png")
    assert part_of(caught.value) == "images"
    root = Path(__file__).parents[2] / "src" / "kfp_gate"
    # The table names modules that exist: a renamed one would silently count as something else.
    assert [module for module in PARTS if not (root / f"{module}.py").is_file()] == []


def test_the_sample_is_spread_over_the_images_with_objects(dataset: Dataset) -> None:
    train = dataset.manifests["train"]
    assert len(sample(train, 3)) == 3
    assert len(sample(train, 100)) == len(train)
    import pyarrow as pa

    rows = train.table.to_pylist()
    for row in rows[1:]:
        row["boxes"], row["crowd"] = [], []
    mostly_empty = replace(train, table=pa.Table.from_pylist(rows, schema=train.table.schema))
    few = sample(mostly_empty, 3)
    assert len(few) == 3
    assert rows[0]["image"] in few.table["image"].to_pylist()
