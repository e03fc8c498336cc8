"""The page of a diagnosis: complete, small, and never a zero where nothing is known."""

import doctest
import html
import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.pages import report
from kfp_gate.diagnosis.pages.curves import curve
from kfp_gate.diagnosis.pages.lanes import rank_lanes
from kfp_gate.diagnosis.pages.ribbon import ribbon
from kfp_gate.diagnosis.pages.time_axis import WIDTH, time_axis
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.errors import InvalidInput

from .recorded import diagnosed, recorded


def words(page: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


def spans(pieces: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
    return [(round(a), round(a + width)) for a, width in pieces]


def test_everything_that_was_found_is_on_the_page():
    run = recorded(epochs=4)
    found = diagnosed(run)
    said = words(report.html(found, run))
    assert (
        said.index("The device waits half") < said.index("what to check next") < said.index("What a change would bring")
    )
    for finding in (*found.findings, *found.minor):
        for text in (*finding.evidence, *finding.against, *finding.missing, finding.next_check, finding.refuted_by):
            assert text in said
    for scenario in found.scenarios:
        assert scenario.change in said
    assert found.growth[0].text[1:] in said
    assert all(m in said for u in found.unjudged for m in u.missing)


def test_a_gap_is_a_gap_in_every_row():
    run = recorded(ranks=1, epochs=6, gaps=[(200, 320)])
    axis = time_axis(run)
    found = rank_lanes(run, 0, axis)
    start, end = (axis.at(axis.start + s) for s in (200, 320))
    for lane in (found.wait, *found.gpu, *found.host):
        assert [s for s in spans(lane.holes) if s[0] < end and s[1] > start] == [(round(start), round(end))], lane.name
        for drawn in lane.curves:
            pen = None
            for command, x in re.findall(r"([ML])([\d.]+)", drawn.line):
                if command == "L":
                    assert not (pen <= start + 2 and float(x) >= end - 2), f"{lane.name}: a line across the gap"
                pen = float(x)
    pieces = ribbon(run, 0, axis)
    inside = [p for p in pieces if p.start > start + 3 and p.start + p.width < end - 3]
    assert pieces and not inside


def test_a_slower_sampler_is_no_gap():
    """After a quarter of an hour the sampler looks less often."""
    close, wide = recorded(ranks=1, epochs=2), recorded(ranks=1, epochs=8, sample_s=5.0)
    lines = [line for line in close.ranks[0] if line["mono"] < 200] + [x for x in wide.ranks[0] if x["mono"] > 200]
    run = Run("both", {0: lines})
    assert rank_lanes(run, 0, time_axis(run)).host[0].holes == ()


def test_unknown_has_its_reason_and_is_no_zero():
    run = recorded(ranks=1, mig=(0,), epochs=3)
    use = rank_lanes(run, 0, time_axis(run)).gpu[0]
    assert use.unknown == "NVML: not supported on a MIG instance" and not use.curves
    said = words(report.html(diagnosed(run), run))
    assert "GPU use unknown NVML: not supported on a MIG instance" in said
    assert "GPU use 0%" not in said


def test_no_amount_makes_a_number_of_what_is_unknown():
    assert doctest.testmod(amounts).failed == 0
    for text in (amounts.duration, amounts.share, amounts.size, amounts.rate, amounts.cores):
        assert text(None) == "unknown"
        assert text(0.0).startswith("0")


def test_readings_that_fail_for_a_while_are_a_hole():
    run = recorded(ranks=1, epochs=3)
    lines = [{**x, "gpu_util": None} if x["kind"] == "sample" and 100 < x["mono"] < 160 else x for x in run.ranks[0]]
    lost = Run("lost", {0: lines})
    axis = time_axis(lost)
    lanes = rank_lanes(lost, 0, axis)
    start, end = (round(axis.at(axis.start + s)) for s in (100, 160))
    assert spans(lanes.gpu[0].holes) == [pytest.approx((start, end), abs=2)]
    assert lanes.gpu[1].holes == ()  # the memory of the device was read all the time


def test_a_spike_survives_thinning():
    points = [(x / 20, 1.0) for x in range(20_000)]
    points[7_777] = (points[7_777][0], 100.0)
    drawn = curve("spiky", points, 100.0, 300)
    assert drawn.peak == 100.0
    tops = [int(y) for y in re.findall(r" (\d+)", drawn.band)]
    assert min(tops) == 0 and len(drawn.line) < 6_000


def test_a_long_wait_between_two_attempts_leaves_room_for_both():
    run = recorded(ranks=1, epochs=2)
    later = [{**x, "time": x["time"].replace("2026-11-30", "2026-12-02")} for x in run.ranks[0]]
    axis = time_axis(Run("twice", {0: [*run.ranks[0], *later]}))
    assert [g.seconds > 86_400 for g in axis.shortened] == [True]
    first_end = axis.at(axis.shortened[0].start)
    assert first_end > 0.4 * WIDTH
    assert axis.at(axis.end) == pytest.approx(WIDTH)
    places = [x for x, _ in axis.ticks()]
    assert places == sorted(places) and any(x < first_end for x in places) and any(x > 0.6 * WIDTH for x in places)


@pytest.mark.all_only
def test_a_day_on_eight_ranks_is_a_small_page():
    run = recorded(ranks=8, epochs=120, stretch=3.8, sample_s=5.0, window_s=10.0)
    assert len(report.html(diagnosed(run), run).encode()) < 1_000_000


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"kind": "start"}],
        [{"kind": "sample", "time": "never"}, {"kind": "window", "time": "2026-01-01T00:00:00+00:00"}],
        [{"kind": "epoch", "time": "2026-01-01T00:00:00+00:00", "epoch": 1}],
    ],
)
def test_a_run_of_which_little_is_known(lines):
    run = Run("little", {0: lines})
    found = diagnose(run)
    page = report.html(found, run)
    assert found.state == "not_enough" and "unknown" in page


