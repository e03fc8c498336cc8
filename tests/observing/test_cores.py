"""CPU quotas of both versions of control groups."""

from pathlib import Path

from kfp_gate.observing.cores import cpu_quota, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_tightest_quota_on_the_way_up_holds(tmp_path: Path) -> None:
    root = write(tmp_path, {
        "proc/self/cgroup": "0::/pod/container\n", "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/cpu.max": "250000 100000\n", "sys/fs/cgroup/cpu.max": "800000 100000\n",
    })  # fmt: skip
    assert cpu_quota(root) == 2.5


def test_version_1_and_the_path_of_the_host(tmp_path: Path) -> None:
    root = write(tmp_path, {
        "proc/self/cgroup": "4:cpu,cpuacct:/kubepods/pod1/c\n3:memory:/kubepods\n0::/init.scope\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "50000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    })  # fmt: skip
    assert cpu_quota(root) == 0.5


def test_none_and_unknown_are_none(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
    root = write(tmp_path, {
        "proc/self/cgroup": "4:cpu:/\n0::/\n", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n", "sys/fs/cgroup/cpu.max": "garbage",
    })  # fmt: skip
    assert cpu_quota(root) is None
    assert usable_cores() >= 1
