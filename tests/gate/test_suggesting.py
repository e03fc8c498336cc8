"""Suggested thresholds are what the model passes in the asked share of resamples, all together."""

import numpy as np
import pytest
from simulated import evaluation

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.bootstrap import resample
from kfp_gate.gate.judging import judge_evaluation
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.suggesting import suggest
from kfp_gate.gate.verdict import Separation
from kfp_gate.metric_names import per_class

SKILL = {"cone": 0.95, "car": 0.6, "원뿔 (소형)": 0.8}


def test_the_model_passes_its_own_thresholds_and_a_weaker_one_does_not():
    found = suggest(evaluation(SKILL, images=120), resamples=500)
    assert set(found.class_thresholds) == set(SKILL)
    asked = gate_settings(class_thresholds=found.class_thresholds, min_map50=0)
    proven = Separation("proven", 1)
    assert judge_evaluation(evaluation(SKILL, images=120), asked, separation=proven).verdict.passed
    weaker = evaluation({**SKILL, "car": 0.35}, images=120)
    assert not judge_evaluation(weaker, asked, separation=proven).verdict.passed


def test_all_bounds_hold_together_in_the_asked_share_of_fresh_resamples():
    """Bounds from one seed, tried on the resamples of another: each alone at 95% would hold together far less."""
    skill = {f"c{i}": 0.85 for i in range(8)}
    standard = evaluation(skill, images=80)
    found = suggest(standard, metrics=["recall"], resamples=1000)
    assert 0.95 <= found.share < 0.99
    names = [per_class(c, "recall") for c in skill]
    bounds = np.array([found.class_thresholds[c]["recall"]["min"] for c in skill])
    fresh = resample(standard.records, standard.classes, names, resamples=2000, seed=1).samples
    assert (fresh >= bounds - 1e-9).all(axis=1).mean() > 0.93
    alone = np.quantile(fresh, 0.05, axis=0)
    assert (fresh >= alone).all(axis=1).mean() < 0.75


def test_nothing_is_asked_for_that_the_evidence_cannot_carry():
    """All found so far does not prove that all will be."""
    perfect = evaluation({"cone": 1.0}, images=20, false_rate=0.0)
    bound = suggest(perfect, metrics=["recall"]).class_thresholds["cone"]["recall"]["min"]
    assert 0.85 < bound < 0.98


def test_what_cannot_be_asked_for_is_named():
    found = suggest(evaluation({**SKILL, "absent": 0.9}, absent=("absent",)), resamples=200)
    assert "absent" not in found.class_thresholds
    assert "absent: AP50 was not computed" in found.notes
    rates = suggest(evaluation(SKILL), metrics=["abnormal_box_rate"], resamples=200)
    assert set(rates.class_thresholds["cone"]["abnormal_box_rate"]) == {"max"}


def test_bad_questions():
    with pytest.raises(InvalidInput):
        suggest(evaluation(SKILL), metrics=["map5"])
    with pytest.raises(InvalidInput):
        suggest(evaluation(SKILL), share=1.0)
    with pytest.raises(InvalidInput, match="no class with enough evidence"):
        suggest(evaluation({"only": 0.9}, absent=("only",)))
