"""The warning before memory runs out."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.observing.memory import Memory
from kfp_gate.observing.memory_growth import main_phase
from kfp_gate.observing.timeline import Timeline, read_timeline
from kfp_gate.training.memory_watch import MemoryWatch

MIB, GIB = 1 << 20, 1 << 30


def watched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, at: Callable[[int], Memory], *, seen: int, epochs: int = 100
) -> tuple[list[str], list[dict[str, Any]]]:
    """Log lines, and `growth` lines of the timeline, when memory at the end of epoch e is `at(e)`."""
    timeline = Timeline(tmp_path / "t.jsonl")
    watch = MemoryWatch(timeline, epochs=epochs, read=lambda **_: Memory())
    with caplog.at_level(logging.INFO, "kfp_gate.training.memory_watch"):
        for epoch in range(1, seen + 1):
            watch.take()
            watch.epoch_ends(epoch, at(epoch))
    lines = list(read_timeline(timeline.path)) if timeline.path.exists() else []
    return [r.getMessage() for r in caplog.records], [x for x in lines if x["kind"] == "growth"]


def leaking_loaders(epoch: int) -> Memory:
    grown = 212 * MIB * max(epoch - 3, 0)
    held = 10 * GIB + 97 * MIB + grown
    return Memory(
        rss=3 * GIB, children=6 * GIB + grown, cgroup=held + epoch * GIB // 8, limit=16 * GIB, anon=held,
        file=epoch * GIB // 8, shmem=0, children_count=8, pss=3 * GIB, children_pss=5 * GIB + grown,
    )  # fmt: skip


def test_loaders_that_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: Any) -> None:
    messages, lines = watched(tmp_path, caplog, leaking_loaders, seen=20)
    snapshot("memory-watch", "\n".join(messages))
    assert len(messages) == 1, "once, and neither for the container nor for its page cache"
    (line,) = lines
    assert (line["what"], line["since"], line["limit"], line["limit_epoch"]) == ("children", 3, 16 * GIB, 32)
    assert line["slope"] == pytest.approx(212 * MIB) and line["low"] <= line["slope"] <= line["high"]
    assert line["text"] + "; see docs/oom.md" == messages[0]
    # The forecast is right: in that epoch, and not in the one before, the container holds its limit.
    assert leaking_loaders(31).held < 16 * GIB <= leaking_loaders(32).held  # type: ignore[operator]


def test_it_is_said_long_before_it_happens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for seen in range(1, 32):
        caplog.clear()
        messages, _ = watched(tmp_path, caplog, leaking_loaders, seen=seen)
        if messages:
            break
    assert seen <= 10


def test_a_limit_beyond_the_last_epoch_is_nobodys_worry(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert watched(tmp_path, caplog, leaking_loaders, seen=20, epochs=31) == ([], [])
    assert len(watched(tmp_path, caplog, leaking_loaders, seen=20, epochs=32)[0]) == 1


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("page cache", lambda e: Memory(rss=GIB, cgroup=(2 + e) * GIB, file=e * GIB, limit=16 * GIB)),
        ("shared memory is no cache", lambda e: Memory(rss=GIB, cgroup=3 * GIB, file=GIB, shmem=GIB, limit=4 * GIB)),
        ("steady", lambda e: Memory(rss=GIB, children=GIB, cgroup=3 * GIB, file=0, anon=3 * GIB, limit=4 * GIB)),
        ("nothing known", lambda e: Memory()),
        ("a jump", lambda e: Memory(rss=GIB * (1 + (e > 9)), cgroup=3 * GIB, file=0, limit=4 * GIB)),
        ("no limit, little growth", lambda e: Memory(rss=10 * GIB + 50 * e * MIB)),
    ],
)  # fmt: skip
def test_silence(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, at: Callable[[int], Memory]) -> None:
    assert watched(tmp_path, caplog, at, seen=24) == ([], []), name


def test_without_a_known_limit(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: Any) -> None:
    messages, lines = watched(tmp_path, caplog, lambda e: Memory(rss=GIB + 100 * MIB * e), seen=12)
    snapshot("memory-watch-no-limit", "\n".join(messages))
    assert lines[0]["limit"] is None and lines[0]["limit_epoch"] is None


def test_the_device(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: Any) -> None:
    def at(epoch: int) -> Memory:
        return Memory(rss=GIB, cuda_reserved=40 * GIB + epoch * GIB, cuda_total=80 * GIB, limit=16 * GIB)

    messages, lines = watched(tmp_path, caplog, at, seen=12)
    snapshot("memory-watch-cuda", "\n".join(messages))
    assert lines[0]["limit_epoch"] == 40


def test_other_ranks_in_the_container_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """This rank grows by 100 MiB, its three neighbours as well: the container's own pace tells."""

    def at(epoch: int) -> Memory:
        return Memory(rss=GIB + 100 * MIB * epoch, cgroup=8 * GIB + 400 * MIB * epoch, file=0, limit=16 * GIB)

    messages, lines = watched(tmp_path, caplog, at, seen=10)
    assert [x["what"] for x in lines] == ["rss", "cgroup"], "its own part does not explain the container's growth"
    assert {x["limit_epoch"] for x in lines} == {21}
    assert len(messages) == 2


