"""The probe's arithmetic and its loader; whole probes are in test_close_look.py."""

import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.data.manifest import Manifest, read_manifest
from kfp_gate.observing.loading import KEY, Made
from kfp_gate.observing.timeline import Timeline, read_timeline
from kfp_gate.training.probe import PREPARED, SETTLE, USUAL, WARM, Probe, ProbePlan, part_of_the_data
from kfp_gate.training.step_spread import spread_of

from .scene import make_scene

CLASSES = ("square", "원뿔 (소형)", "rare")


# Spread ---------------------------------------------------------------------------------------------------------


def test_batches_that_come_in_bursts_cost_what_the_burst_costs() -> None:
    """Four loader processes that finish together: three steps for nothing, then one that waits for all four."""
    seconds = [0.1, 0.1, 0.1, 1.7] * 12
    spread = spread_of(seconds, group=4)
    assert spread is not None and spread.median == pytest.approx(0.5)
    assert spread_of(seconds) != spread


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=80), st.integers(1, 12))
def test_the_interval_holds_the_median_and_lies_within_the_steps(seconds: list[float], group: int) -> None:
    spread = spread_of(seconds, group=group)
    assert spread is not None
    assert min(seconds) - 1e-9 <= spread.low <= spread.median <= spread.high <= max(seconds) + 1e-9


def test_the_interval_covers_the_true_median() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        spread = spread_of(rng.exponential(1.0, 40).tolist())
        assert spread is not None
        hits += spread.low <= math.log(2) <= spread.high
    assert hits >= 0.88 * 400


def test_no_steps_have_no_spread() -> None:
    assert spread_of([]) is None


# Plan -----------------------------------------------------------------------------------------------------------

plans = st.builds(
    ProbePlan.of, st.integers(1, 200), stock=st.integers(0, 64), window=st.integers(0, 90),
    accumulate=st.integers(1, 64),
)  # fmt: skip


@given(plans, st.integers(1, 64))
def test_both_stretches_are_as_long_and_in_order(plan: ProbePlan, _: int) -> None:
    parts = [plan.part(step) for step in range(plan.total)]
    assert parts.count(USUAL) == parts.count(PREPARED) == plan.steps
    assert parts[: plan.warm] == [WARM] * plan.warm and plan.warm >= 3
    assert [p for i, p in enumerate(parts) if i == 0 or p != parts[i - 1]][-3:] == [USUAL, SETTLE, PREPARED]


@given(st.integers(1, 200), st.integers(0, 64), st.integers(0, 90), st.integers(1, 64))
def test_the_optimizer_steps_at_the_same_places_of_both(steps: int, stock: int, window: int, every: int) -> None:
    plan = ProbePlan.of(steps, stock=stock, window=window, accumulate=every)
    parts = [plan.part(step) for step in range(plan.total)]
    turns = [[step % every == every - 1 for step, p in enumerate(parts) if p == part] for part in (USUAL, PREPARED)]
    assert turns[0] == turns[1]


# Loader ---------------------------------------------------------------------------------------------------------


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        return index


def collate(samples: list[int]) -> dict[str, Any]:
    return {"img": torch.tensor(samples, dtype=torch.uint8), "name": list(samples), KEY: Made(bytes=1)}


def upstreams(workers: int) -> Any:
    from ultralytics.data.build import InfiniteDataLoader

    return InfiniteDataLoader(
        dataset=Numbers(), batch_size=2, shuffle=True, num_workers=workers, collate_fn=collate,
        generator=torch.Generator().manual_seed(3), prefetch_factor=4 if workers else None,
    )  # fmt: skip


@pytest.mark.parametrize("workers", [0, 2])
def test_one_epoch_of_the_loader_and_then_of_the_batches_that_are_held(tmp_path: Path, workers: int) -> None:
    """The set has four batches; the probe needs more than that before its switch."""
    probe = Probe(6, Timeline(tmp_path / "timeline.jsonl"))
    loader = probe.wrap(upstreams(workers), stock=4 * workers, window=0, accumulate=1)
    assert len(loader) == probe.plan.total and loader.num_workers == workers and len(loader.dataset) == 7
    seen, alive = [], []
    for step, batch in enumerate(loader):
        assert (KEY in batch) == (step < probe.plan.fed), "a making is counted once"
        seen.append(tuple(batch["name"]))
        alive.append(len(multiprocessing.active_children()))
        # As the trainer does: what it gets is its own.
        batch["img"] = batch["img"].float() / 255
        batch["name"] = None
    assert len(seen) == probe.plan.total
    fed, held = seen[: probe.plan.fed], seen[probe.plan.fed :]
    whole = [batch for batch in fed if len(batch) == 2]
    assert held == [whole[i % 4] for i in range(len(held))], "never the smaller last one of a pass"
    assert sorted(n for batch in fed[:4] for n in batch) == list(range(7)), "the first pass goes over the whole set"
    assert set(alive[: probe.plan.fed]) == {workers} and set(alive[probe.plan.fed :]) == {0}


