"""The launcher's heartbeat: only a beat that stopped changing is stale."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from kfp_gate.training.heartbeat import KEY, Heartbeat, beat


def test_a_beat_that_stops_changing_is_stale_and_a_new_one_is_not(tmp_path: Path) -> None:
    heart = Heartbeat(str(tmp_path), bound_s=0.05)
    assert heart.stale() == ""
    beat(str(tmp_path))
    assert heart.stale() == ""
    time.sleep(0.1)
    assert "has not changed" in heart.stale()
    time.sleep(0.01)
    beat(str(tmp_path))
    assert heart.stale() == ""


def test_clocks_that_differ_between_machines_end_nothing(tmp_path: Path) -> None:
    (tmp_path / KEY).write_text(json.dumps({"time": 12.0}))
    assert Heartbeat(str(tmp_path), bound_s=5).stale() == ""


@pytest.mark.parametrize("content", ["", "{", "[]", '{"time": "x"}', None])
def test_what_cannot_be_read_is_not_stale(tmp_path: Path, content: str | None) -> None:
    heart = Heartbeat(str(tmp_path), bound_s=0.01)
    beat(str(tmp_path))
    assert heart.stale() == ""
    time.sleep(0.05)
    if content is None:
        shutil.rmtree(tmp_path)
    else:
        (tmp_path / KEY).write_text(content)
    assert heart.stale() == ""


def test_the_watch_calls_once(tmp_path: Path) -> None:
    called = threading.Event()
    reasons: list[str] = []
    heart = Heartbeat(str(tmp_path), bound_s=0.1)
    beat(str(tmp_path))
    heart.watch(lambda reason: (reasons.append(reason), called.set())[0])  # type: ignore[func-returns-value]
    assert called.wait(10)
    heart.close()
    assert len(reasons) == 1
