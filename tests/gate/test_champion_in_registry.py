"""The loop that a team lives in: the first model is registered, the next one is compared with it."""

from functools import partial

import pytest
from detectors import predict_settings

from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.gate.run import GateOutputs, validate
from kfp_gate.gate.settings import gate_settings
from kfp_gate.registry.fetch import fetch_rival
from kfp_gate.registry.register import register_model

pytestmark = pytest.mark.all_only

URI = "models:/detector@champion"


def test_first_model_then_a_weaker_then_the_same(place, tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    tracking_uri = f"sqlite:///{tmp_path}/mlflow.db"

    def gate(model, name):
        out = GateOutputs(
            tmp_path / name / "evaluation", tmp_path / name / "verdict.json", tmp_path / name / "report.html"
        )
        asked = gate_settings(
            min_map50=0.5, confidence=0.02, resamples=200, champion=URI,
            class_thresholds={"overall": {"map50": {"max_drop": 0.05}}},
        )  # fmt: skip
        fetch = partial(fetch_rival, tracking_uri=tracking_uri)
        return validate(model, place.manifest, asked, out, predict=predict_settings(), fetch=fetch).verdict, out

    first, out = gate(place.model, "first")
    assert first.passed
    assert (first.champion.state, first.champion.uri) == ("none", URI)
    register_model(
        place.model, out.verdict, tracking_uri=tracking_uri, experiment="gate", name="detector", alias="champion",
        report=out.report,
    )  # fmt: skip

    weaker, _ = gate(place.weak, "weaker")
    assert not weaker.passed
    assert (weaker.champion.state, weaker.champion.sha256) == ("compared", read_card(place.model).sha256)
    assert weaker.champion.separation.state == "proven"
    assert [e.state for e in weaker.entries] == ["missed", "missed"]

    same, _ = gate(place.model, "same")
    assert same.passed
    assert same.entries[1].drop == 0.0
