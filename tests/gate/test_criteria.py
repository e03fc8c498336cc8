"""Criteria are read whole, checked before anything is predicted, and fail closed."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import InvalidInput
from kfp_gate.gate.criteria import parse_criteria
from kfp_gate.gate.settings import GateSettings, gate_settings
from kfp_gate.metric_names import LOWER_IS_BETTER, METRICS, parse

CLASSES = ("cone", "car (parked)", "원뿔 (소형)", "50%", "a/b")


def ids(bounds=None, thresholds=None, **more):
    return {c.id: c for c in parse_criteria(bounds or {}, thresholds or {}, CLASSES, **more).entries}


def refused(bounds=None, thresholds=None, **more) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        parse_criteria(bounds or {}, thresholds or {}, CLASSES, **more)
    return caught.value


def test_flat_bounds_and_always_true_ones_are_off():
    found = ids({"min_map50": 0.5, "min_recall": 0.0, "max_abnormal_box_rate": 1.0, "max_undetected_image_rate": 0.2})
    assert {k: c.bound for k, c in found.items()} == {"map50:min": 0.5, "undetected_image_rate:max": 0.2}


def test_bare_number_means_min_and_star_means_each_class():
    found = ids(thresholds={"*": {"recall": 0.5}, "cone": {"recall": 0.9}, "50%": {"recall": 0}})
    assert {k: c.bound for k, c in found.items()} == {
        "class/cone/recall:min": 0.9,
        "class/car (parked)/recall:min": 0.5,
        "class/원뿔 (소형)/recall:min": 0.5,
        r"class/a\/b/recall:min": 0.5,
    }


def test_a_class_whose_criteria_are_all_off_is_ungated():
    criteria = parse_criteria({"min_map50": 0.5}, {"cone": {"map50": 0.8}, "50%": {"map50": 0.0}}, CLASSES)
    assert criteria.ungated == ("car (parked)", "원뿔 (소형)", "50%", "a/b")


def test_own_entry_wins_over_star_whatever_the_order():
    for keys in (("*", "cone"), ("cone", "*")):
        bounds = {"*": {"map50": 0.5}, "cone": {"map50": 0.8}}
        assert ids(thresholds={k: bounds[k] for k in keys})["class/cone/map50:min"].bound == 0.8


def test_a_star_in_a_name_is_a_letter_and_the_narrower_key_wins():
    """Sorted as a wide key, the class `a*` was overwritten by what `*` says: 0.3 instead of 0.8 let it pass."""
    for key in ("a*", "class/a*"):
        both = {key: {"map50": 0.8}, "*": {"map50": 0.3}}
        for thresholds in (both, dict(reversed(both.items()))):
            found = parse_criteria({}, thresholds, ("a*", "b")).entries
            assert {c.metric: c.bound for c in found} == {"class/a*/map50": 0.8, "class/b/map50": 0.3}
    both = {"slice/sky=rain/class/*": {"map50": 0.9}, "slice/sky=*/class/*": {"map50": 0.5}}
    for thresholds in (both, dict(reversed(both.items()))):
        found = parse_criteria({}, thresholds, ("b",), slices={"sky": ["dry", "rain"]}).entries
        assert {parse(c.metric).slice: c.bound for c in found} == {"sky=rain": 0.9, "sky=dry": 0.5}


@pytest.mark.parametrize("huge", [10**400, -(10**400)])
def test_a_number_too_large_for_a_float_is_a_problem_like_others(huge):
    wrong = {"cone": {"map50": huge, "recall": {"min": 0.5, "min_instances": huge}, "f1": {"min": huge, "max": 0.5}}}
    assert len(refused({"min_map50": huge}, wrong, min_instances=huge).problems) >= 4


def test_two_bounds_for_one_thing_are_a_problem_and_not_a_guess():
    error = refused(thresholds={"cone": {"map50": 0.5}, "class/cone": {"map50": 0.8}, "*": {"map50": 0.1}})
    assert [p.found for p in error.problems] == [
        "bounds class/cone/map50 again; class_thresholds['cone']['map50']['min'] does already"
    ]
    # A flat bound and one for "overall" are not two: the flat one has a default that nobody typed.
    assert ids({"min_map50": 0.5}, {"overall": {"map50": 0.7}})["map50:min"].bound == 0.7


def test_min_instances_may_arrive_as_a_float_and_the_nearest_one_wins():
    found = ids({"min_map50": 0.5}, {"cone": {"map50": {"min": 0.8, "min_instances": 7.0}}}, min_instances=5.0)
    assert found["class/cone/map50:min"].min_instances == 7
    assert found["map50:min"].min_instances == 5


def test_scopes_sizes_and_slices():
    slices = {"weather": ["rain", "sun"]}
    thresholds = {
        "cone": {"size/small/recall": 0.3},
        "overall": {"f1": 0.4},
        "size/large": {"map50": 0.6},
        "slice/weather=*": {"map50": 0.5},
        "slice/weather=rain/class/*": {"recall": {"min": 0.2}},
    }
    found = ids(thresholds=thresholds, slices=slices)
    assert {"class/cone/size/small/recall:min", "f1:min", "size/large/map50:min"} <= set(found)
    assert {"slice/weather=rain/map50:min", "slice/weather=sun/map50:min"} <= set(found)
    assert sum(k.startswith("slice/weather=rain/class/") for k in found) == len(CLASSES)
    criteria = parse_criteria({}, thresholds, CLASSES, slices=slices)
    assert criteria.slices == ("weather=rain", "weather=sun")


@pytest.mark.parametrize("class_name", ["overall", "*", "size/small", "slice/x=y"])
def test_a_class_with_the_name_of_a_keyword_is_a_class(class_name):
    criteria = parse_criteria({}, {class_name: {"map50": 0.5}}, (class_name, "other"))
    assert [parse(c.metric).class_name for c in criteria.entries] == [class_name]
    assert criteria.ungated == ("other",)


def test_all_problems_are_found_at_once_with_close_matches(snapshot):
    error = refused(
        {"min_map5": 0.5, "min_map50": math.nan, "min_abnormal_box_rate": 0.1, "min_recall": "0.5", "min_f1": True},
        {
            "cnoe": {"map50": 2},
            "*": {"map50": "0.5", "recal": 0.5, "size/small/mean_confidence": 0.1},
            "cone": 0.5,
            "car (parked)": {"map50": {"minn": 0.3}, "recall": {"min": 0.9, "max": 0.1}, "f1": {}},
            "50%": {"map50": {"min": math.inf}, "size/tiny/map50": 0.2, "recall": None},
            "slice/weather": {"map50": 0.1},
            "slice/weathr=rain": {"map50": 0.1},
            "slice/weather=rian": {"map50": 0.1},
        },
        min_instances=2.5,
        slices={"weather": ["rain", "sun"]},
    )
    snapshot("criteria_problems", str(error))


def test_no_criterion_is_an_error(snapshot):
    snapshot("no_criterion", str(refused({"min_map50": 0.0, "max_abnormal_box_rate": 1.0})))


@pytest.mark.parametrize("thresholds", [None, [], "x", 5, {"cone": None}, {1: {"map50": 0.5}}, {"cone": [1]}])
def test_wrong_types_are_input_errors(thresholds):
    with pytest.raises(InvalidInput):
        parse_criteria({"min_map50": 0.5}, thresholds, CLASSES)


# The holes of MLflow's MetricThreshold, one by one; those about values are in test_deciding.py.


def test_no_thresholds_do_not_pass():
    assert "no criterion" in refused().found


def test_a_drop_of_two_points_can_be_said():
    assert ids(thresholds={"cone": {"map50": {"max_drop": 0.02}}})["class/cone/map50:max_drop"].bound == 0.02


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numpy_numbers_are_numbers(kind):
    assert ids({"min_map50": kind(1)})["map50:min"].bound == 1.0


def test_a_zero_bound_is_off_and_never_a_crash():
    assert "no criterion" in refused({}, {"cone": {"map50": {"min": 0.0, "max_drop": 1.0}}}).found


@given(st.floats(0.001, 0.999), st.sampled_from(sorted(METRICS)), st.sampled_from(CLASSES))
def test_every_metric_takes_the_bound_of_its_direction(bound, metric, name):
    kind = "max" if metric in LOWER_IS_BETTER else "min"
    found = ids({f"{kind}_{metric}": bound})
    assert found[f"{metric}:{kind}"].bound == bound
    wrong = "min" if kind == "max" else "max"
    if metric != "mean_confidence":
        assert "is better when" in str(refused({f"{wrong}_{metric}": bound}))


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cone", "*", "map50", "min", "max_drop", "size/small", "slice/a=b"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)


@given(json_values, json_values)
def test_any_json_gives_criteria_or_an_input_error(thresholds, instances):
    try:
        criteria = parse_criteria({"min_map50": 0.5}, thresholds, CLASSES, min_instances=instances)
    except InvalidInput:
        return
    assert criteria.entries and all(0 <= c.bound <= 1 for c in criteria.entries)


def test_settings_name_the_parameter(snapshot):
    with pytest.raises(InvalidInput) as caught:
        gate_settings(decide="maybe", on_insufficient="pass", level=95, min_map50=0.5).check(CLASSES)
    snapshot("settings_problems", str(caught.value))
    with pytest.raises(InvalidInput, match="unknown gate parameters: 'decied'"):
        gate_settings(decied="point")
    assert GateSettings().check(CLASSES)[0].entries[0].id == "map50:min"
