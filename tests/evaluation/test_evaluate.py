"""An evaluation holds what a later judgement needs, survives storage unchanged, and never gives a number it lacks."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.columns import columns
from kfp_gate.evaluation.evaluate import Evaluation, evaluate
from kfp_gate.evaluation.metrics import NotComputed
from kfp_gate.evaluation.predict import Detector, PredictSettings
from kfp_gate.metric_names import parse, per_class

from .conftest import CLASSES, SIZE, Scene, make_manifest, save_checkpoint, tiny_module

SETTINGS = PredictSettings(image_size=SIZE, device="cpu")


@pytest.fixture(scope="module")
def evaluation(scene: Scene) -> Evaluation:
    return evaluate(
        Detector.load(scene.weights), scene.manifest, scene.images, SETTINGS, confidence=0.05, slices=("group",)
    )


def test_every_image_is_there(evaluation: Evaluation, scene: Scene) -> None:
    assert len(evaluation.records) == len(scene.images) == len(evaluation.images)
    assert evaluation.images == tuple(p.name for p in scene.images)
    assert evaluation.settings["image_size"] == SIZE
    assert evaluation.manifest_digest == scene.manifest.digest
    assert len(evaluation.model_sha256) == 64
    assert evaluation.versions["ultralytics"]


def test_storage_changes_nothing(evaluation: Evaluation, tmp_path: Path) -> None:
    evaluation.save(tmp_path / "evaluation")
    back = Evaluation.load(tmp_path / "evaluation")
    for name, column in columns(evaluation.records).items():
        np.testing.assert_array_equal(column, columns(back.records)[name])
    assert dict(back.metrics) == dict(evaluation.metrics)
    fields = [f.name for f in dataclasses.fields(Evaluation) if f.name != "records"]
    assert [getattr(back, f) for f in fields] == [getattr(evaluation, f) for f in fields]


def test_numbers_are_finite_and_names_canonical(evaluation: Evaluation) -> None:
    assert all(math.isfinite(v) for v in evaluation.metrics.numbers().values())
    for name in evaluation.metrics:
        parse(name, classes=CLASSES)
    assert any(name.startswith("slice/group=g0/") for name in evaluation.metrics)
    assert "size/small/map50" in evaluation.metrics


def test_class_without_objects_has_no_accuracy(evaluation: Evaluation) -> None:
    for metric in ("map50", "map50_95", "precision", "recall", "f1"):
        value = evaluation.metrics[per_class(CLASSES[-1], metric)]
        assert isinstance(value, NotComputed) and "no object" in value.reason
    assert isinstance(evaluation.metrics[per_class(CLASSES[-1], "mean_confidence")], float)
    assert evaluation.metrics.instances[f"class/{CLASSES[0]}"] > 0
    assert evaluation.metrics.instances["class/a\\/b"] == 0


def test_slice_equals_an_evaluation_of_its_images(evaluation: Evaluation, scene: Scene) -> None:
    part = scene.images[3:6]
    alone = evaluate(Detector.load(scene.weights), _rows(scene.manifest, 3, 6), part, SETTINGS, confidence=0.05)
    for name, value in alone.metrics.items():
        if not name.startswith("size/") and "/size/" not in name:
            assert evaluation.metrics[f"slice/group=g1/{name}"] == value


def test_classes_go_by_name(evaluation: Evaluation, scene: Scene, tmp_path: Path) -> None:
    """A model that lists the same classes in another order is the same model."""
    order = (CLASSES[1], CLASSES[0], *CLASSES[2:])
    data = make_manifest(scene.images, order)
    found = evaluate(Detector.load(scene.weights), data, scene.images, SETTINGS, confidence=0.05)
    assert found.classes == order
    swapped = np.array([1, 0, 2, 3])[evaluation.records.classes]
    np.testing.assert_array_equal(found.records.classes, swapped)


def test_model_with_other_classes(scene: Scene, tmp_path: Path) -> None:
    classes = (CLASSES[0], CLASSES[1], "stranger")
    detector = Detector.load(save_checkpoint(tiny_module(classes=classes), tmp_path / "model.pt"))
    with pytest.raises(InvalidInput, match="other classes") as caught:
        evaluate(detector, scene.manifest, scene.images, SETTINGS)
    assert "stranger" in str(caught.value) and "50%" in str(caught.value)
    found = evaluate(detector, scene.manifest, scene.images, SETTINGS, other_classes=True)
    assert found.unknown_classes == (CLASSES[2], CLASSES[3])
    assert found.dropped_classes == ("stranger",)
    value = found.metrics[per_class(CLASSES[2], "map50")]
    assert isinstance(value, NotComputed) and "does not know" in value.reason
    assert isinstance(found.metrics["map50"], float)
    assert found.records.classes.max() <= 1


@pytest.mark.parametrize("damage", ["gone", "json", "npz", "schema", "pickle", "length", "column"])
def test_damaged_folder_is_refused(damage: str, evaluation: Evaluation, tmp_path: Path) -> None:
    evaluation.save(tmp_path)
    facts, data = tmp_path / "evaluation.json", tmp_path / "records.npz"
    arrays = dict(columns(evaluation.records))
    if damage == "gone":
        data.unlink()
    elif damage == "json":
        facts.write_text("{")
    elif damage == "npz":
        data.write_bytes(data.read_bytes()[:100])
    elif damage == "schema":
        facts.write_text(json.dumps({**json.loads(facts.read_text()), "schema_version": 99}))
    elif damage == "pickle":
        np.savez(data, **{**arrays, "scores": np.array([{}], object)}, allow_pickle=True)
    elif damage == "length":
        np.savez(data, **{**arrays, "scores": arrays["scores"][1:]})
    else:
        np.savez(data, **arrays, stranger=np.zeros(3))
    with pytest.raises(InvalidInput, match=str(tmp_path)):
        Evaluation.load(tmp_path)


def _rows(manifest, start: int, stop: int):
    return dataclasses.replace(manifest, table=manifest.table.slice(start, stop - start))
