"""The fault table: each way in which a training can go wrong on a cluster, and the text that the user sees.

The texts are pinned in `snapshots/faults.txt`. To renew them on purpose:
`KFP_GATE_RENEW=1 pytest tests/cluster/test_faults.py -m "all_only or not all_only"`.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from double import Cluster, JobHandle
from harness import Launcher, end_line, neutral

from kfp_gate.errors import InvalidInput, KfpGateError, Problem, Unavailable

SNAPSHOTS = Path(__file__).parent / "snapshots" / "faults.txt"
GIB = 1024**3

Case = Callable[[JobHandle], None]
CASES: dict[str, tuple[Case, str, str, int | None]] = {}


def case(name: str, cause: str, rank: int | None, backend: str = "trainjob"):
    def add(script: Case) -> Case:
        CASES[name] = (script, backend, cause, rank)
        return script

    return add


@case("out of memory, the whole container killed", "out-of-memory", 1)
def oom(job):
    pods = job.start()
    for epoch in range(1, 7):
        pods[1].write(f'KFP_GATE_PROGRESS {{"epoch": {epoch}, "epochs": 12, "eta_s": 50}}')
        pods[1].write(
            f"2026-11-30 03:00:0{epoch},123 INFO memory epoch {epoch}/12: rss 2.00 GiB, peak 3.00 GiB, "
            f"loader processes 9.00 GiB; container {5 + epoch}.00 GiB of 12.00 GiB, peak {5 + epoch}.50 GiB "
            f"(anon {4 + epoch}.00 GiB, file 1.00 GiB, shm 1.00 GiB)"
        )
        pods[1].write(f"phases epoch {epoch}/12: data 1.0 s (25%), forward 3.0 s (75%); 4 steps, 1.00 s each")
    pods[1].write("epoch 7/12: validation")
    pods[1].exit(137, "OOMKilled")
    job.fail_as_jobset(pods)


@case("out of memory, a loader killed, the worker ended with 1", "out-of-memory", 0)
def oom_child(job):
    pods = job.start()
    pods[0].write("RuntimeError: DataLoader worker (pid(s) 77) exited unexpectedly")
    memory = {
        "limit": 16 * GIB,
        "peak": 16 * GIB,
        "use": 3 * GIB,
        "anon": 2 * GIB,
        "file": GIB // 2,
        "shmem": GIB // 4,
        "oom_kills": 1,
    }
    pods[0].write(end_line(exit_code=1, memory=memory))
    pods[0].exit(1, "OOMKilled")
    job.fail_as_jobset(pods)


@case("the kernel's counter alone knows of the kill", "out-of-memory", 0)
def oom_counter(job):
    pods = job.start()
    pods[0].write("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.")
    pods[0].write(end_line(exit_code=1, memory={"limit": 8 * GIB, "cgroup_peak": 8 * GIB, "oom_kills": 2}))
    pods[0].exit(1)
    job.fail_as_jobset(pods)


@case("a loader killed, no counter moved", "child-killed", 0)
def child(job):
    pods = job.start()
    pods[0].write("RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed. ")
    pods[0].write(end_line(exit_code=1, memory={"limit": 8 * GIB, "cgroup_peak": 2 * GIB, "oom_kills": 0}))
    pods[0].exit(1)
    job.fail_as_jobset(pods)


@case("137 without an out-of-memory kill: the liveness probe", "killed", 0)
def liveness(job):
    pods = job.start()
    pods[0].write("epoch 1/2")
    body = pods[0].body
    about = {"kind": "Pod", "name": pods[0].name, "uid": pods[0].uid}
    job.cluster.event(body["metadata"]["namespace"], about, "Unhealthy", "Liveness probe failed: HTTP 500")
    job.cluster.event(
        body["metadata"]["namespace"],
        about,
        "Killing",
        "Container node failed liveness probe, will be restarted",
        "Normal",
    )
    pods[0].exit(137)
    job.fail_as_jobset(pods)


@case("eviction, no restarts left", "evicted", 1)
def evicted(job):
    pods = job.start()
    pods[1].disrupt(
        "TerminationByKubelet", pod_reason="Evicted", message="The node was low on resource: ephemeral-storage."
    )
    job.fail_as_jobset(pods)


@case("preemption, no restarts left", "preempted", 0)
def preempted(job):
    pods = job.start()
    pods[0].disrupt("PreemptionByScheduler", message="preempting to accommodate a higher priority pod")
    job.fail_as_jobset(pods)


@case("node lost, no restarts left", "node-lost", 0)
def node_lost(job):
    pods = job.start()
    pods[0].disrupt("DeletionByTaintManager", message="deleting due to NoExecute taint", code=None)
    job.fail_as_jobset(pods)


@case("node shut down, no restarts left", "node-lost", 1)
def shutdown(job):
    pods = job.start()
    pods[1].disrupt(
        "TerminationByKubelet",
        pod_reason="Terminated",
        message="Pod was terminated in response to imminent node shutdown.",
    )
    job.fail_as_jobset(pods)


@case("the server's deadline", "deadline", None)
def deadline(job):
    pods = job.start()
    for pod in pods:
        pod.write("epoch 1/2")
    time.sleep(1.5)  # read, before it goes
    for pod in pods:
        pod.delete()
    job.fail("DeadlineExceeded", "TrainJob exceeded its deadline")


@case("image that cannot be pulled", "image-pull", 1)
def image(job):
    pods = job.make_pods()
    pods[0].start()
    pods[1].schedule()
    pods[1].waiting("ImagePullBackOff", 'Back-off pulling image "registry.example/worker:1": manifest unknown')


@case("image name that is none", "image-pull", 0)
def image_name(job):
    pods = job.make_pods()
    pods[0].schedule()
    pods[0].waiting("InvalidImageName", "couldn't parse image name")


@case("secret missing for the container", "container-start", 0)
def secret(job):
    pods = job.make_pods()
    pods[0].schedule()
    pods[0].waiting("CreateContainerConfigError", 'secret "tokens" not found')


@case("no node takes the pod", "unschedulable", 0)
def unschedulable(job):
    for pod in job.make_pods():
        pod.unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")


@case("quota used up", "quota", None)
def quota(job):
    about = {"kind": "Job", "name": f"{job.name}-node-0"}
    job.cluster.event(
        job.namespace,
        about,
        "FailedCreate",
        'pods "x" is forbidden: exceeded quota: team, requested: limits.memory=16Gi',
    )


@case("an exception of the program", "exception", 1)
def exception(job):
    pods = job.start()
    pods[0].write("[rank0]: ncclRemoteError: A call failed possibly due to a network error")
    pods[1].write("Traceback (most recent call last):")
    pods[1].write('  File "/app/train.py", line 12, in step')
    pods[1].write("    loss = model(batch)")
    pods[1].write("KeyError: 'cone'")
    pods[1].exit(1)
    pods[0].exit(1)
    job.fail_as_jobset(pods)


@case("an input the worker refuses", "invalid-input", 0)
def refused(job):
    pods = job.start()
    error = InvalidInput(
        "1 name",
        expected="one of map50, map50_95",
        where="monitors",
        next_step="correct the name",
        problems=[Problem("monitors[0]", "'map5'")],
    )
    pods[0].write("KFP_GATE_FAILURE " + json.dumps({"rank": 0, "kind": "user", "message": str(error), "exit_code": 2}))
    pods[0].write(end_line(exit_code=2))
    pods[0].exit(2)
    job.fail_as_jobset(pods)


@case("a collective timed out because of another rank", "killed", 1)
def collective(job):
    pods = job.start()
    pods[0].write(
        "[rank0]:[E1130 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum=7, OpType=ALLREDUCE) ran for 600000 milliseconds before timing out."
    )
    pods[1].exit(137)
    pods[0].exit(134)
    job.fail_as_jobset(pods)


@case("every rank only waited", "collective-timeout", 0)
def all_waited(job):
    pods = job.start()
    for pod in pods:
        pod.write("[E1130] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)")
        pod.exit(134)
    job.fail_as_jobset(pods)


@case("out of memory on the GPU", "gpu-out-of-memory", 0)
def cuda(job):
    pods = job.start()
    pods[0].write("Traceback (most recent call last):")
    pods[0].write('  File "/app/train.py", line 12, in step')
    pods[0].write("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.")
    pods[0].exit(1)
    job.fail_as_jobset(pods)


@case("the pods were deleted", "pods-deleted", None)
def deleted(job):
    pods = job.start()
    for pod in pods:
        pod.write("epoch 1/2")
    time.sleep(1.5)  # read, before it goes
    for pod in pods:
        pod.delete()
    job.fail("FailedJobs", "jobset failed due to one or more job failures")


@case("the job was deleted", "job-deleted", None)
def job_deleted(job):
    for pod in job.start():
        pod.write("epoch 1/2")
    time.sleep(1.5)
    job.delete()


@case("an exit code and no word", "exit-code", 1)
def silent(job):
    pods = job.start()
    pods[1].exit(7)
    job.fail_as_jobset(pods)


@case("the job failed and no rank did", "unknown", None)
def unknown(job):
    job.fail("Whatever", "")


@case("the launcher was gone", "launcher-lost", 0)
def launcher_lost(job):
    pods = job.start()
    pods[0].write(end_line(exit_code=143, signal=15, reason="the launcher's heartbeat has not changed for 1800 s"))
    pods[0].exit(143)
    job.fail_as_jobset(pods)


@case("no model was delivered", "no-model", 0)
def no_model(job):
    for pod in job.start():
        pod.exit(0)
    job.complete()


@case("PyTorchJob: green, but a worker failed", "exception", 1, "pytorchjob")
def green_but_failed(job):
    pods = job.start()
    pods[1].write("Traceback (most recent call last):")
    pods[1].write("OSError: disk")
    pods[1].exit(1)
    pods[0].exit(0)
    job.complete()


@case("PyTorchJob: a worker failed, the master waits for ever", "exit-code", 1, "pytorchjob")
def master_waits(job):
    pods = job.start()
    pods[1].exit(9)
    job.fail("PyTorchJobFailed", "PyTorchJob x is failing because 1 Worker replica(s) failed.")


@case("PyTorchJob: container out of memory", "out-of-memory", 0, "pytorchjob")
def pytorch_oom(job):
    pods = job.start()
    pods[0].exit(137, "OOMKilled")
    job.fail("PyTorchJobFailed", "")


@pytest.fixture(scope="module")
def texts():
    """The user's texts by case, compared or renewed when the module is done."""
    seen: dict[str, str] = {}
    yield seen
    if os.environ.get("KFP_GATE_RENEW") and len(seen) == len(CASES):
        SNAPSHOTS.parent.mkdir(exist_ok=True)
        SNAPSHOTS.write_text("".join(f"=== {name}\n{seen[name]}\n" for name in CASES))


