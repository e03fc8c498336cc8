"""A launcher killed with SIGKILL at scripted moments and started again: one job, and the right end.

The launcher is a process of its own. A moment is a request that the server gets or answers, so that each kill
falls where it is meant to, run after run.
"""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from double import Cluster
from double.cluster import TRAINJOB
from harness import Launcher, deliver

from kfp_gate.launching.worker_pod import NOTE_OUTCOME

PROGRAM = textwrap.dedent(
    """
    import sys
    from pathlib import Path
    sys.path.insert(0, sys.argv[1])
    from harness import QUICK, SPEC
    from kfp_gate.launching.cluster import run_on_cluster
    from kfp_gate.launching.options import LaunchOptions
    folder = Path(sys.argv[2])
    options = LaunchOptions(
        backend="trainjob", nodes=2, worker_image="registry.example/worker:1", namespace="ns1", run_id="run-1",
        claims={"data": "/data"}, checkpoint_uri=str(folder / "checkpoints"), pending_seconds=5,
    )
    outcome = run_on_cluster(SPEC, options, folder / "model", patience=QUICK)
    print("ENDED", outcome.state, outcome.cause, outcome.first_failed_rank, flush=True)
    """
)


def is_create(request) -> bool:
    return request.method == "POST" and request.path.endswith("/trainjobs")


def is_note(request) -> bool:
    return request.method == "PATCH" and "/trainjobs/" in request.path


# name, matches which request, at its arrival or after its answer, the how-manieth
MOMENTS = {
    "before the schema is read": (lambda r: "customresourcedefinitions" in r.path, "before", 1),
    "before the create arrives": (is_create, "before", 1),
    "the job is stored, the answer not sent": (is_create, "stored", 1),
    "after the create was answered": (is_create, "after", 1),
    "at the first list of pods": (lambda r: r.path.endswith("/pods") and not r.watch, "before", 1),
    "when the first log is opened": (lambda r: r.log, "before", 1),
    "when a log is read again": (lambda r: r.log, "before", 3),
    "before the first outcome is written": (is_note, "before", 1),
    "the first outcome is written": (is_note, "after", 1),
    "the successor is stored, the answer not sent": (is_create, "stored", 2),
    "before the last outcome is written": (is_note, "before", 2),
}


class Killer:
    """Kills the launcher at its moment, once."""

    def __init__(self, cluster: Cluster, moment) -> None:
        self.matches, self.when, self.left = moment
        self.process: subprocess.Popen | None = None
        self.done = threading.Event()
        cluster.faults.append(lambda request: self.at("before", request))
        cluster.on_answer = lambda request, _status: self.at("after", request)
        original = cluster.on_created

        def on_created(resource, body):
            original(resource, body)
            if resource is TRAINJOB and self.when == "stored":
                self.count()

        cluster.on_created = on_created

    def at(self, when: str, request) -> None:
        if when == self.when and self.matches(request):
            self.count()

    def count(self) -> None:
        if self.done.is_set():
            return
        self.left -= 1
        if self.left == 0 and self.process is not None:
            self.done.set()
            os.kill(self.process.pid, signal.SIGKILL)
            time.sleep(0.05)  # it is gone before the server goes on


def start(cluster: Cluster, folder: Path) -> subprocess.Popen:
    environment = os.environ | {"KUBECONFIG": str(cluster.kubeconfig(folder)), "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def scripts(folder: Path):
    def taken(job) -> None:
        pods = job.start()
        pods[0].write("epoch 1")
        time.sleep(0.4)
        pods[1].disrupt("PreemptionByScheduler", message="for a higher priority")
        job.fail_as_jobset(pods)

    def well(job) -> None:
        pods = job.start()
        pods[0].write("epoch 2")
        time.sleep(0.4)
        deliver(job, folder)
        for pod in pods:
            pod.exit(0)
        job.complete()

    return [taken, well]


@pytest.mark.all_only
@pytest.mark.parametrize("name", MOMENTS)
def test_killed_and_started_again(tmp_path: Path, name: str):
    with Cluster(tmp_path).running() as cluster:
        Launcher(cluster, tmp_path)  # the runtime
        cluster.scripts = scripts(tmp_path)
        killer = Killer(cluster, MOMENTS[name])
        killer.process = start(cluster, tmp_path)
        first, _ = killer.process.communicate(timeout=60)
        assert killer.done.is_set(), f"the moment never came: {first}"
        assert killer.process.returncode == -signal.SIGKILL
        assert "ENDED" not in first
        second = start(cluster, tmp_path)
        output, _ = second.communicate(timeout=60)
        assert "ENDED succeeded none None" in output, output
        jobs = cluster.store.all(TRAINJOB, "ns1")
        base = jobs[0]["metadata"]["name"]
        assert [job["metadata"]["name"] for job in jobs] == [base, f"{base}-a2"]
        assert '"cause": "preempted"' in jobs[0]["metadata"]["annotations"][NOTE_OUTCOME]
        assert (tmp_path / "model" / "model.pt").read_text() == f"weights of {base}-a2"
