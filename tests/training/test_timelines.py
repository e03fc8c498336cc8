"""Timelines leave the pod while training runs, whatever the store does."""

import gzip
import json
import logging
import tempfile
import threading
import time
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import Unavailable
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import LocalStore
from kfp_gate.training import timelines
from kfp_gate.training.timelines import Packed, Timelines, ends_of


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


def test_a_long_timeline_of_an_earlier_process_is_taken_in_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "PIECE", 500)
    timeline = Timeline(tmp_path / "t.jsonl")
    for number in range(60):
        timeline.write("window", number=number, noise=token_hex(50))
    packed = Packed(timeline.path)
    assert packed.grow() and not packed.grow()
    assert [x["number"] for x in lines_of(packed.content())] == list(range(60))
    assert packed.size == len(packed.content())
    found = [x["number"] for x in lines_of(packed.content(packed.size // 3))]
    assert found[0] == 0 and found[-1] == 59 and len(packed.content(packed.size // 3)) <= packed.size // 3


def test_the_larger_it_is_the_less_often_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run of weeks on many ranks would send its whole timelines every minute."""
    monkeypatch.setattr(timelines, "EVERY_S", 0.01)
    monkeypatch.setattr(timelines, "LEAST_S", 0.01)
    sent: list[str] = []
    write = LocalStore.write
    monkeypatch.setattr(LocalStore, "write", lambda s, key, content: sent.append(key) or write(s, key, content))
    timeline = Timeline(tmp_path / "t.jsonl")
    small = Timelines(timeline, str(tmp_path / "store"), "small", rank=0, folder=tmp_path)
    timeline.write("start")
    small.start()
    for _ in range(3):
        timeline.write("sample")
        before = len(sent)
        wait_for(lambda before=before: len(sent) > before)
    small.stop()
    monkeypatch.setattr(timelines, "PACE", 1)
    sent.clear()
    large = Timelines(timeline, str(tmp_path / "store"), "large", rank=0, folder=tmp_path)
    large.start()
    wait_for(lambda: sent)
    for _ in range(20):
        timeline.write("sample")
        large.epoch_ends()
        time.sleep(0.01)
    assert len(sent) == 1
    large.stop()
    assert len(sent) == 2


class Server:
    """Stands for the tracker of a run."""

    def __init__(self, *, ready: bool = True, takes: bool = True) -> None:
        self.ready, self.takes = ready, takes
        self.files: list[str] = []
        self.hang = threading.Event()
        self.hang.set()

    def send_file(self, path: Path) -> bool:
        self.files.append(path.name)
        self.hang.wait(20)
        return self.takes


def tracked(tmp_path: Path, server: Server) -> tuple[Timeline, Timelines]:
    timeline = Timeline(tmp_path / "t.jsonl")
    timeline.write("start")
    sent = Timelines(timeline, str(tmp_path / "s"), "t", rank=0, folder=tmp_path / "f", tracker=cast(Any, server))
    return timeline, sent


def test_a_tracking_server_that_takes_no_files_is_not_asked_with_every_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timelines, "EVERY_S", 0.01)
    monkeypatch.setattr(timelines, "LEAST_S", 0.01)
    server = Server(takes=False)
    timeline, sent = tracked(tmp_path, server)
    sent.start()
    for _ in range(20):
        timeline.write("sample")
        time.sleep(0.01)
    assert server.files == ["timeline-rank0.jsonl.gz"]
    sent.stop()
    sent.track(1, b"packed")
    assert server.files == ["timeline-rank0.jsonl.gz"] * 2, "once more at the end, and no other rank's"


def test_without_tracking_nothing_is_prepared_for_it(tmp_path: Path) -> None:
    _, sent = tracked(tmp_path, Server(ready=False))
    sent.start()
    sent.epoch_ends(cast(Any, None))
    sent.stop()
    assert (tmp_path / "s" / "timelines" / "t" / "rank0.jsonl.gz").is_file() and not (tmp_path / "f").exists()


def test_what_is_written_while_an_object_is_on_its_way_is_not_forgotten(tmp_path: Path) -> None:
    """The last lines come within milliseconds of an epoch's end, which sends one too."""
    server = Server()
    server.hang.clear()
    timeline, sent = tracked(tmp_path, server)
    sent.start()
    sent.epoch_ends()
    wait_for(lambda: server.files)
    timeline.write("stop")
    threading.Timer(0.2, server.hang.set).start()
    sent.stop()
    found = lines_of((tmp_path / "s" / "timelines" / "t" / "rank0.jsonl.gz").read_bytes())
    assert [x["kind"] for x in found] == ["start", "stop"]


def test_other_ranks_do_not_wait_for_a_server_that_hangs(tmp_path: Path) -> None:
    server = Server()
    server.hang.clear()
    _, sent = tracked(tmp_path, server)
    sent.start()
    sent.epoch_ends()
    wait_for(lambda: server.files)
    sent.stop(0.1)
    sent.track(1, b"packed")
    assert server.files == ["timeline-rank0.jsonl.gz"]
    server.hang.set()


@given(st.lists(st.text("ab", max_size=40), max_size=60), st.integers(20, 400))
def test_of_a_long_file_whole_lines_of_both_ends_go(lines: list[str], bound: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.jsonl")
        path.write_text("".join(f"{x}\n" for x in lines))
        found = ends_of(path, bound)
    assert len(found) <= bound
    kept = found.decode().splitlines()
    if sum(len(x) + 1 for x in lines) <= bound:
        assert kept == lines
    else:
        count = next(i for i in range(len(kept) + 1) if kept[i:] == lines[len(lines) - len(kept[i:]) :])
        assert kept[:count] == lines[:count]
