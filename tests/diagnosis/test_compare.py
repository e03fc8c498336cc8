"""Two runs, before and after."""

import json
import random

import pytest

from kfp_gate.diagnosis.comparing.compare import compare, compare_each
from kfp_gate.diagnosis.comparing.outputs import DIFFER, EQUAL, UNKNOWN, WITHIN_NOISE
from kfp_gate.diagnosis.pages.text import comparison_text
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.errors import InvalidInput

from .recorded import recorded

CONDITIONS = {
    "manifests": {"train": "a1" * 32, "val": "b2" * 32}, "classes": 3, "train_images": 400, "val_images": 80,
    "steps_per_epoch": 100, "epochs": 12, "batch": 4, "rank_batch": 4, "ranks": 1, "workers": 0, "prefetch": None,
    "pin_memory": False, "precision": "fp32", "image_size": 640, "device": "cpu", "gpu_name": None, "cpus": 4,
    "cpu_quota": None, "memory_limit": None, "monitors": ["map50_95"], "stop_on": "", "patience": 50, "min_delta": 0.0,
    "min_epochs": 0, "seed": 0, "base_model": "yolo11n.yaml",
    "settings": {"workers": -1, "device": "auto", "overrides": {"lr0": 0.01}, "probe_steps": 0},
}  # fmt: skip


def run(where="before", data=0.06, *, luck=0, ended=8, noise=0.002, level=0.5, windows=10, versions=None, **changed):
    """A run whose map50_95 climbs to `level` and wavers by `noise`."""
    draw = random.Random(f"{where} {luck}")
    lines = [
        {"kind": "start", "versions": versions or {"torch": "2.14.1", "kfp-gate": "0.1.0"}},
        {"kind": "conditions", **CONDITIONS, **changed},
    ]  # fmt: skip
    for _ in range(windows):
        near = draw.uniform(0.95, 1.05), draw.uniform(0.95, 1.05)
        parts = {"read": [0.1, 0.01, 80], "transform:Cones": [20 * data - 0.1, 1.0, 80]}
        lines.append({
            "kind": "window", "epoch": 1, "batches": [0, 19], "steps": 20, "images": 80, "warmup": False,
            "input": "usual", "profiled": False, "device": None,
            "seconds": {"data": 20 * data * near[0], "forward": 0.4 * near[1], "backward": 0.6},
            "loader": {"batches": 20, "parts": parts, "bytes": 0, "ready": None},
        })  # fmt: skip
    for epoch in range(1, ended + 1):
        value = level * (1 - 0.6**epoch) + draw.gauss(0, noise)
        values = {"map50_95": value, "class/cone/map50": value / 2, "precision": None}
        seconds = {"data": 1.0, "validation": 2.0, "checkpoint": 0.5}
        lines += [
            {"kind": "phases", "epoch": epoch, "steps": 2, "seconds": seconds},
            {"kind": "memory", "epoch": epoch, "rss": 3_000_000_000, "cuda_peak": None},
            {"kind": "epoch", "epoch": epoch, "values": values, "losses": {"box": 2 - value}},
        ]
    return Run(where, {0: [*lines, {"kind": "end", "exit_code": 0}]})


def state(before, after, *acknowledged):
    return compare(before, after, acknowledged).outputs.state


def test_a_faster_loader_with_the_same_outputs(snapshot):
    before, after = run(noise=0), run("after", 0.02, noise=0)
    found = compare(before, after)
    by_name = {c.what: c for c in found.changes}
    step = by_name["step"]
    assert step.state == "less"
    assert step.low < 0.07 / 0.11 < step.high
    assert by_name["images a second"].state == "more"
    assert by_name["phase backward"].state == "no difference beyond the noise"
    assert found.outputs.state == EQUAL
    assert json.loads(found.to_json())["outputs"]["epochs"] == 8
    snapshot("comparison", comparison_text(found))


def test_every_difference_is_listed_with_both_values_and_how_to_acknowledge_it(snapshot):
    before = run()
    after = run(
        "after", manifests={"train": "c3" * 32, "val": "b2" * 32}, batch=8, precision="bf16", workers=2, stop_on="off",
        image_size=320, device="cuda:0", gpu_name="NVIDIA H200", ranks=2, seed=7, base_model="yolo11s.yaml",
        settings={"workers": 2, "device": "cuda", "overrides": {"lr0": 0.02, "mosaic": 0.0}, "probe_steps": 20},
        versions={"torch": "2.15.0", "kfp-gate": "0.1.0"},
    )  # fmt: skip
    with pytest.raises(InvalidInput) as caught:
        compare(before, after, acknowledged=["batch", "presicion"])
    snapshot("refused_comparison", str(caught.value))
    names = [p.where for p in caught.value.problems if p.where != "acknowledged"]
    assert "batch" not in names
    found = compare(before, after, [*names, "batch"])
    assert [d.name for d in found.differences if d.name == "workers"] == ["workers"]
    assert any("another number of images" in n for n in found.notes)
    assert found.conditions["val_data"] == "b2" * 32
    assert "batch" not in found.conditions


