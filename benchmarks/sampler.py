"""What the sampler costs beside 16 loader processes, against psutil taking the same readings.

    python benchmarks/sampler.py [--workers 16] [--seconds 20] [--threads 32]

Real child processes that bear the name of torch's loader workers, a process with as many threads as a training has, one
sample a second. CPU seconds of the sampling thread alone, user and system.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from kfp_gate.observing.processes import LOADER_NAME
from kfp_gate.observing.sampler import GLANCES, Sampler
from kfp_gate.observing.timeline import Timeline

BAR = 0.01
"""Of one core."""

LOADER = (
    f"import time; open('/proc/self/comm', 'w').write({LOADER_NAME!r}); print('on', flush=True)\n"
    "while True: sum(range(20000)); time.sleep(0.05)"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=32)
    options = parser.parse_args()
    rest = threading.Event()
    for _ in range(options.threads):
        threading.Thread(target=rest.wait, daemon=True).start()
    loaders = [subprocess.Popen([sys.executable, "-c", LOADER], stdout=subprocess.PIPE) for _ in range(options.workers)]
    try:
        for loader in loaders:
            assert loader.stdout is not None
            loader.stdout.readline()
        report(*measured(options.seconds), options.seconds)
    finally:
        for loader in loaders:
            loader.kill()
            loader.wait()


def measured(seconds: int) -> tuple[float, float, float, dict[str, object]]:
    """CPU seconds a sample of the sampler, of psutil once a second, and of psutil with as many looks at the state."""
    with tempfile.TemporaryDirectory() as folder:
        timeline = Timeline(Path(folder) / "timeline.jsonl")
        sampler = Sampler(timeline)
        sampler.start()
        time.sleep(seconds + 0.5)
        sampler.stop()
        last = json.loads(timeline.path.read_text().splitlines()[-1])
    ours = sampler.cost_s / sampler.count
    me = psutil.Process()
    peers = []
    for looks in (1, 1 + GLANCES):
        costs = []
        for _ in range(max(seconds // 4, 3)):
            time.sleep(0.25)
            costs.append(cpu_of(lambda looks=looks: by_psutil(me, looks)))
        peers.append(sum(costs) / len(costs))
    return ours, peers[0], peers[1], last


def cpu_of(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def by_psutil(me: psutil.Process, looks: int) -> list[object]:
    """The readings of a sample that psutil has: CPU by thread, states, bytes, faults, memory, network."""
    with me.oneshot():
        found: list[object] = [me.cpu_times(), me.threads(), me.io_counters(), me.memory_info(), me.num_ctx_switches()]
    children = me.children(recursive=True)
    for child in children:
        with child.oneshot():
            found += [child.name(), child.status(), child.cpu_times(), child.io_counters(), child.memory_info()]
    for _ in range(looks - 1):
        found += [psutil.Process(child.pid).status() for child in children]
    return [*found, psutil.net_io_counters(pernic=True), psutil.disk_io_counters()]


def report(ours: float, once: float, often: float, last: dict[str, object], seconds: int) -> None:
    loaders = last["loaders"]
    assert isinstance(loaders, dict)
    print(f"{loaders['count']} loaders, {loaders['looks']} looks at their states a sample, {seconds} s")
    print(f"{'':<44}{'CPU ms a sample':>18}{'of a core':>12}")
    for name, cost in (
        ("ours, with cgroup, pressure and state looks", ours), ("psutil, one look", once),
        (f"psutil, {1 + GLANCES} looks at the states", often),
    ):  # fmt: skip
        print(f"{name:<44}{cost * 1e3:>18.2f}{cost:>12.3%}")
    print(json.dumps({
        "name": "sampler", "ours": {"cpu_s": round(ours, 5)},
        "peers": {"psutil": round(once, 5), "psutil_states": round(often, 5)},
        "ratios": {"of_a_core": round(ours, 5), "psutil_over_ours": round(often / ours, 2)},
        "bars": {"of_a_core": BAR}, "met": ours < BAR,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
