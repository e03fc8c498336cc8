"""One criterion, one piece of evidence, one state: what decides, what does not, and how much is missing."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.gate.criteria import Criterion
from kfp_gate.gate.deciding import Evidence, Rule, corrected_level, decide

LOW = Criterion("class/cone/map50", "min", 0.8)
HIGH = Criterion("abnormal_box_rate", "max", 0.1)
DROP = Criterion("class/cone/map50", "max_drop", 0.02)
POINT, CONFIDENT = Rule("point"), Rule("confident")


def test_point_compares_the_value():
    assert decide(LOW, Evidence(0.8, instances=5), POINT).state == "met"
    assert decide(LOW, Evidence(0.799, instances=5), POINT).state == "missed"
    assert decide(HIGH, Evidence(0.1), POINT).state == "met"
    assert decide(HIGH, Evidence(0.11), POINT).state == "missed"


def test_rounding_of_the_last_bit_decides_nothing():
    assert 0.52 - 0.5 > 0.02
    assert decide(DROP, Evidence(0.5, champion=0.52), POINT).state == "met"


def test_too_few_instances_decide_nothing_and_say_how_many_are_missing():
    entry = decide(Criterion("map50", "min", 0.5, min_instances=20), Evidence(0.9, instances=13), POINT)
    assert (entry.state, entry.needed, entry.reason) == ("insufficient", 7, "13 of 20 instances")


# The holes of MLflow's MetricThreshold that are about values.


@pytest.mark.parametrize("criterion", [LOW, HIGH, DROP])
def test_a_value_that_was_not_computed_never_passes(criterion):
    entry = decide(criterion, Evidence(None, "no object of this kind in the images", instances=0), POINT)
    assert entry.state == "insufficient"
    assert "no object" in entry.reason


@pytest.mark.parametrize("rule", [POINT, CONFIDENT])
@pytest.mark.parametrize("criterion", [LOW, HIGH, DROP])
def test_nan_is_never_met(criterion, rule):
    evidence = Evidence(math.nan, instances=50, interval=(math.nan, math.nan), champion=0.5)
    assert decide(criterion, evidence, rule).state != "met"


@pytest.mark.parametrize("rule", [POINT, CONFIDENT])
def test_a_champion_without_a_value_never_passes(rule):
    assert decide(DROP, Evidence(0.9, instances=99, champion=math.nan), rule).state != "met"
    entry = decide(DROP, Evidence(0.9, instances=99, no_champion="the champion saw test images"), rule)
    assert (entry.state, entry.reason) == ("insufficient", "the champion saw test images")


def test_the_first_model_ever_has_nothing_to_drop_from():
    entry = decide(DROP, Evidence(0.9, instances=99, first=True, no_champion="no champion yet"), POINT)
    assert (entry.state, entry.reason, entry.drop) == ("met", "no champion yet", None)


def test_drop_has_the_direction_of_the_metric():
    assert decide(DROP, Evidence(0.6, champion=0.7), POINT).drop == pytest.approx(0.1)
    rate = Criterion("abnormal_box_rate", "max_drop", 0.02)
    assert decide(rate, Evidence(0.3, champion=0.1, lower_is_better=True), POINT).state == "missed"
    assert decide(rate, Evidence(0.1, champion=0.3, lower_is_better=True), POINT).state == "met"


def test_a_silent_model_misses_a_lower_bound_and_proves_nothing_about_an_upper_one():
    silent = Evidence(None, "no detection at this confidence", instances=40, silent=True)
    assert decide(Criterion("precision", "min", 0.5), silent, POINT).state == "missed"
    assert decide(HIGH, silent, POINT).state == "insufficient"


def test_a_silent_model_has_dropped_from_a_champion_that_found_something():
    silent = Evidence(None, "no detection at this confidence", instances=40, silent=True, champion=0.9)
    assert decide(Criterion("precision", "max_drop", 0.1), silent, POINT).state == "missed"
    alone = Evidence(None, "no detection at this confidence", instances=40, silent=True, no_champion="not named")
    assert decide(Criterion("precision", "max_drop", 0.1), alone, POINT).state == "insufficient"
    lower = Evidence(None, "none", instances=40, silent=True, champion=0.9, lower_is_better=True)
    assert decide(Criterion("abnormal_box_rate", "max_drop", 0.1), lower, POINT).state == "insufficient"


def test_confident_wants_the_interval_on_one_side():
    wide, narrow_high, narrow_low = (0.7, 0.95), (0.82, 0.9), (0.7, 0.78)
    assert decide(LOW, Evidence(0.85, instances=4000, interval=wide), CONFIDENT).state == "insufficient"
    assert decide(LOW, Evidence(0.85, instances=4000, interval=narrow_high), CONFIDENT).state == "met"
    assert decide(LOW, Evidence(0.75, instances=4000, interval=narrow_low), CONFIDENT).state == "missed"


def test_how_many_more_is_what_the_root_law_says():
    entry = decide(LOW, Evidence(0.85, instances=1000, interval=(0.75, 0.92)), CONFIDENT)
    assert entry.needed == pytest.approx(3000, abs=2)  # twice the reach on the bound's side: four times as many
    at_bound = decide(LOW, Evidence(0.8, instances=1000, interval=(0.75, 0.85)), CONFIDENT)
    assert (at_bound.state, at_bound.needed) == ("insufficient", None)


def test_bonferroni():
    assert corrected_level(0.95, 200, "none") == 0.95
    assert corrected_level(0.95, 200, "bonferroni") == pytest.approx(1 - 0.05 / 200)


@given(
    st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.integers(0, 10_000), st.sampled_from([LOW, HIGH]),
    st.sampled_from([POINT, CONFIDENT]),
)  # fmt: skip
def test_states_agree_with_the_numbers(value, a, b, instances, criterion, rule):
    entry = decide(criterion, Evidence(value, instances=instances, interval=(min(a, b), max(a, b))), rule)
    assert entry.state in ("met", "missed", "insufficient")
    if rule is POINT:
        assert (entry.state == "met") == (entry.margin >= -1e-9)
    elif entry.state != "insufficient":
        # A confident answer is never against the point.
        low, high = entry.interval
        side = low if criterion.kind == "min" else criterion.bound - high
        assert (entry.state == "met") == (side >= (criterion.bound if criterion.kind == "min" else 0) - 1e-9)
    assert entry.needed is None or entry.needed > 0
