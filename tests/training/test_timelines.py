"""Timelines leave the pod while training runs, whatever the store does."""

import gzip
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.errors import Unavailable
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import LocalStore
from kfp_gate.training import timelines
from kfp_gate.training.timelines import Packed, Timelines


def lines_of(packed: bytes) -> list[dict[str, Any]]:
    return [json.loads(x) for x in gzip.decompress(packed).decode().splitlines()]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert condition()


def test_only_whole_new_lines_are_packed(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl", rank=1)
    packed = Packed(timeline.path)
    assert not packed.grow() and packed.content() == b""
    timeline.write("start", name="원뿔")
    assert packed.grow() and not packed.grow()
    with timeline.path.open("a") as handle:
        handle.write('{"kind": "half')
    assert not packed.grow()
    with timeline.path.open("a") as handle:
        handle.write('"}\n')
    timeline.write("end")
    assert packed.grow()
    assert [x["kind"] for x in lines_of(packed.content())] == ["start", "half", "end"]


def test_the_first_and_the_last_lines_are_kept_of_a_long_one(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    packed = Packed(timeline.path)
    for number in range(100):
        timeline.write("window", number=number)
        packed.grow()
    bound = len(packed.content()) // 4
    found = [x["number"] for x in lines_of(packed.content(bound))]
    assert len(packed.content(bound)) <= bound
    assert found[0] == 0 and found[1:] == list(range(100 - len(found) + 1, 100)) and 10 < len(found) < 40


def test_it_is_in_the_store_while_training_runs_and_whole_at_the_end(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl", rank=3)
    sent = Timelines(timeline, str(tmp_path / "store"), "abc123", rank=3, folder=tmp_path / "tracked")
    timeline.write("start")
    sent.start()
    sent.epoch_ends()
    where = tmp_path / "store" / "timelines" / "abc123" / "rank3.jsonl.gz"
    wait_for(where.is_file)
    timeline.write("end")
    assert [x["kind"] for x in lines_of(sent.content())] == ["start", "end"]
    timeline.write("after")
    sent.stop()
    assert [x["kind"] for x in lines_of(where.read_bytes())] == ["start", "end", "after"]
    assert sent.cost_s > 0


def test_a_store_that_is_down_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    down = [True]
    write = LocalStore.write

    def writes(self: LocalStore, key: str, content: bytes) -> None:
        if down[0]:
            raise Unavailable("no answer", expected="a store", where=key, next_step="wait")
        write(self, key, content)

    monkeypatch.setattr(LocalStore, "write", writes)
    for name in ("EVERY_S", "LEAST_S", "AWAY_S"):
        monkeypatch.setattr(timelines, name, 0.01)
    timeline = Timeline(tmp_path / "t.jsonl")
    sent = Timelines(timeline, str(tmp_path / "store"), "t", rank=0, folder=tmp_path)
    with caplog.at_level(logging.WARNING):
        sent.start()
        timeline.write("start")
        wait_for(lambda: sent.failures >= 3)
        down[0] = False
        wait_for(lambda: sent.failures == 0)
        sent.stop()
    assert [r.message for r in caplog.records] == [
        "the timeline of rank 0 does not reach storage (no answer). Training goes on."
    ]
    assert lines_of((tmp_path / "store" / "timelines" / "t" / "rank0.jsonl.gz").read_bytes())
