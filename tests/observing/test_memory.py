"""Memory of a process and its container: cgroup v1, v2, v2 beside v1, and nothing at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from kfp_gate.observing.memory import Memory, find_control_group, memory_line, read_memory

GIB = 1 << 30


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


STATUS = "Name:\tpython (x)\nVmHWM:\t 2048 kB\nVmRSS:\t 1024 kB\n"
V2 = {
    "proc/self/cgroup": "0::/kubepods/pod1/c1\n", "proc/self/status": STATUS,
    "sys/fs/cgroup/kubepods/pod1/c1/memory.current": f"{4 * GIB}\n",
    "sys/fs/cgroup/kubepods/pod1/c1/memory.max": "max\n",
    "sys/fs/cgroup/kubepods/pod1/memory.max": f"{16 * GIB}\n", "sys/fs/cgroup/kubepods/memory.max": f"{64 * GIB}\n",
    "sys/fs/cgroup/kubepods/pod1/c1/memory.peak": f"{5 * GIB}\n",
    "sys/fs/cgroup/kubepods/pod1/c1/memory.stat": "anon 100\nfile 200\nshmem 50\n",
    "sys/fs/cgroup/kubepods/pod1/c1/memory.events": "low 0\noom 2\noom_kill 1\n",
}  # fmt: skip
V1 = {
    "proc/self/cgroup": "9:cpuset:/x\n4:memory:/docker/abc\n0::/\n", "proc/self/status": STATUS,
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "7\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/memory.max_usage_in_bytes": "9\n", "sys/fs/cgroup/unified/cgroup.procs": "1\n",
    "sys/fs/cgroup/memory/memory.stat": "cache 1\nrss 2\nshmem 3\ntotal_cache 10\ntotal_rss 20\ntotal_shmem 30\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n",
}  # fmt: skip


def test_version_2_with_the_limit_on_the_pod(tmp_path: Path) -> None:
    group = find_control_group(tree(tmp_path, V2))
    assert group is not None and group.version == 2
    found = read_memory(root=tmp_path, group=group)
    assert found == Memory(
        rss=1 << 20, peak=2 << 20, cgroup=4 * GIB, limit=16 * GIB, cgroup_peak=5 * GIB, anon=100, file=200, shmem=50,
        oom_kills=1,
    )  # fmt: skip


def test_version_1_in_a_container_whose_path_is_the_hosts(tmp_path: Path) -> None:
    group = find_control_group(tree(tmp_path, V1))
    assert group is not None and group.version == 1
    found = read_memory(root=tmp_path, group=group)
    assert (found.cgroup, found.limit, found.cgroup_peak) == (7, 8 * GIB, 9)
    assert (found.anon, found.file, found.shmem, found.oom_kills) == (20, 10, 30, 4)


def test_no_limit_and_no_controller_are_unknown_not_zero(tmp_path: Path) -> None:
    tree(tmp_path, V1 | {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"})
    assert read_memory(root=tmp_path, group=find_control_group(tmp_path)).limit is None
    bare = tree(tmp_path / "bare", {"proc/self/status": STATUS})
    assert find_control_group(bare) is None
    assert read_memory(root=bare, group=None).cgroup is None


def test_this_very_process() -> None:
    found = read_memory(group=find_control_group(), children=True)
    assert found.rss is not None and found.peak is not None and 0 < found.rss <= found.peak
    assert found.children is not None and found.children >= 0


@pytest.mark.parametrize(
    ("memory", "line"),
    [
        (Memory(rss=GIB, peak=2 * GIB), "memory epoch 1/2: rss 1.00 GiB, peak 2.00 GiB"),
        (Memory(), "memory epoch 1/2: rss unknown, peak unknown"),
        (
            Memory(
                rss=GIB,
                peak=GIB,
                cgroup=GIB,
                limit=2 * GIB,
                cgroup_peak=GIB,
                anon=1 << 20,
                file=0,
                shmem=0,
                oom_kills=1,
            ),
            "memory epoch 1/2: rss 1.00 GiB, peak 1.00 GiB; container 1.00 GiB of 2.00 GiB, peak 1.00 GiB "
            "(anon 1 MiB, file 0 MiB, shm 0 MiB), 1 killed for memory",
        ),
        (
            Memory(rss=GIB, peak=GIB, cuda_reserved=GIB, cuda_peak=2 * GIB, cuda_total=4 * GIB),
            "memory epoch 1/2: rss 1.00 GiB, peak 1.00 GiB; CUDA reserved 1.00 GiB, peak 2.00 GiB of 4.00 GiB",
        ),
    ],
)
def test_the_line(memory: Memory, line: str) -> None:
    assert memory_line(1, 2, memory) == line


SHARED = """
import os, sys, time
block = bytearray(os.urandom(1 << 20) * 64)
pids = []
for _ in range(3):
    pid = os.fork()
    if not pid:
        time.sleep(60)
        os._exit(0)
    pids.append(pid)
time.sleep(0.2)
from kfp_gate.observing.memory import read_memory
found = read_memory(children=True, pss=True)
print(found.rss, found.pss, found.children, found.children_pss, found.children_count, flush=True)
print(found.process_anon, found.children_anon, found.family_anon, flush=True)
for pid in pids:
    os.kill(pid, 9)
"""


def test_pages_that_processes_share_count_once_in_the_proportional_sets() -> None:
    done = subprocess.run([sys.executable, "-c", SHARED], capture_output=True, text=True, check=True)
    rss, pss, children, children_pss, count, anon, children_anon, family = map(int, done.stdout.split())
    assert count == 3
    assert children > 3 * (64 << 20), "the resident sets hold the block three times"
    assert pss + children_pss < rss + children - 2 * (64 << 20)
    assert pss + children_pss > 64 << 20
    assert children_anon > 3 * (64 << 20) and 64 << 20 < anon <= family < anon + (32 << 20), "nothing was copied"


def test_proportional_sets_that_may_not_be_read_are_unknown(tmp_path: Path) -> None:
    files = {f"proc/{p}/status": STATUS for p in (7, 8, 9)}
    files |= {"proc/7/task/7/children": "8 9", "proc/7/smaps_rollup": "Rss: 9 kB\nPss: 4 kB\n"}
    files |= {"proc/8/smaps_rollup": "Rss: 9 kB\nPss:                3 kB\nPss_Anon: 1 kB\n"}
    root = tree(tmp_path, files)
    found = read_memory(root=root, pid=7, children=True, pss=True)
    assert (found.pss, found.children_pss, found.children_count) == (4 << 10, None, 2)
    assert found.children == 2 << 20
    (root / "proc/9/smaps_rollup").write_text("Pss: 2 kB\n")
    assert read_memory(root=root, pid=7, children=True, pss=True).children_pss == 5 << 10
    # One that ended in between holds nothing.
    (root / "proc/8/smaps_rollup").unlink()
    (root / "proc/8/status").unlink()
    assert read_memory(root=root, pid=7, children=True, pss=True).children_pss == 2 << 10
    quick = read_memory(root=root, pid=7, children=True)
    assert (quick.pss, quick.children_pss) == (None, None)
    assert found.family_anon is None and found.process_anon is None, "an old kernel does not tell"
    assert found.children_anon is None


def test_what_the_kernel_cannot_take_back() -> None:
    assert Memory(cgroup=10 * GIB, file=4 * GIB, shmem=GIB).held == 7 * GIB
    assert Memory(cgroup=10 * GIB).held is None and Memory(file=1).held is None
    assert Memory(cgroup=10, file=0).held == 10
