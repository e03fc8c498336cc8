"""The sampler's look at real processes, and at fixture trees of what this machine does not have."""

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.observing.memory import ControlGroup, find_control_group
from kfp_gate.observing.network import read_network
from kfp_gate.observing.pressure import read_disk, read_pressure, read_throttling
from kfp_gate.observing.processes import LOADER_NAME
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline, read_timeline

BUSY = "while True: sum(range(10000))"


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@contextmanager
def child(code: str, *, name: str = LOADER_NAME) -> Iterator[int]:
    """A process of that name that has begun to run `code`."""
    head = f"open('/proc/self/comm','w').write({name!r}); print('on', flush=True)\n"
    process = subprocess.Popen([sys.executable, "-c", head + textwrap.dedent(code)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_busy_thread_and_a_loader_among_other_children(tmp_path: Path) -> None:
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"))
    with child(BUSY), child("import time; time.sleep(60)"), child(BUSY, name="resource_tracke"):
        sampler.look()
        end = time.process_time() + 0.3
        while time.process_time() < end:
            sum(range(10000))
        found = sampler.look()
    assert found["cpu"] > 0.05 and 0 < found["cpu_thread"] <= found["cpu"] + 0.05
    assert found["loaders"]["count"] == 2
    assert found["loaders"]["cpu"] > 0.05 and found["loaders"]["cpu_max"] <= found["loaders"]["cpu"]
    assert found["loaders"]["waiting"] == 0 and found["loaders"]["looks"] == 2
    assert 0 <= found["loaders"]["queued"] <= 1 and 0 <= found["queued"] <= 1
    assert found["rss"] > 0 and found["cuda_reserved"] is None and "gpu_util" not in found


def test_a_loader_that_waits_where_no_signal_reaches_it(tmp_path: Path) -> None:
    """vfork keeps a parent in state D until its child runs another program, which this one never does.

    The child inherits the name, and is no loader.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    action = f"(os.POSIX_SPAWN_OPEN, 0, {str(fifo)!r}, 0, 0)"
    code = f"import os; os.posix_spawn('/bin/true', ['true'], {{}}, file_actions=[{action}])"
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"))
    with child(code) as waiting, child("import time; time.sleep(60)"):
        deadline = time.monotonic() + 20
        while Path(f"/proc/{waiting}/stat").read_text().rsplit(")", 1)[1].split()[0] != "D":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        sampler.look()
        for _ in range(4):
            sampler.glance()
        found = sampler.look()["loaders"]
        handle = os.open(fifo, os.O_WRONLY)  # lets it go
    os.close(handle)
    assert (found["count"], found["waiting"], found["looks"]) == (2, 0.5, 10)


def test_bytes_that_a_loader_reads(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.write_bytes(os.urandom(8 << 20))
    code = f"""
    import os, time
    handle = os.open({str(data)!r}, os.O_RDONLY)
    os.fsync(handle)
    while True:
        # Out of the page cache, so that storage is read each time.
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(handle, 0, 0)
        while os.read(handle, 1 << 20): pass
        time.sleep(0.01)
    """
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"))
    with child(code):
        sampler.look()
        deadline = time.monotonic() + 20
        while not (found := sampler.look())["loaders"]["read"] and time.monotonic() < deadline:
            time.sleep(0.3)
    assert found["loaders"]["read"] > 0
    assert found["read"] is not None and found["read"] < found["loaders"]["read"]


LOADER = """
import json, multiprocessing.resource_tracker, sys
from pathlib import Path
from torch.utils.data import DataLoader
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline
if __name__ == "__main__":
    multiprocessing.resource_tracker.ensure_running()
    batches = iter(DataLoader(range(8), batch_size=2, num_workers=2, persistent_workers=True))
    next(batches)
    sampler = Sampler(Timeline(Path(sys.argv[1])))
    found = sampler.look()["loaders"]["count"]
    children = sampler._children.look()
    print(json.dumps([found, len(children)]))
"""


def test_the_loaders_of_torch_are_told_from_the_resource_tracker(tmp_path: Path) -> None:
    script = tmp_path / "loader.py"
    script.write_text(LOADER)
    done = subprocess.run(
        [sys.executable, script, tmp_path / "t.jsonl"], capture_output=True, text=True, check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert json.loads(done.stdout) == [2, 3]


def test_the_sampler_writes_until_it_is_stopped_and_says_once_what_is_unknown(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "t.jsonl")
    sampler = Sampler(timeline, every_s=0.02)
    sampler.start()
    deadline = time.monotonic() + 10
    while sampler.count < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    sampler.stop()
    lines = list(read_timeline(timeline.path))
    assert len(lines) >= 3 and all(x["kind"] == "sample" for x in lines)
    assert lines[0]["unknown"]["gpu"] == "this process uses no GPU"
    assert all("unknown" not in line for line in lines[1:])
    assert sampler.cost_s > 0 and lines[0]["cpu"] is not None


def test_samples_grow_apart_rather_than_cost_more_than_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"), every_s=0.01)
    look, waits = sampler.look, []
    wait = sampler._done.wait

    def dear() -> dict[str, Any]:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        return look()

    def remember(seconds: float) -> bool:
        waits.append(seconds)
        return wait(min(seconds, 0.01)) or len(waits) > 12

    monkeypatch.setattr(sampler, "look", dear)
    monkeypatch.setattr(sampler._done, "wait", remember)
    sampler._run()
    assert sum(waits[:5]) == pytest.approx(0.01)
    assert sum(waits[5:10]) >= 0.02 / 0.01


def test_a_sandbox_that_tells_nothing_gives_null_and_reasons(tmp_path: Path) -> None:
    stat = "7 (a b) c) S 1 " + " ".join(["0"] * 48)
    root = tree(tmp_path / "root", {"proc/7/stat": stat, "proc/7/task/7/stat": stat})
    timeline = Timeline(tmp_path / "t.jsonl")
    sampler = Sampler(timeline, root=root, pid=7)
    sampler.look()
    sampler.write()
    (line,) = read_timeline(timeline.path)
    assert line["cpu"] == 0 and line["major_faults"] == 0
    for key in ("read", "queued", "throttled_s", "pressure_io", "cgroup", "anon", "disk_read", "net_rx", "rss"):
        assert line[key] is None, key
    assert set(line["loaders"].values()) == {None}
    assert set(line["unknown"]) == {
        "read", "queued", "throttled_periods", "pressure_cpu", "cgroup", "disk_read", "net_rx", "loaders",
        "loaders.blocked", "gpu",
    }  # fmt: skip


def test_what_a_sample_holds_names_no_path_no_command_and_no_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    timeline = Timeline(tmp_path / "t.jsonl")
    with child("import time; time.sleep(60)  # /data/patients"):
        sampler = Sampler(timeline)
        sampler.look()
        sampler.write()
    text = timeline.path.read_text()
    assert "hunter2" not in text and "patients" not in text and "python" not in text and "/" not in text


# Control groups ---------------------------------------------------------------------------------------------------

V2 = {
    "proc/self/cgroup": "0::/kubepods/pod1/c1\n",
    "sys/fs/cgroup/kubepods/pod1/c1/memory.current": "1\n",
    "sys/fs/cgroup/kubepods/pod1/c1/cpu.stat": "usage_usec 10\nnr_periods 5\nnr_throttled 1\nthrottled_usec 500\n",
    "sys/fs/cgroup/kubepods/pod1/cpu.stat": "usage_usec 10\nnr_periods 5\nnr_throttled 3\nthrottled_usec 1500000\n",
    "sys/fs/cgroup/kubepods/cpu.stat": "usage_usec 10\n",
    "sys/fs/cgroup/kubepods/pod1/c1/io.stat": (
        "259:0 rbytes=1000 wbytes=500 rios=1 wios=1 dbytes=0 dios=0\n253:0 rbytes=900 wbytes=400 rios=1 wios=1\n8:0 \n"
    ),
    "sys/fs/cgroup/kubepods/pod1/c1/io.pressure": "some avg10=12.50 avg60=0 avg300=0 total=1\nfull avg10=1 avg60=0\n",
    "sys/dev/block/253:0/slaves/nvme0n1": "",
}
V1 = {
    "proc/self/cgroup": "5:blkio:/docker/abc\n4:cpu,cpuacct:/docker/abc\n3:memory:/docker/abc\n0::/\n",
    "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": "1\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.stat": "nr_periods 5\nnr_throttled 2\nthrottled_time 2000000000\n",
    "sys/fs/cgroup/cpu,cpuacct/docker/cpu.stat": "nr_periods 0\nnr_throttled 0\nthrottled_time 0\n",
    "sys/fs/cgroup/blkio/docker/abc/blkio.throttle.io_service_bytes": (
        "8:0 Read 10\n8:0 Write 20\n8:0 Sync 30\n8:0 Total 30\n8:16 Read 1\n8:16 Write 2\nTotal 33\n"
    ),
    "proc/pressure/io": "some avg10=50.00 avg60=0 avg300=0 total=1\n",
}


def test_version_2_throttled_by_the_pods_quota(tmp_path: Path) -> None:
    root = tree(tmp_path, V2)
    group = find_control_group(root)
    assert read_throttling(group, root=root) == {"throttled_periods": 3, "throttled_s": 1.5}
    assert read_disk(group, root=root) == (1000, 500), "what went through the device mapper counts once"
    assert read_pressure(group, root=root) == {"pressure_cpu": None, "pressure_io": 0.125, "pressure_memory": None}


def test_version_1(tmp_path: Path) -> None:
    root = tree(tmp_path, V1)
    group = find_control_group(root)
    assert group is not None and group.version == 1
    assert read_throttling(group, root=root) == {"throttled_periods": 2, "throttled_s": 2.0}
    assert read_disk(group, root=root) == (11, 22)
    assert read_pressure(group, root=root)["pressure_io"] == 0.5


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/host/path\n3:memory:/host/path\n2:blkio:/host/path\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "1\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.stat": "nr_periods 5\nnr_throttled 2\nthrottled_time 2000000000\n",
        "sys/fs/cgroup/blkio/blkio.throttle.io_service_bytes_recursive": "8:0 Read 10\n8:0 Write 20\n",
    }
    root = tree(tmp_path, files)
    group = find_control_group(root)
    assert read_throttling(group, root=root) == {"throttled_periods": 2, "throttled_s": 2.0}
    assert read_disk(group, root=root) == (10, 20)


def test_no_quota_and_no_control_group_are_unknown(tmp_path: Path) -> None:
    bare = tree(tmp_path, {"c/cpu.stat": "usage_usec 5\n"})
    for group in (None, ControlGroup(2, bare / "c"), ControlGroup(1, bare / "c")):
        assert read_throttling(group, root=bare) == {"throttled_periods": None, "throttled_s": None}
        assert read_disk(group, root=bare) is None


def test_the_network_without_the_loopback_and_without_what_is_counted_twice(tmp_path: Path) -> None:
    head = (
        "Inter-|   Receive  |  Transmit\n face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
    )
    text = head + "".join(
        f"{name:>6}: {received} 9 0 0 0 0 0 0 {sent} 9 0 0 0 0 0 0\n"
        for name, received, sent in (("lo", 7, 7), ("eth0", 1000, 200), ("net1", 50, 5), ("veth12", 1000, 200))
    )
    root = tree(tmp_path, {"proc/self/net/dev": text})
    assert read_network(root) == (1050, 205)
    (root / "proc/self/net/dev").write_text(head + "    lo: 7 9 0 0 0 0 0 0 7 9 0 0 0 0 0 0\n")
    assert read_network(root) is None
    assert read_network(tmp_path / "nothing") is None


def test_a_counter_that_began_anew_is_null_for_one_sample(tmp_path: Path) -> None:
    root = tree(tmp_path / "root", V2 | {"proc/self/net/dev": " eth0: 5000 9 0 0 0 0 0 0 5000 9 0 0 0 0 0 0\n"})
    sampler = Sampler(Timeline(tmp_path / "t.jsonl"), root=root)
    sampler.look()
    tree(root, {"proc/self/net/dev": " eth0: 10 9 0 0 0 0 0 0 6000 9 0 0 0 0 0 0\n"})
    found = sampler.look()
    assert found["net_rx"] is None and found["net_tx"] > 0 and found["disk_read"] == 0