def snapshot(name: str) -> str:
    parts = SNAPSHOTS.read_text().split("=== ")[1:]
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1].rstrip("\n") for part in parts}[name]


@pytest.mark.all_only
@pytest.mark.parametrize("name", CASES)
def test_fault(cluster: Cluster, tmp_path: Path, texts: dict[str, str], name: str):
    script, backend, cause, rank = CASES[name]
    outcome = Launcher(cluster, tmp_path, backend, max_restarts=0).run(script)
    assert outcome.state == "failed"
    assert (outcome.cause, outcome.first_failed_rank) == (cause, rank), outcome.text()
    with pytest.raises(KfpGateError) as raised:
        outcome.raise_if_failed()
    texts[name] = f"{type(raised.value).__name__}\n{neutral(str(raised.value), tmp_path)}"
    if not os.environ.get("KFP_GATE_RENEW"):
        assert texts[name] == snapshot(name)


def test_the_first_of_two_failures_is_the_cause_and_the_text_says_why(cluster, tmp_path):
    outcome = Launcher(cluster, tmp_path, max_restarts=0).run(exception)
    assert outcome.first_failed_rank == 1
    assert "KeyError: 'cone'" in outcome.text()


@pytest.mark.all_only
def test_waits_are_explained_while_they_last(cluster, tmp_path):
    def slow(job: JobHandle) -> None:
        job.suspend("waiting for quota in queue gpu")
        time.sleep(0.7)
        job.resume()
        pods = job.make_pods()
        pods[0].unschedulable("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
        time.sleep(0.5)
        pods[0].schedule()
        pods[0].waiting("ErrImagePull", "connection reset")
        time.sleep(0.3)
        for pod in pods:
            pod.start()
            pod.exit(5)
        job.fail()

    launcher = Launcher(cluster, tmp_path)
    launcher.run(slow)
    text = neutral("\n".join(launcher.said), tmp_path)
    assert "TrainJob ns1/JOB waits in its queue: waiting for quota in queue gpu" in text
    assert (
        "rank 0 waits (unschedulable): Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu." in text
    )
    assert "rank 0 waits (image-pull): ErrImagePull: connection reset" in text


def test_events_that_may_not_be_read_are_said(cluster, tmp_path):
    cluster.denied.append(("list", "", "events"))
    outcome = Launcher(cluster, tmp_path, max_restarts=0).run(silent)
    assert outcome.cause == "exit-code"
    assert "events could not be read (docs/cluster.md, permissions)" in outcome.evidence


@pytest.mark.parametrize(
    ("verb", "resource"), [("create", "trainjobs"), ("list", "pods"), ("list", "trainjobs"), ("get", "trainjobs")]
)
def test_a_missing_permission_is_named(cluster, tmp_path, verb, resource):
    cluster.denied.append((verb, "*", resource))
    with pytest.raises(InvalidInput) as error:
        Launcher(cluster, tmp_path).run(silent)
    assert f'cannot {verb} resource "{resource}"' in str(error.value)
    assert "deploy/" in error.value.next_step


@pytest.mark.all_only
def test_an_api_server_that_stays_away_leaves_the_job_running(cluster, tmp_path, monkeypatch):
    from double.cluster import TRAINJOB

    def goes(job: JobHandle) -> None:
        job.start()
        cluster.down()

    launcher = Launcher(cluster, tmp_path)
    monkeypatch.setattr(
        "harness.Api",
        lambda client, outage_seconds: __import__("kfp_gate.launching.api", fromlist=["Api"]).Api(client, 2),
    )
    with pytest.raises(Unavailable, match="the Kubernetes API does not answer"):
        launcher.run(goes)
    assert len(cluster.store.all(TRAINJOB, "ns1")) == 1
    cluster.up()


@pytest.mark.all_only
def test_the_launchers_own_deadline_keeps_the_evidence(cluster, tmp_path):
    def endless(job: JobHandle) -> None:
        for pod in job.start():
            pod.write("epoch 1/2 of a long training")

    outcome = Launcher(cluster, tmp_path, deadline_seconds=4).run(endless)
    assert outcome.cause == "deadline"
    assert any("epoch 1/2" in line for end in outcome.ranks for line in end.last_lines)
    from double.cluster import TRAINJOB

    assert cluster.store.all(TRAINJOB, "ns1") == []


def test_sigterm_is_not_swallowed():
    """The launcher installs its handler only while it follows."""
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
