"""The profile window on its own: when it opens and closes, what it writes, and that its failures cost only itself.

Whole trainings with a window are in test_close_look.py.
"""

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import RawValue
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.observing.loading import Made
from kfp_gate.observing.phases import DATA, FORWARD, OTHER, Phases
from kfp_gate.observing.timeline import Timeline, read_timeline
from kfp_gate.training.op_trace import op_times
from kfp_gate.training.profiling import UNDER_NSYS, ProfileWindow
from kfp_gate.training.window_plan import WindowPlan

DEVICE = torch.autograd.DeviceType

# Plan -----------------------------------------------------------------------------------------------------------


@given(st.integers(0, 400), st.integers(1, 100), st.integers(0, 64))
def test_a_window_fits_into_what_is_left_of_the_epoch(left: int, steps: int, stock: int) -> None:
    plan = WindowPlan.fit(left, steps, stock)
    full = WindowPlan.full(steps, stock)
    if plan is None:
        assert left < 2
        return
    assert 1 <= plan.active <= steps and 0 < plan.opens + 1 < plan.closes <= plan.total <= left
    assert plan.settle <= full.settle and plan.around <= full.around
    if left >= full.total:
        assert plan == full
    if left >= 4:
        assert plan.around >= 1, "something to compare with goes before the length of the window"


# Window ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    window: ProfileWindow
    phases: Phases
    timeline: Timeline
    flag: Any

    def step(self) -> None:
        """One step of a training."""
        self.phases.enter(FORWARD)
        torch.ones(16, 16) @ torch.ones(16, 16)
        self.phases.enter(DATA)
        self.window.step_done(0.5 if self.window.open else 0.25)

    def epoch(self, length: int, *, skip: int = 0, stock: int = 0) -> Iterator[bool]:
        """Whether each step ran under the instruments, as it ends."""
        self.phases.enter(DATA)
        self.window.epoch_begins(length, skip=skip, stock=stock, workers=0)
        self.window.turn()
        for _ in range(length):
            assert bool(self.flag.value) == self.window.open
            yield self.window.open
            self.step()
            if self.window.due:
                self.window.turn()
        self.window.steps_end()

    def lines(self) -> list[dict[str, Any]]:
        path = self.timeline.path
        return [x for x in read_timeline(path) if x["kind"] == "profile"] if path.is_file() else []


@pytest.fixture
def make(tmp_path: Path) -> Any:
    def build(steps: int = 3, *, folder: Path = tmp_path, **more: Any) -> Run:
        timeline, phases, flag = Timeline(tmp_path / "timeline.jsonl"), Phases(), RawValue("b", 0)
        window = ProfileWindow(
            steps, folder=folder, timeline=timeline, phases=phases, flag=flag, **{"cuda": False, **more}
        )
        return Run(window, phases, timeline, flag)

    return build


def test_a_window_opens_once_and_says_what_it_saw_and_cost(make: Any, tmp_path: Path) -> None:
    run = make(3, reproduce=lambda folder: f"nsys profile {folder.name}")
    run.window.take(Made({"decode": [1.0, 1.0, 1]}))
    opened = list(run.epoch(30, skip=3))
    # 3 of warm-up, 5 around, 1 that warms the profiler, 3, 5 around.
    assert [i for i, o in enumerate(opened) if o] == [8, 9, 10, 11]
    assert not any(run.epoch(30)) and not run.flag.value and run.phases.on_change is None
    (line,) = run.lines()
    assert {
        k: line[k] for k in ("steps", "step_s", "around_s", "around_steps", "cost", "trace", "nsys", "problems")
    } == {
        "steps": 3, "step_s": 0.5, "around_s": 0.25, "around_steps": 10, "cost": 1.0, "trace": "profile/trace.json.gz",
        "nsys": "nsys profile profile", "problems": [],
    }  # fmt: skip
    # Starting, stopping and writing the trace is told, so that nobody takes it for time between usual steps.
    assert line["apart_s"] == pytest.approx(run.phases.so_far()[OTHER], rel=0.2) and line["apart_s"] > 0
    (product,) = [op for op in line["ops"] if op["name"] == "aten::mm"]
    assert product["calls"] == 3 and product["cpu_s"] > 0 and product["device_s"] is None
    assert line["kernels"] is None and line["device_busy_s"] is None and line["transforms"] == {}
    trace = gzip.decompress((tmp_path / "profile" / "trace.json.gz").read_bytes())
    assert len([e for e in json.loads(trace)["traceEvents"] if e.get("name") == "aten::mm"]) == 3
    assert str(tmp_path).encode() not in trace
    assert [p.name for p in (tmp_path / "profile").iterdir()] == ["trace.json.gz"]