def test_held_batches_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kfp_gate.training.probe.HELD_BYTES", 3)
    probe = Probe(4, Timeline(tmp_path / "timeline.jsonl"))
    loader = probe.wrap(upstreams(0), stock=0, window=0, accumulate=1)
    held = [tuple(b["name"]) for b in loader][probe.plan.fed :]
    assert len(set(held)) == 1


def test_the_result_is_written_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    probe = Probe(4, Timeline(tmp_path / "timeline.jsonl"))
    probe.wrap(upstreams(0), stock=0, window=0, accumulate=1)
    seen = []
    for step in range(probe.plan.total):
        seen.append((probe.input, probe.warm))
        probe.step_done({USUAL: 0.5, PREPARED: 0.2}.get(probe.plan.part(step), 9.0))
    assert seen == [("usual", True)] * 3 + [("usual", False)] * 4 + [("prepared", True)] * 3 + [("prepared", False)] * 4
    with caplog.at_level("INFO"):
        probe.tell(group=1)
    lines = [
        {k: x[k] for k in ("part", "steps", "step_s", "low", "high")}
        for x in read_timeline(tmp_path / "timeline.jsonl")
    ]
    assert lines == [
        {"part": "usual", "steps": 4, "step_s": 0.5, "low": 0.5, "high": 0.5},
        {"part": "prepared", "steps": 4, "step_s": 0.2, "low": 0.2, "high": 0.2},
    ]
    assert "feeding costs 0.3000 s a step (60%)" in caplog.text and "no gain" not in caplog.text
    probe.seconds = {USUAL: [0.5, 0.6, 0.7], PREPARED: [0.4, 0.5, 0.6]}
    with caplog.at_level("INFO"):
        probe.tell(group=1)
    assert "no gain beyond the spread" in caplog.text


# Data -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Manifest]:
    scene = make_scene(tmp_path_factory.mktemp("scene") / "data", train=50, val=40, classes=CLASSES)
    return {"train": read_manifest(scene.train), "val": read_manifest(scene.val)}


def part(manifests: dict[str, Manifest], **more: Any) -> dict[str, Manifest]:
    return part_of_the_data(
        manifests, **{"batch": 8, "validation_batch": 4, "ranks": 2, "steps": 1, "monitors": ("map50",), **more}
    )


def test_whole_batches_spread_over_the_set(manifests: dict[str, Manifest]) -> None:
    found = part(manifests)
    assert (len(found["train"]), len(found["val"])) == (32, 16)
    images = manifests["train"].table["image"].to_pylist()
    places = [images.index(i) for i in found["train"].table["image"].to_pylist()]
    assert places == sorted(places) and places[-1] >= 47 and max(np.diff(places)) <= 2
    assert found["train"].classes == CLASSES and found["train"].source_uri == manifests["train"].source_uri


def test_the_size_of_the_data_does_not_matter(manifests: dict[str, Manifest]) -> None:
    large = {k: replace(m, table=pa.concat_tables([m.table] * 60)) for k, m in manifests.items()}
    found = part(large, steps=3)
    assert (len(found["train"]), len(found["val"])) == (3 * 8 * 4, 16)


def test_a_set_smaller_than_a_batch_is_taken_whole(manifests: dict[str, Manifest]) -> None:
    small = {k: replace(m, table=m.table.slice(0, 5)) for k, m in manifests.items()}
    assert {k: len(m) for k, m in part(small).items()} == {"train": 5, "val": 5}


def test_every_monitored_class_is_in_the_val_part(manifests: dict[str, Manifest]) -> None:
    rows = list(manifests["val"].rows())
    only_last = [i for i, r in enumerate(rows) if 2 not in r.boxes[:, 0]]
    last = next(i for i, r in enumerate(rows) if 2 in r.boxes[:, 0])
    val = replace(manifests["val"], table=manifests["val"].table.take([*only_last, last]))
    found = part({**manifests, "val": val}, validation_batch=1, ranks=1, monitors=("map50", "class/rare/map50"))["val"]
    assert any(2 in row.boxes[:, 0] for row in found.rows()) and len(found) == 2