@pytest.mark.parametrize("name", [
    "batch", "ranks", "workers", "precision", "image_size", "device", "gpu_name", "seed", "base_model", "stop_on",
    "patience", "min_delta", "min_epochs", "epochs", "monitors", "cpus", "cpu_quota", "memory_limit", "pin_memory",
])  # fmt: skip
def test_each_condition_alone_is_refused_and_can_be_acknowledged(name):
    changed = run("after", **{name: "another"})
    with pytest.raises(InvalidInput) as caught:
        compare(run(), changed)
    assert [p.where for p in caught.value.problems] == [name]
    assert f"--acknowledge {name}" in caught.value.next_step
    compare(run(), changed, [name])


def test_what_is_made_ahead_goes_with_the_loader_processes():
    beside = run("after", workers=2, prefetch=4)
    assert [d.name for d in compare(run(), beside, ["workers"]).differences] == ["workers"]
    with pytest.raises(InvalidInput, match="prefetch: 4 before, 2 after"):
        compare(beside, run("after", workers=2, prefetch=2))


def test_what_one_run_does_not_say_is_a_difference():
    silent = run("after")
    lines = [{k: v for k, v in line.items() if k != "precision"} for line in silent.ranks[0]]
    with pytest.raises(InvalidInput, match='precision: "fp32" before, unknown after'):
        compare(run(), Run("after", {0: lines}))
    both = compare(Run("before", {0: lines}), Run("after", {0: lines}))
    assert any("taken as equal: precision" in n for n in both.notes)


def test_a_timeline_without_conditions_is_compared_by_its_record():
    lines = [line for line in run().ranks[0] if line["kind"] != "conditions"]
    record = {
        "settings": {"batch": 4, "seed": 0, "device": "auto", "overrides": {}}, "manifests": {"train": "a", "val": "b"},
        "classes": ["x"], "ranks": 1, "device": "cpu",
    }  # fmt: skip
    other = {**record, "manifests": {"train": "other", "val": "b"}}
    assert compare(Run("a", {0: lines}, record), Run("b", {0: lines}, record)).differences == ()
    with pytest.raises(InvalidInput, match="train_data"):
        compare(Run("a", {0: lines}, record), Run("b", {0: lines}, other))


def test_outputs():
    assert state(run(noise=0), run("after", noise=0)) == EQUAL
    assert state(run(), run("after")) == WITHIN_NOISE
    assert state(run(), run("after", level=0.42)) == DIFFER
    assert state(run(ended=3), run("after", ended=3)) == UNKNOWN
    assert state(run(ended=3, noise=0), run("after", ended=9, noise=0)) == EQUAL
    assert state(run(ended=0), run("after")) == UNKNOWN


def test_the_same_seed_on_a_cpu_promises_the_same_numbers():
    told = compare(run(), run("after")).outputs.judged
    assert "The same numbers were to be expected" in told
    for name, value in (("workers", 2), ("epochs", 3)):
        assert "were to be expected" not in compare(run(), run("after", **{name: value}), [name]).outputs.judged


def test_a_value_of_one_run_only_is_no_equality():
    after = run("after", noise=0)
    lines = [dict(line) for line in after.ranks[0]]
    last = next(line for line in reversed(lines) if line["kind"] == "epoch")
    last["values"] = {**last["values"], "map50_95": None}
    assert state(run(noise=0), Run("after", {0: lines})) == DIFFER


def test_values_that_are_all_zero_prove_little():
    flat = [dict(x) for x in run().ranks[0]]
    for line in flat:
        if line["kind"] == "epoch":
            line["values"], line["losses"] = {"map50": 0.0}, {}
    assert "says little" in compare(Run("a", {0: flat}), Run("b", {0: flat})).outputs.judged


def test_the_same_steps_drawn_twice_are_no_difference():
    """Of 40 pairs without any difference, about one in ten intervals may miss 1; the floor of 1% takes some."""
    missed = 0
    for luck in range(40):
        pair = compare(run(luck=luck, ended=1), run("after", luck=luck, ended=1))
        missed += next(c for c in pair.changes if c.what == "step").state != "no difference beyond the noise"
    assert missed <= 8


def test_several_runs_are_each_compared_with_the_first():
    found = compare_each([run(), run("second", 0.02), run("third", 0.01)])
    assert [(c.before, c.after) for c in found] == [("before", "second"), ("before", "third")]
    with pytest.raises(InvalidInput, match="at least two"):
        compare_each([run()])


def test_a_single_window_has_no_spread():
    found = compare(run(windows=1), run("after", 0.02, windows=1))
    step = next(c for c in found.changes if c.what == "step")
    assert (step.low, step.state) == (None, "spread unknown")
    assert "single stretch" in found.answer


def test_runs_that_say_nothing_are_compared_as_far_as_it_goes():
    found = compare(Run("a", {}), Run("b", {0: []}))
    assert found.changes == ()
    assert "cannot be told" in found.answer
    assert comparison_text(found)


def test_names_from_outside_steer_no_terminal():
    evil = "\x1b[2J\u202eevil\nline"
    shown = comparison_text(compare(run(base_model=evil), run(evil, base_model=evil + "!"), ["base_model"]))
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    compare(recorded(name=evil), recorded(name=evil))
