"""Verdicts on simulated detectors, whose truth is known."""

import json
import math
import tempfile
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as settings_
from hypothesis import strategies as st
from simulated import SHA, evaluation

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.gate.judging import Rival, judge_evaluation, passes
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.summary import all_values, markdown, table_metrics
from kfp_gate.gate.verdict import Champion, Entry, Separation, read_verdict, to_json, write_verdict
from kfp_gate.gate.wording import warnings

PROVEN = Separation("proven", 100)
SKILL = {"cone": 0.95, "car": 0.6, "원뿔 (소형)": 0.8}


def judged(found=None, rival=None, **settings):
    return judge_evaluation(
        found or evaluation(SKILL), gate_settings(**{"resamples": 200, **settings}), separation=PROVEN, rival=rival
    )


def states(**more):
    return {e.criterion: e.state for e in judged(**more).verdict.entries}


def test_each_class_is_judged_by_its_own_bound():
    found = states(class_thresholds={"*": {"map50": 0.7}, "car": {"map50": 0.5}})
    assert found == {"class/cone/map50:min": "met", "class/원뿔 (소형)/map50:min": "met", "class/car/map50:min": "met"}
    assert states(class_thresholds={"*": {"map50": 0.7}})["class/car/map50:min"] == "missed"


def test_a_class_without_objects_is_insufficient_and_not_the_mean_of_the_others():
    found = judged(evaluation(SKILL, absent=("cone",)), class_thresholds={"cone": {"map50": 0.1}}).verdict
    (entry,) = found.entries
    assert (entry.state, entry.value, entry.instances) == ("insufficient", None, 0)
    assert not found.passed
    assert "No object in the test set, so not measured: cone." in found.notes


def test_allowing_what_is_insufficient_lets_it_pass_and_says_so():
    absent = evaluation(SKILL, absent=("cone",))
    asked = {"min_map50": 0.3, "class_thresholds": {"cone": {"map50": 0.5}}}
    assert not judged(absent, **asked).verdict.passed
    allowed = judged(absent, on_insufficient="allow", **asked).verdict
    assert allowed.passed
    assert allowed.headline == "Passed: 1 of 2 criteria met, 1 without enough evidence"


def test_slices_and_sizes_are_judged_apart():
    weather = tuple("rain" if i % 4 == 0 else "sun" for i in range(60))
    found = judged(
        evaluation(SKILL, slices={"weather": weather}),
        class_thresholds={"slice/weather=*": {"map50": 0.5}, "cone": {"size/small/recall": 0.5}},
    ).verdict
    rain, sun, small = found.entries
    assert (rain.metric, sun.metric) == ("slice/weather=rain/map50", "slice/weather=sun/map50")
    assert 0 < rain.instances < sun.instances
    assert small.metric == "class/cone/size/small/recall"
    assert small.interval is not None


def test_an_unknown_slice_is_found_before_anything_else():
    with pytest.raises(InvalidInput, match="no column 'weather'"):
        judged(class_thresholds={"slice/weather=rain": {"map50": 0.5}})


def test_a_confident_gate_passes_on_much_evidence_and_not_on_little():
    asked = {"decide": "confident", "class_thresholds": {"cone": {"recall": 0.9}}}
    much, little = evaluation({"cone": 0.95}, images=400), evaluation({"cone": 0.95}, images=12)
    assert judged(much, **asked).verdict.passed
    (entry,) = judged(little, **asked).verdict.entries
    assert (entry.state, entry.needed is not None) == ("insufficient", True)
    low, high = entry.interval
    assert low < 0.9 < high


def test_correction_for_many_classes_only_widens():
    skill = {f"c{i}": 0.9 for i in range(30)}
    asked = {"decide": "confident", "class_thresholds": {"*": {"recall": 0.8}}}
    found = evaluation(skill, images=60)
    alone, together = (judged(found, correction=c, **asked).verdict for c in ("none", "bonferroni"))
    for a, b in zip(alone.entries, together.entries, strict=True):
        assert b.interval[0] <= a.interval[0] + 1e-9
        assert b.interval[1] >= a.interval[1] - 1e-9


