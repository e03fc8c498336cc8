"""Timeline, phases and sampler."""

import json
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

from kfp_gate.observing.memory import ControlGroup
from kfp_gate.observing.phases import BACKWARD, DATA, FORWARD, LOSS, Phases
from kfp_gate.observing.pressure import read_pressure, read_throttling
from kfp_gate.observing.sampler import Sampler
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


def test_the_sampler_sees_a_busy_thread_and_a_loader_process(tmp_path: Path) -> None:
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"), every_s=0.2)
    child = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10000))"])
    try:
        sampler.look()
        end = time.process_time() + 0.3
        while time.process_time() < end:
            sum(range(10000))
        found = sampler.look()
    finally:
        child.kill()
        child.wait()
    assert found["cpu"] > 0.05 and found["cpu_thread"] <= found["cpu"] + 0.02
    assert found["loaders"]["count"] == 1 and found["loaders"]["cpu"] > 0.05
    assert found["rss"] > 0 and found["cuda_reserved"] is None
    assert "gpu_util" not in found and found["unknown"] == {"gpu": "this process uses no GPU"}


def test_the_sampler_writes_until_it_is_stopped(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    sampler = Sampler(timeline, every_s=0.02)
    sampler.start()
    deadline = time.monotonic() + 10
    while sampler.count < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    sampler.stop()
    lines = list(read_timeline(timeline.path))
    assert len(lines) >= 3 and all(x["kind"] == "sample" for x in lines)
    assert sampler.cost_s > 0


def test_throttling_and_pressure_of_both_versions(tmp_path: Path) -> None:
    two = tmp_path / "two"
    two.mkdir()
    (two / "cpu.stat").write_text("usage_usec 10\nnr_periods 5\nnr_throttled 3\nthrottled_usec 1500000\n")
    (two / "io.pressure").write_text(
        "some avg10=12.50 avg60=0 avg300=0 total=1\nfull avg10=1 avg60=0 avg300=0 total=1\n"
    )
    group = ControlGroup(2, two)
    assert read_throttling(group) == {"throttled_periods": 3, "throttled_s": 1.5}
    assert read_pressure(group, root=tmp_path) == {"pressure_cpu": None, "pressure_io": 0.125, "pressure_memory": None}
    one = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    one.mkdir(parents=True)
    (one / "cpu.stat").write_text("nr_periods 5\nnr_throttled 2\nthrottled_time 2000000000\n")
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:cpu,cpuacct:/host/path\n")
    found = read_throttling(ControlGroup(1, tmp_path / "sys/fs/cgroup/memory"), root=tmp_path)
    assert found == {"throttled_periods": 2, "throttled_s": 2.0}
    assert read_throttling(None) == {"throttled_periods": None, "throttled_s": None}
