"""Stretches of steps: complete, without overlap, warm-up apart, and bounded."""

from pathlib import Path
from typing import Any

import pytest

from kfp_gate.observing.loading import Made
from kfp_gate.observing.phases import BACKWARD, FORWARD, Phases
from kfp_gate.observing.timeline import Timeline, read_timeline
from kfp_gate.training import windows as module
from kfp_gate.training.windows import Windows


class LateDevice:
    """A device clock whose seconds are known only after it was waited for."""

    def __init__(self) -> None:
        self.marks = 0.0
        self.known = 0.0
        self.waits = 0

    def mark(self, phase: str) -> None:
        self.marks += 0.5

    def so_far(self) -> dict[str, float]:
        return {"forward": self.known}

    def settle(self) -> None:
        self.waits += 1
        self.known = self.marks

    def collect(self) -> dict[str, float]:
        return {}


@pytest.fixture
def timeline(tmp_path: Path) -> Timeline:
    return Timeline(tmp_path / "t.jsonl")


def step(windows: Windows, **values: Any) -> None:
    windows.phases.enter(FORWARD)
    windows.phases.enter(BACKWARD)
    windows.step(**{"images": 4, "moved": 100, "made": None, "ready": None, **values})


def test_every_step_is_in_one_line(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_S", 0.0)
    monkeypatch.setattr(module, "CLOSE_WINDOWS", 6)
    windows = Windows(timeline, Phases())
    for epoch in (1, 2):
        windows.begin(epoch, (epoch - 1) * 10)
        for _ in range(10):
            step(windows)
        windows.end()
    lines = list(read_timeline(timeline.path))
    assert [w["batches"] for w in lines] == [[n, n] for n in range(6)] + [[6, 9], [10, 19]]
    assert [w["warmup"] for w in lines] == [True] * 3 + [False] * 5
    assert sum(w["steps"] for w in lines) == 20 and sum(w["images"] for w in lines) == 80
    assert [w["epoch"] for w in lines] == [1] * 7 + [2]


def test_the_loaders_sums_are_of_these_batches_and_unknown_is_null(timeline: Timeline) -> None:
    windows = Windows(timeline, Phases())
    windows.begin(1, 0)
    for _ in range(module.WARM_STEPS):
        step(windows, images=None, moved=None)
    for number in range(100):
        step(windows, made=Made({"read": [0.5, 0.25, 2]}, 1000), ready=number % 3)
    windows.end()
    windows.end()
    *warm, line = read_timeline(timeline.path)
    assert len(warm) == 3 and all(w["loader"] is None and w["images"] is None and w["bytes"] is None for w in warm)
    assert line["loader"] == {"batches": 100, "bytes": 100_000, "parts": {"read": [50.0, 25.0, 200]}, "ready": 0.99}
    assert len(line["each"]) == 32 and line["bytes"] == 10_000


def test_another_kind_of_step_is_another_stretch(timeline: Timeline) -> None:
    windows = Windows(timeline, Phases())
    windows.begin(1, 0)
    for _ in range(5):
        step(windows)
    windows.switch(input=module.PREPARED, profiled=True)
    step(windows)
    windows.switch()
    windows.switch()
    step(windows)
    windows.end()
    found = [(w["steps"], w["input"], w["profiled"]) for w in read_timeline(timeline.path)][3:]
    assert found == [(2, "usual", False), (1, "prepared", True), (1, "usual", False)]


def test_no_step_waits_for_the_device(timeline: Timeline) -> None:
    device = LateDevice()
    windows = Windows(timeline, Phases(device))
    windows.begin(1, 0)
    for _ in range(5):
        step(windows)
    assert device.waits == 0
    windows.end()
    assert device.waits == 1
    lines = list(read_timeline(timeline.path))
    assert [w["device"] for w in lines[:-1]] == [{}] * 3 and lines[-1]["device"]["forward"] > 0