def test_paired_comparison_sees_a_drop_that_two_intervals_would_hide():
    """The candidate loses one class in ten detections of the champion: clear when paired by image."""
    champion = evaluation({"cone": 0.9, "car": 0.9}, images=150, seed=3, sha256="b" * 64)
    lost = np.flatnonzero(champion.records.classes == 0)[::10]
    gone = np.zeros(len(champion.records.scores), bool)
    gone[lost] = True
    from kfp_gate.gate.spoiling import without

    candidate = replace(champion, model_sha256=SHA, records=without(champion.records, gone))
    rival = Rival(Champion("compared", "models:/m@champion", "b" * 64, separation=PROVEN), champion)
    found = judged(
        candidate, rival, decide="confident", min_map50=0, resamples=500,
        class_thresholds={"*": {"recall": {"max_drop": 0.02}}},
    ).verdict  # fmt: skip
    cone, car = found.entries
    assert cone.state == "missed"
    assert cone.drop == pytest.approx(0.09, abs=0.03)
    assert (car.state, car.drop) == ("met", 0.0)


def test_a_drop_needs_a_champion_that_somebody_named():
    """A comparison that never takes place must not pass."""
    asked = {"min_map50": 0, "class_thresholds": {"cone": {"map50": {"max_drop": 0.1}}}}
    nobody = judged(**asked).verdict
    assert [(e.state, e.reason) for e in nobody.entries] == [("insufficient", "no champion was named to compare with")]
    first = judged(rival=Rival(Champion("none", "models:/cones@champion")), **asked).verdict
    assert [e.state for e in first.entries] == ["met"]
    # It let pass without asking anything, and says so.
    assert len(first.self_test.vacuous) == 2


def test_a_class_that_is_new_to_the_champion_is_not_kept_out():
    champion = replace(evaluation(SKILL, sha256="b" * 64), unknown_classes=("car",), dropped_classes=("dog",))
    found = judged(
        rival=Rival(Champion("compared", "u", "b" * 64), champion), min_map50=0,
        class_thresholds={"*": {"map50": {"max_drop": 0.1}}, "overall": {"map50": {"max_drop": 0.1}}},
    ).verdict  # fmt: skip
    by = {e.criterion: e for e in found.entries}
    assert by["class/car/map50:max_drop"].state == "met"
    assert "does not know this class" in by["class/car/map50:max_drop"].reason
    assert by["class/car/map50:max_drop"].value is not None
    assert by["class/cone/map50:max_drop"].drop == 0.0
    # Overall on the common classes: the weak new class does not look like a drop.
    assert by["map50:max_drop"].drop == 0.0
    assert found.champion.common_classes == ("cone", "원뿔 (소형)")


def test_a_champion_on_other_images_is_broken():
    other = replace(evaluation(SKILL), manifest_digest="e" * 64)
    with pytest.raises(Broken, match="a champion evaluated on"):
        judged(rival=Rival(Champion("compared"), other), class_thresholds={"cone": {"map50": {"max_drop": 0.1}}})


def test_a_gate_that_asks_nothing_that_matters_is_reported():
    found = judged(min_map50=0, max_abnormal_box_rate=0.5).verdict
    assert found.passed
    assert found.self_test.vacuous == ("a model whose detections are all wrong",)
    assert warnings(found)[0] == "This gate would let a useless model pass: a model whose detections are all wrong."


def test_allowing_what_is_insufficient_does_not_pass_a_model_of_which_nothing_is_known():
    found = judged(on_insufficient="allow", min_instances=10_000, min_map50=0.5).verdict
    assert not found.passed
    assert found.self_test.vacuous == ()


def test_a_real_gate_is_not_vacuous_and_names_its_blind_classes():
    skill = {f"c{i}": 0.95 for i in range(8)}
    found = judged(evaluation(skill), class_thresholds={"c0": {"recall": 0.8}}).verdict
    assert (found.passed, found.self_test.vacuous) == (True, ())
    # Any one of the others is an eighth of the mean: it can vanish.
    assert found.self_test.blind == tuple(f"c{i}" for i in range(1, 8))
    assert judged(evaluation(skill), class_thresholds={"*": {"recall": 0.8}}).verdict.self_test.blind == ()


def test_no_entries_pass_nothing():
    assert not passes((), "allow")


