"""With what a model was made, and with what it was judged: shown, and said where it differs."""

import json
from dataclasses import replace

import numpy as np
from detectors import predict_settings
from simulated import evaluation

from kfp_gate.evaluation.model_folder import ModelCard, read_card, read_fingerprints, write_model_folder
from kfp_gate.gate.judging import judge_evaluation
from kfp_gate.gate.origin import Origin, difference, origin_from, origin_of
from kfp_gate.gate.run import GateOutputs, judge, validate
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.verdict import Separation

MADE, NOW = f"sha256:{'a' * 64}", f"sha256:{'b' * 64}"


def test_versions_that_differ_are_named_with_both_sides_and_both_locks():
    card = ModelCard("", ("a",), 64, image_lock=MADE, versions={
        "torch": "2.1.0", "numpy": "2.0.0", "opencv-python-headless": "4.10", "pillow": "11", "mlflow-skinny": "3.0",
    })  # fmt: skip
    origin = origin_of(card, {"KFP_GATE_IMAGE_LOCK": NOW})
    assert origin == origin_from(json.loads(json.dumps(vars(origin))))
    assert "mlflow-skinny" not in origin.versions
    # One OpenCV is as good as the other; ultralytics is named by one side alone.
    now = {"torch": "2.2.0", "numpy": "2.0.0", "opencv-python": "4.10", "pillow": "12", "ultralytics": "8.4"}
    text = difference(origin, now)
    assert "torch 2.1.0 and 2.2.0; pillow 11 and 12." in text
    assert f"Image locks: {MADE} and {NOW}." in text
    assert "numpy" not in text and "opencv" not in text and "ultralytics" not in text


def test_equal_versions_and_unknown_ones_say_nothing():
    assert difference(Origin({"torch": "2.1.0"}, MADE, NOW), {"torch": "2.1.0"}) == ""
    assert difference(Origin(), {"torch": "2.1.0"}) == ""
    assert origin_from(None) == Origin()


def test_a_verdict_shows_both_locks_and_the_difference():
    found = replace(evaluation({"cone": 0.95}), versions={"torch": "2.2.0"})
    verdict = judge_evaluation(
        found, gate_settings(min_map50=0.1), separation=Separation("proven", 1),
        origin=Origin({"torch": "2.1.0"}, MADE, NOW),
    ).verdict  # fmt: skip
    assert verdict.model["image_lock"] == MADE and verdict.versions["image lock"] == NOW
    assert any("torch 2.1.0 and 2.2.0" in note for note in verdict.notes)


def test_judged_again_elsewhere_the_verdict_has_the_same_bytes(place, tmp_path, monkeypatch):
    card = replace(read_card(place.model), versions={"torch": "1.0", "numpy": np.__version__}, image_lock=MADE)
    model = tmp_path / "model"
    write_model_folder(model, place.model / card.weights, card, [read_fingerprints(place.model)])
    assert read_card(model).image_lock == MADE
    monkeypatch.setenv("KFP_GATE_IMAGE_LOCK", NOW)
    settings = gate_settings(min_map50=0.5, confidence=0.02, resamples=200)
    out = GateOutputs(tmp_path / "evaluation", tmp_path / "verdict.json", tmp_path / "report.html")
    notes = validate(model, place.manifest, settings, out, predict=predict_settings()).verdict.notes
    assert any(note.startswith("The model was made with other versions") and "torch 1.0 and" in note for note in notes)
    page = (tmp_path / "report.html").read_text()
    assert MADE in page and NOW in page and "torch 1.0 and" in page
    monkeypatch.delenv("KFP_GATE_IMAGE_LOCK")
    judge(tmp_path / "evaluation", settings, verdict=tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "verdict.json").read_bytes()
    # A gate of before left no origin: nothing is said of it.
    facts = json.loads((tmp_path / "evaluation" / "gate.json").read_text())
    del facts["origin"]
    (tmp_path / "evaluation" / "gate.json").write_text(json.dumps(facts))
    assert not [note for note in judge(tmp_path / "evaluation", settings).verdict.notes if "other versions" in note]
