"""The gate end to end, with a real detector: passed, refused, broken, and judged again."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from detectors import CLASSES, SIZE, UNSEEN, checkpoint, fingerprints, predict_settings

import kfp_gate.gate
from kfp_gate.data.manifest import read_manifest, write_manifest
from kfp_gate.errors import Broken, InvalidInput, KfpGateError
from kfp_gate.evaluation.columns import ABSURD
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.model_folder import ModelCard, read_card, write_model_folder
from kfp_gate.gate.run import GateOutputs, judge, validate
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.verdict import read_verdict
from kfp_gate.gate.wording import warnings

SCHEMA = json.loads(Path(kfp_gate.gate.__file__).with_name("verdict.schema.json").read_text())


def settings(**more):
    return gate_settings(**{"min_map50": 0.5, "confidence": 0.02, "resamples": 200, **more})


def run(place, model, tmp_path, *, manifest=None, predict=None, fetch=None, **more):
    out = GateOutputs(tmp_path / "evaluation", tmp_path / "verdict.json", tmp_path / "report.html", tmp_path / "work")
    return validate(
        model, manifest or place.manifest, settings(**more), out, predict=predict or predict_settings(), fetch=fetch
    )


def artifacts(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and "work" not in p.parts}


FOUR = {"verdict.json", "report.html", "evaluation/evaluation.json", "evaluation/records.npz", "evaluation/gate.json"}


def test_a_good_model_passes(place, tmp_path):
    judged = run(place, place.model, tmp_path)
    assert judged.verdict.passed is True
    assert artifacts(tmp_path) == FOUR
    verdict = read_verdict(tmp_path / "verdict.json")
    assert verdict == judged.verdict
    jsonschema.validate(json.loads((tmp_path / "verdict.json").read_text()), SCHEMA)
    assert verdict.separation.state == "proven"
    assert verdict.model == {
        "sha256": read_card(place.model).sha256, "classes": list(CLASSES), "run_id": "run-0",
    }  # fmt: skip
    # An average hides the small class: all of them are named, and first.
    assert verdict.ungated == CLASSES
    assert "no criterion of their own" in warnings(verdict)[0]


def test_a_weak_model_is_refused_with_all_artifacts(place, tmp_path):
    judged = run(place, place.weak, tmp_path)
    assert judged.verdict.passed is False
    assert artifacts(tmp_path) == FOUR
    jsonschema.validate(json.loads((tmp_path / "verdict.json").read_text()), SCHEMA)
    assert [e.state for e in judged.verdict.entries] == ["missed"]


def test_boxes_are_held_against_the_shapes_of_the_training_set(place, tmp_path):
    """A model that was trained on boxes of a hundredth of the size reports boxes that are absurd for it."""
    card = read_card(place.model)
    tiny = {
        "area": [[1e-6, 1e-5]] * len(CLASSES),
        "aspect": [[0.1, 10.0]] * len(CLASSES),
        "counts": [50] * len(CLASSES),
    }
    folder = shutil.copytree(place.model, tmp_path / "model")
    write_model_folder(folder, folder / card.weights, replace(card, boxes=tiny))
    run(place, place.model, tmp_path / "unknown")
    run(place, folder, tmp_path / "tiny")
    found = [Evaluation.load(tmp_path / name / "evaluation").records for name in ("unknown", "tiny")]
    absurd = [int(((records.bits & ABSURD) != 0).sum()) for records in found]
    assert absurd == [0, len(found[1].bits)]


# Broken, each with one message.


def vanished(place, folder):
    images = shutil.copytree(place.folder / "images", folder / "images")
    sorted(images.iterdir())[3].unlink()
    return {"manifest": moved(place, folder, images)}


def changed(place, folder):
    images = shutil.copytree(place.folder / "images", folder / "images")
    path = sorted(images.iterdir())[3]
    data = bytearray(path.read_bytes())
    data[-20] ^= 255  # as long as before
    path.write_bytes(data)
    return {"manifest": moved(place, folder, images)}


def moved(place, folder, images):
    path = folder / "moved.parquet"
    write_manifest(replace(read_manifest(place.manifest), source_uri=str(images)), path)
    return path


def empty(place, folder):
    test = read_manifest(place.manifest)
    write_manifest(replace(test, table=test.table.slice(0, 0)), folder / "empty.parquet")
    return {"manifest": folder / "empty.parquet"}


def garbage(place, folder):
    (folder / "bad.pt").write_bytes(b"not a checkpoint")
    write_model_folder(folder / "model", folder / "bad.pt", ModelCard("", CLASSES, SIZE), [fingerprints(UNSEEN)])
    return {"model": folder / "model"}


def swapped(place, folder):
    shutil.copytree(place.model, folder / "model")
    shutil.copyfile(place.weak / "model.pt", folder / "model" / "model.pt")
    return {"model": folder / "model"}


def other_classes(place, folder):
    write_model_folder(
        folder / "model", checkpoint(folder / "w.pt", classes=("dog", "cone")), ModelCard("", ("dog", "cone"), SIZE),
        [fingerprints(UNSEEN)],
    )  # fmt: skip
    return {"model": folder / "model"}


def not_finite(place, folder):
    import torch

    saved = torch.load(place.model / "model.pt", weights_only=False)  # our own file of a minute ago
    saved["ema"].model[0].conv.weight.data.fill_(float("nan"))
    torch.save(saved, folder / "nan.pt")
    write_model_folder(folder / "model", folder / "nan.pt", ModelCard("", CLASSES, SIZE), [fingerprints(UNSEEN)])
    return {"model": folder / "model"}


def out_of_time(place, folder):
    return {"predict": replace(predict_settings(), nms_seconds=0.0)}


def overlap(place, folder):
    row = next(read_manifest(place.manifest).rows())
    write_model_folder(
        folder / "model", place.model / "model.pt", ModelCard("", CLASSES, SIZE), [fingerprints([(row.sha256, 0, "")])]
    )
    return {"model": folder / "model"}


def unproven(place, folder):
    return {"model": place.model / "model.pt"}


def probed(place, folder):
    model = ModelCard("", CLASSES, SIZE, settings={"probe_steps": 60})
    write_model_folder(folder / "model", place.model / "model.pt", model, [fingerprints(UNSEEN)])
    return {"model": folder / "model"}


def unknown_class(place, folder):
    # There is no such model either: the criteria are read before it is.
    return {"model": folder / "none", "class_thresholds": {"cnoe": {"map50": 0.5}}}


FAULTS = [
    (vanished, KfpGateError, "프레임"),
    (changed, KfpGateError, "프레임"),
    (empty, InvalidInput, "without images"),
    (garbage, InvalidInput, "model.pt"),
    (swapped, Broken, "as the card says"),
    (other_classes, InvalidInput, "other classes"),
    (not_finite, Broken, "finite"),
    (out_of_time, Broken, "time|second"),
    (overlap, Broken, "seen test images"),
    (unproven, InvalidInput, "without fingerprints"),
    (probed, InvalidInput, "a model of a probe .probe_steps 60."),
    (unknown_class, InvalidInput, "did you mean 'cone'"),
]


@pytest.mark.parametrize(("fault", "kind", "text"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_what_cannot_be_judged_is_broken_and_not_refused(place, tmp_path, fault, kind, text):
    more = {"model": place.model, **fault(place, tmp_path)}
    with pytest.raises(kind, match=text) as caught:
        run(place, more.pop("model"), tmp_path / "out", **more)
    assert "next step:" in str(caught.value)
    assert not (tmp_path / "out" / "verdict.json").exists()


def test_bare_weights_are_judged_if_the_caller_says_so_and_the_verdict_says_not_proven(place, tmp_path):
    judged = run(place, place.model / "model.pt", tmp_path, allow_unproven_separation=True)
    assert judged.verdict.passed
    assert judged.verdict.separation.state == "not proven"
    assert "Separation is not proven" in warnings(judged.verdict)[0]


# The champion.

DROP = {"overall": {"map50": {"max_drop": 0.02}}}


def test_the_champion_is_evaluated_again_on_the_same_images(place, tmp_path):
    judged = run(place, place.weak, tmp_path, champion=str(place.model), class_thresholds=DROP, min_map50=0)
    (entry,) = judged.verdict.entries
    assert (entry.state, judged.verdict.champion.state) == ("missed", "compared")
    assert entry.champion > 0.8
    assert entry.drop == pytest.approx(entry.champion - entry.value)
    low, high = entry.interval
    assert low <= entry.drop <= high
    assert {"evaluation/champion/records.npz"} < artifacts(tmp_path)


def test_the_first_model_ever_has_no_champion_and_that_is_no_error(place, tmp_path):
    asked = []
    judged = run(
        place, place.model, tmp_path, champion="models:/cones@champion", class_thresholds=DROP,
        fetch=lambda uri, folder: asked.append(uri),
    )  # fmt: skip
    assert asked == ["models:/cones@champion"]
    assert judged.verdict.passed
    assert judged.verdict.champion.state == "none"


def test_a_champion_that_saw_test_images_is_named_and_not_compared(place, tmp_path):
    champion = overlap(place, tmp_path)["model"]
    judged = run(place, place.model, tmp_path / "out", champion=str(champion), class_thresholds=DROP)
    assert judged.verdict.champion.state == "not compared"
    assert "saw test images" in judged.verdict.champion.reason
    assert [e.state for e in judged.verdict.entries] == ["met", "insufficient"]
    assert not judged.verdict.passed


def test_a_champion_with_other_classes_is_compared_on_the_common_ones(place, tmp_path):
    classes = (CLASSES[3], "dog", "cone")
    write_model_folder(
        tmp_path / "model", checkpoint(tmp_path / "w.pt", classes=classes), ModelCard("", classes, SIZE),
        [fingerprints(UNSEEN)],
    )  # fmt: skip
    judged = run(place, place.model, tmp_path / "out", champion=str(tmp_path / "model"), class_thresholds=DROP)
    assert judged.verdict.champion.common_classes == ("cone", CLASSES[3])
    assert "other classes (lacks: 원뿔 (소형), 50%; adds: dog)" in " ".join(judged.verdict.notes)


def test_a_champion_without_a_common_class_is_not_compared(place, tmp_path):
    write_model_folder(
        tmp_path / "model", checkpoint(tmp_path / "w.pt", classes=("dog",)), ModelCard("", ("dog",), SIZE),
        [fingerprints(UNSEEN)],
    )  # fmt: skip
    judged = run(place, place.model, tmp_path / "out", champion=str(tmp_path / "model"))
    assert judged.verdict.champion.state == "not compared"
    assert judged.verdict.passed


# Judged again.


def test_judging_again_gives_the_same_bytes_and_other_settings_another_verdict(place, tmp_path):
    more = {"champion": str(place.weak), "class_thresholds": DROP, "decide": "confident"}
    first = run(place, place.model, tmp_path, **more)
    del more["champion"]  # it lies with the evaluation
    again = judge(tmp_path / "evaluation", settings(**more), verdict=tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "verdict.json").read_bytes()
    assert again.verdict == first.verdict
    strict = judge(
        tmp_path / "evaluation", settings(min_map50_95=0.999), verdict=tmp_path / "v.json",
        report_file=tmp_path / "r.html",
    )  # fmt: skip
    assert not strict.verdict.passed
    assert "holds no images" in (tmp_path / "r.html").read_text()


def test_judging_again_needs_no_torch(place, tmp_path):
    run(place, place.model, tmp_path)
    program = f"""
