"""Timeline and phases."""

import json
import math
import resource
import threading
import time
from pathlib import Path

from kfp_gate.observing.phases import BACKWARD, DATA, FORWARD, LOSS, Phases
from kfp_gate.observing.timeline import Timeline, read_timeline


def test_lines_are_json_with_a_time_zone_and_null_for_what_is_no_number(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "a" / "timeline.jsonl", run="r", rank=2)
    timeline.phase = "train"
    timeline.write("epoch", values={"map50": math.nan, "원뿔": 0.5}, other=[math.inf, None, True, Path("x")])
    line = json.loads(timeline.path.read_text())
    assert line["values"] == {"map50": None, "원뿔": 0.5} and line["other"] == [None, None, True, "x"]
    assert (line["kind"], line["run"], line["rank"], line["phase"]) == ("epoch", "r", 2, "train")
    assert line["time"][-6] in "+-"


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    timeline.write("epoch", epoch=1)
    with timeline.path.open("a") as handle:
        handle.write('{"kind": "epo')
    assert [v["epoch"] for v in read_timeline(timeline.path)] == [1]


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    threads = [
        threading.Thread(target=lambda n=n: [timeline.write("sample", n=n, text="x" * 500) for _ in range(50)])
        for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(read_timeline(timeline.path))) == 200


def test_a_full_disk_costs_lines_and_says_how_many() -> None:
    timeline = Timeline(Path("/dev/full"))
    timeline.write("epoch")
    timeline.write("epoch")
    assert timeline._lost == 2


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    """A disk that fills up within a line, and a process that ended within one."""
    timeline = Timeline(tmp_path / "t.jsonl")
    timeline.write("start")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (timeline.path.stat().st_size + 20, hard))
    try:
        timeline.write("window")
        timeline.write("window")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    timeline.write("memory")
    with timeline.path.open("a") as handle:
        handle.write('{"kind": "epo')
    Timeline(timeline.path).write("start")
    found = list(read_timeline(timeline.path))
    assert [(x["kind"], x.get("lines_lost")) for x in found] == [("start", None), ("memory", 2), ("start", None)]


def test_phases_add_up_to_the_time_that_passed() -> None:
    started = time.perf_counter()
    phases = Phases()
    for _ in range(3):
        phases.enter(DATA)
        time.sleep(0.01)
        phases.enter(FORWARD)
        time.sleep(0.02)
        phases.enter(BACKWARD)
        phases.step_done()
    with phases.during("validation"):
        time.sleep(0.01)
    times = phases.take()
    passed = time.perf_counter() - started
    assert abs(times.total - passed) < 0.005
    assert times.seconds[DATA] >= 0.03 and times.seconds[FORWARD] >= 0.06 and times.seconds["validation"] >= 0.01
    assert times.steps == 3 and phases.current == BACKWARD
    assert phases.take().steps == 0


def test_what_was_spent_in_a_phase_leaves_out_what_runs_now() -> None:
    phases = Phases()
    phases.enter(DATA)
    time.sleep(0.01)
    assert phases.spent(DATA) == 0.0 and phases.device_so_far() is None
    phases.enter(LOSS)
    assert phases.spent(DATA) >= 0.01 and phases.spent(LOSS) == 0.0