def test_a_verdict_survives_its_file_and_refuses_a_newer_one(tmp_path):
    found = judged(class_thresholds={"*": {"map50": 0.7, "size/small/recall": 0.1}}, decide="confident").verdict
    write_verdict(found, tmp_path / "v.json")
    assert read_verdict(tmp_path / "v.json") == found
    values = json.loads(to_json(found))
    (tmp_path / "new.json").write_text(json.dumps({**values, "schema_version": 2}))
    with pytest.raises(InvalidInput, match="schema version 2"):
        read_verdict(tmp_path / "new.json")
    (tmp_path / "more.json").write_text(json.dumps({**values, "new_key": 1}))
    assert read_verdict(tmp_path / "more.json") == found
    huge = [{**values["entries"][0], "bound": 10**400}]
    changes = ({"passed": "yes"}, {"schema_version": float("inf")}, {"entries": huge})
    texts = [json.dumps({**values, **change}) for change in changes]
    for broken in ("", "[]", '{"schema_version": 1}', "[" * 100_000, *texts):
        (tmp_path / "bad.json").write_text(broken)
        with pytest.raises(InvalidInput):
            read_verdict(tmp_path / "bad.json")


REPLACEMENTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just([]) | st.just({})


@settings_(max_examples=150, deadline=None)
@given(st.data())
def test_an_edited_verdict_is_refused_or_can_be_read_to_the_end(data):
    """Whatever one value is replaced by, nothing but an input error comes out, here or in a reader."""
    values = json.loads(FOUND)
    spot = values
    while True:
        key = data.draw(st.sampled_from(list(spot) if isinstance(spot, dict) else list(range(len(spot)))))
        if not isinstance(spot[key], dict | list) or not spot[key] or data.draw(st.integers(0, 3)) == 0:
            break
        spot = spot[key]
    spot[key] = data.draw(REPLACEMENTS)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "verdict.json")
        path.write_text(json.dumps(values))
        try:
            read = read_verdict(path)
        except InvalidInput:
            return
    assert read.headline and isinstance(read.passed, bool)
    markdown(read)


FOUND = to_json(
    judged(
        rival=Rival(Champion("compared", "u", "b" * 64, separation=PROVEN), evaluation(SKILL, seed=1)),
        class_thresholds={"*": {"map50": {"min": 0.7, "max_drop": 0.5}}},
    ).verdict
)


def test_equal_input_gives_equal_bytes():
    asked = {"class_thresholds": {"*": {"map50": 0.7}}, "decide": "confident", "seed": 5}
    assert to_json(judged(**asked).verdict) == to_json(judged(**asked).verdict)


def test_numpy_numbers_in_the_settings_reach_the_file_as_numbers(tmp_path):
    found = judged(class_thresholds={"cone": {"map50": {"min": np.float32(0.5), "min_instances": np.int64(3)}}})
    write_verdict(found.verdict, tmp_path / "v.json")
    assert read_verdict(tmp_path / "v.json").settings["class_thresholds"]["cone"]["map50"]["min"] == 0.5


def test_metrics_for_the_table_are_finite_plain_floats():
    found = judged(evaluation(SKILL, absent=("cone",)), class_thresholds={"*": {"map50": 0.5}})
    metrics = table_metrics(found)
    assert all(type(v) is float and math.isfinite(v) for v in metrics.values())
    assert "class/cone/map50" not in metrics
    assert (metrics["passed"], metrics["criteria_insufficient"]) == (0.0, 1.0)
    assert "no object" in all_values(found)["class/cone/map50"]


def test_markdown_keeps_hostile_names_inert(snapshot):
    hostile = {"<script>alert(1)</script>": 0.9, "a|b *c* [x](javascript:1)": 0.4}
    found = judged(evaluation(hostile), class_thresholds={"*": {"map50": 0.7}}).verdict
    snapshot("markdown", markdown(found))


def test_waivers_are_checked_against_the_day():
    waiver = {"criterion": "class/car/map50:min", "model": SHA, "who": "w", "why": "y", "expires": "2030-06-30"}
    asked = gate_settings(class_thresholds={"car": {"map50": 0.9}}, waivers=[waiver], resamples=0)
    found = evaluation(SKILL)
    on, after = (
        judge_evaluation(found, asked, separation=PROVEN, today=d).verdict
        for d in (date(2030, 6, 30), date(2030, 7, 1))
    )
    assert (on.passed, after.passed) == (True, False)
    assert "expired on 2030-06-30" in warnings(after)[-1] + "".join(warnings(after))


def test_a_gate_that_decided_nothing_does_not_pass():
    """Every criterion lacks evidence: allowed one by one, but together nothing was shown."""
    unknown = Entry("map50:min", "map50", "min", 0.5, "insufficient")
    met = Entry("recall:min", "recall", "min", 0.5, "met", value=0.6)
    assert [passes(entries, "allow") for entries in ((unknown,), (unknown, met), (met,), ())] == [
        False,
        True,
        True,
        False,
    ]
    assert not passes((unknown, met), "block")