def test_an_older_timeline_has_its_page():
    run = recorded(ranks=1, older=True)
    axis = time_axis(run)
    assert {"train", "validate"} <= {p.doing for p in ribbon(run, 0, axis)}
    assert "no windows of steps" in words(report.html(diagnose(run), run))


RECORD = {
    "epochs": [{"epoch": 1, "values": {"map50_95": 0.4}, "seconds": 60.0}], "settings": {}, "versions": {},
    "classes": ["cone"], "ranks": 1, "device": "cuda", "stopped": "", "sanity": {}, "resumed": {}, "manifests": {},
    "monitors": [{"monitor": "map50_95", "primary": True, "best": 0.4, "best_epoch": 1, "last_gain_epoch": 1,
                  "flat_while_improving": [], "epochs_without_value": 0}],
}  # fmt: skip


@pytest.fixture
def trained(tmp_path) -> Path:
    """A training folder as rank 0 leaves it."""
    (tmp_path / "record.json").write_text(json.dumps(RECORD))
    lines = (json.dumps(line) for line in recorded(ranks=1, epochs=3).ranks[0])
    (tmp_path / "timeline.jsonl").write_text("\n".join(lines))
    return tmp_path


def test_the_training_report_holds_the_diagnosis(trained):
    said = words(report.training_page(trained))
    assert said.startswith("Training: best map50_95 0.4000")
    assert "What held it back" in said and "Steps wait for data" in said and "What a change would bring" in said


def test_a_diagnosis_that_fails_costs_a_sentence(trained, monkeypatch, caplog):
    def fails(_run):
        raise ZeroDivisionError("a mistake in a hypothesis")

    monkeypatch.setattr("kfp_gate.diagnosis.diagnose.diagnose", fails)
    with caplog.at_level(logging.WARNING):
        said = words(report.training_page(trained))
    assert "best map50_95 0.4000" in said and "could not be diagnosed" in said
    assert "a mistake in a hypothesis" in caplog.text


def test_a_training_without_a_timeline_has_its_report(trained, tmp_path):
    (trained / "timeline.jsonl").unlink()
    assert "best map50_95 0.4000" in words(report.training_page(trained))
    assert "left no record.json" in report.training_page(tmp_path / "nowhere")
    (trained / "record.json").write_text("{}")
    with pytest.raises(InvalidInput, match="no readable training record"):
        report.training_page(trained)


def test_training_code_of_ones_own_has_its_diagnosis(trained):
    (trained / "record.json").unlink()
    said = words(report.training_page(trained))
    assert said.startswith("Diagnosis: ") and "Steps wait for data" in said


def test_the_rank_that_is_meant_is_shown_first():
    run = recorded(epochs=2)
    found = diagnosed(run)
    late = replace(found.findings[0], cause="rank_imbalance", detail={"slow_rank": 1})
    said = words(report.html(replace(found, findings=(late,)), run))
    assert "are of rank 1" in said and "are of rank 0" not in said