def test_the_numbers_are_those_of_torchs_own_summary() -> None:
    from torch.profiler import ProfilerActivity, profile

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(3):
            model(torch.ones(4, 8)).sum().backward()
    expected = {row.key: (row.count, row.self_cpu_time_total / 1e6) for row in found.key_averages()}
    rows = op_times(found.profiler.kineto_results.events(), cuda=False).ops  # type: ignore[union-attr]
    assert len(rows) == 20
    for row in rows:
        count, seconds = expected[row["name"]]
        assert row["calls"] >= count and row["cpu_s"] == pytest.approx(seconds, abs=2e-6)


def test_a_short_epoch_gets_a_short_window_and_a_shorter_one_none(make: Any) -> None:
    run = make(20)
    assert not any(run.epoch(4, skip=3)), "nothing is left of it"
    assert sum(run.epoch(8)) == 1 + 5
    (line,) = run.lines()
    assert (line["steps"], line["around_steps"], line["cost"]) == (5, 2, 1.0)


def test_a_window_without_steps_around_does_not_know_its_cost(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    run = make(5)
    with caplog.at_level("INFO"):
        list(run.epoch(3))
    (line,) = run.lines()
    assert (line["steps"], line["around_s"], line["cost"]) == (1, None, None)
    assert "too short to tell what the instruments cost" in caplog.text


def test_an_epoch_that_ends_early_closes_what_is_open(make: Any) -> None:
    run = make(10)
    steps = run.epoch(40)
    while not next(steps):
        pass
    next(steps)
    run.window.steps_end()
    assert not run.flag.value and not run.window.open
    (line,) = run.lines()
    assert line["steps"] <= 1 and line["ops"] is not None
    assert not any(make(0).epoch(20))


def test_an_epoch_that_begins_again_starts_over(make: Any) -> None:
    """Upstream restarts the first epoch with half the batch when the GPU's memory is not enough."""
    run = make(3)
    steps = run.epoch(30)
    while not next(steps):
        pass
    assert sum(run.epoch(30)) == 4 and len(run.lines()) == 1


def test_the_time_of_the_instruments_is_no_steps(make: Any) -> None:
    run = make(3)
    list(run.epoch(30))
    assert run.phases.current == DATA and run.phases.spent(OTHER) > 0


@pytest.mark.parametrize("place", ["start", "step", "stop", "export_chrome_trace"])
def test_a_profiler_that_raises_costs_the_profile(
    make: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("made by the test\nand more")

    monkeypatch.setattr(f"torch.profiler.profile.{place}", broken)
    run = make(3)
    with caplog.at_level("WARNING"):
        assert sum(run.epoch(30)) == 4
    (line,) = run.lines()
    assert line["steps"] == 3 and line["cost"] == 1.0
    assert any("made by the test" in p and "and more" not in p for p in line["problems"])
    assert caplog.text.count("made by the test; training goes on") == 1
    assert (line["ops"] is None) == (place in ("start",)) or place in ("step", "stop")
    assert line["trace"] is None or place in ("step", "stop")


def test_a_disk_that_takes_no_file_costs_the_trace(make: Any, tmp_path: Path) -> None:
    (tmp_path / "full").write_text("a file where a folder should be")
    run = make(3, folder=tmp_path / "full")
    list(run.epoch(30))
    (line,) = run.lines()
    assert line["trace"] is None and line["ops"]
    assert line["problems"] == ["the trace file: NotADirectoryError: Not a directory"], "and no path of this machine"


# GPU, replayed: there is none here ------------------------------------------------------------------------------


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr("torch.cuda.synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr("torch.cuda.profiler.start", lambda: calls.append("start"))
    monkeypatch.setattr("torch.cuda.profiler.stop", lambda: calls.append("stop"))
    monkeypatch.setattr("torch.cuda.nvtx.range_push", lambda name: calls.append(f"+{name}"))
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: calls.append("-"))
    return calls


def test_ranges_carry_the_phases_between_start_and_stop(
    make: Any, cuda: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNDER_NSYS[0], "1")
    run = make(2, cuda=True)
    list(run.epoch(30))
    assert cuda[:3] == ["wait", "start", f"+{OTHER}"] and cuda[-3:] == ["-", "wait", "stop"]
    inside = cuda[2:-2]
    assert inside[0::2] == [f"+{p}" for p in (OTHER, *[DATA, FORWARD] * 3, DATA, OTHER)]
    assert set(inside[1::2]) == {"-"}
    (line,) = run.lines()
    assert line["ops"] is None and line["trace"] is None and line["problems"] == [], "nsys is the one that listens"


def test_a_gpu_that_fails_in_a_window_costs_the_ranges(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch really does here, without a GPU."""
    monkeypatch.setenv(UNDER_NSYS[1], "/x")
    run = make(2, cuda=True)
    list(run.epoch(30))
    (line,) = run.lines()
    assert line["steps"] == 2 and any(p.startswith("NVTX: ") for p in line["problems"])


@dataclass
class Event:
    """One of the profiler's events, as far as it is read."""

    named: str
    begin: int
    length: int
    device: Any = DEVICE.CPU
    number: int = 0
    link: int = 0
    user: bool = False

    def name(self) -> str:
        return self.named

    def start_ns(self) -> int:
        return self.begin

    def duration_ns(self) -> int:
        return self.length

    def device_type(self) -> Any:
        return self.device

    def is_async(self) -> bool:
        return False

    def start_thread_id(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return self.number

    def linked_correlation_id(self) -> int:
        return self.link

    def is_user_annotation(self) -> bool:
        return self.user


def test_kernels_are_counted_and_their_time_goes_to_the_operation_that_started_them() -> None:
    ms = 1_000_000
    found = op_times(
        [
            Event("ProfilerStep#1", 0, 100 * ms),
            Event("aten::conv2d", 0, 10 * ms, number=1), Event("aten::cudnn", 2 * ms, 6 * ms, number=2),
            Event("aten::relu", 10 * ms, 1 * ms, number=3),
            Event("gemm", 5 * ms, 20 * ms, DEVICE.CUDA, link=2), Event("gemm", 20 * ms, 10 * ms, DEVICE.CUDA, link=2),
            Event("relu", 40 * ms, 2 * ms, DEVICE.CUDA, link=3), Event("Memcpy HtoD", 41 * ms, 3 * ms, DEVICE.CUDA),
            Event("Optimizer.step", 0, 90 * ms, DEVICE.CUDA, user=True),
        ],
        cuda=True,
    )  # fmt: skip
    assert found.ops == [
        {"name": "aten::cudnn", "calls": 1, "cpu_s": 0.006, "device_s": 0.03},
        {"name": "aten::conv2d", "calls": 1, "cpu_s": 0.004, "device_s": 0.0},
        {"name": "aten::relu", "calls": 1, "cpu_s": 0.001, "device_s": 0.002},
    ]
    assert found.kernels == 3 and found.device_busy_s == 0.029
    assert found.top_kernels == [
        {"name": "gemm", "calls": 2, "device_s": 0.03}, {"name": "Memcpy HtoD", "calls": 1, "device_s": 0.003},
        {"name": "relu", "calls": 1, "device_s": 0.002},
    ]  # fmt: skip