import sys
from pathlib import Path
from kfp_gate.gate.run import judge
from kfp_gate.gate.settings import gate_settings
folder = Path({str(tmp_path)!r})
judged = judge(folder / "evaluation", gate_settings(min_map50=0.5, confidence=0.02), report_file=folder / "r.html")
assert judged.verdict.passed
loaded = [m for m in ("torch", "ultralytics", "cv2", "hotcoco", "mlflow", "kfp") if m in sys.modules]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


@pytest.mark.parametrize("file", ["evaluation.json", "records.npz", "gate.json"])
def test_a_damaged_evaluation_is_an_input_error(place, tmp_path, file):
    run(place, place.model, tmp_path)
    path = tmp_path / "evaluation" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(InvalidInput):
        judge(tmp_path / "evaluation", settings())


def test_a_waiver_lets_exactly_this_model_pass(place, tmp_path):
    from datetime import date

    waiver = {
        "criterion": "map50:min", "model": read_card(place.weak).sha256, "who": "A. Person", "why": "pilot",
        "expires": "2999-01-01",
    }  # fmt: skip
    judged = run(place, place.weak, tmp_path, waivers=[waiver])
    assert (judged.verdict.passed, judged.verdict.entries[0].state) == (True, "waived")
    jsonschema.validate(json.loads((tmp_path / "verdict.json").read_text()), SCHEMA)
    assert "A. Person" in (tmp_path / "report.html").read_text()
    late = judge(tmp_path / "evaluation", settings(waivers=[waiver]), today=date(2999, 1, 2))
    assert not late.verdict.passed
    assert "expired on 2999-01-01" in " ".join(warnings(late.verdict))


def test_a_picture_that_cannot_be_opened_does_not_cost_the_report(place, tmp_path):
    """Upstream replaces Pillow's open: on an unknown file it imports a plugin that is not there."""
    import ultralytics.utils.patches
    from PIL import Image

    from kfp_gate.evaluation.evaluate import Evaluation
    from kfp_gate.gate.thumbnails import worst_images

    assert Image.open is ultralytics.utils.patches.image_open
    run(place, place.weak, tmp_path)
    found = Evaluation.load(tmp_path / "evaluation")
    (tmp_path / "broken.png").write_bytes(b"cut")
    assert worst_images(found, [tmp_path / "broken.png"] * len(found.images), confidence=0.02) == []