def test_a_forecast_that_moves_is_told_again_and_an_end_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def at(epoch: int) -> Memory:
        slow, fast = min(epoch, 12), min(max(epoch - 12, 0), 12)
        grown = 100 * MIB * slow + 600 * MIB * fast
        return Memory(rss=GIB + grown, cgroup=4 * GIB + grown, file=0, limit=24 * GIB)

    messages, lines = watched(tmp_path, caplog, at, seen=40, epochs=300)
    assert len(lines) == 2 and lines[1]["limit_epoch"] < lines[0]["limit_epoch"] / 2
    assert lines[1]["since"] in (12, 13)
    assert messages[-1] == "memory of the training process does not grow any more"
    assert len(messages) == 3


def test_an_epoch_that_is_done_again_replaces_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    watch = MemoryWatch(timeline, epochs=100, read=lambda **_: Memory())
    with caplog.at_level(logging.INFO):
        for epoch in (1, 2, 3, 4, 4, 4, 4, 4, 4):
            watch.take()
            watch.epoch_ends(epoch, leaking_loaders(epoch))
    assert not caplog.records


def test_the_phase_in_which_it_grows(tmp_path: Path, caplog: pytest.LogCaptureFixture, snapshot: Any) -> None:
    """An evaluator that keeps its predictions; the training steps borrow memory and give it back."""
    timeline = Timeline(tmp_path / "t.jsonl")
    now = {"rss": GIB}

    def read(**_: Any) -> Memory:
        return Memory(rss=now["rss"], cgroup=3 * GIB + now["rss"], file=0, anon=3 * GIB + now["rss"], limit=8 * GIB)

    watch = MemoryWatch(timeline, epochs=100, read=read)
    with caplog.at_level(logging.WARNING):
        for epoch in range(1, 13):
            timeline.phase = "train"
            now["rss"] += 5 * MIB
            timeline.phase = "validate"
            now["rss"] += 64 * MIB
            timeline.phase = "checkpoint"
            now["rss"] -= 5 * MIB
            timeline.phase = ""
            more = watch.take()
            assert (
                more["by_phase"]["validate"]["rss"] == 64 * MIB and more["by_phase"]["checkpoint"]["anon"] == -5 * MIB
            )
            assert "cuda_reserved" not in more["by_phase"]["validate"], "unknown is left out, not 0"
            assert ("at_start" in more) == (epoch == 1)
            watch.epoch_ends(epoch, read())
    snapshot("memory-watch-phase", "\n".join(r.getMessage() for r in caplog.records))
    (line,) = (x for x in read_timeline(timeline.path) if x["kind"] == "growth")
    assert line["phase"], line["what"] == ("validate", "rss")


def test_a_phase_is_not_named_where_growth_is_spread() -> None:
    even = [{"train": {"rss": 50}, "validate": {"rss": 50}}] * 5
    assert main_phase(even, "rss", 100.0) == ""
    swing = [{"train": {"rss": 500}, "validate": {"rss": -400}}] * 5
    assert main_phase(swing, "rss", 100.0) == "", "which of the two keeps it cannot be told"
    assert main_phase([{"train": {"rss": 10}, "validate": {"rss": 90}}] * 5, "rss", 100.0) == "validate"
    assert main_phase([], "rss", 100.0) == "" == main_phase([{"train": {}}], "rss", 100.0)


def test_shares_are_read_where_there_is_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cost some 10 ms for each GiB that is mapped."""
    asked: list[bool] = []
    now = [0.0]

    def read(**more: bool) -> Memory:
        asked.append(more.get("pss", False))
        return Memory(rss=2 * GIB, children=8 * GIB)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watch = MemoryWatch(Timeline(tmp_path / "t.jsonl"), epochs=5, read=read)
    for _ in range(100):
        now[0] += 10.0
        watch.read()
    assert sum(asked) == 1000 // 120, "10 GiB take 0.12 s: once in two minutes is a thousandth"


def test_a_device_that_fails_does_not_fail_the_watch(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")

    def read(**_: Any) -> Memory:
        raise RuntimeError("CUDA error: unspecified launch failure")

    watch = MemoryWatch(timeline, epochs=5, read=read)
    timeline.phase = "train"
    assert timeline.phase == "train" and watch.take() == {"by_phase": {}}
