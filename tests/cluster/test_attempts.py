"""Created once, attached to, followed by a successor only when the machine was taken away."""

import time

import pytest
from double.cluster import PODS, PYTORCHJOB, TRAINJOB, WORKFLOWS
from harness import QUICK, Launcher, deliver

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.worker_pod import NOTE_DIGEST, NOTE_OUTCOME


def jobs(cluster, resource=TRAINJOB):
    return cluster.store.all(resource, "ns1")


def well(folder):
    def script(job):
        pods = job.start()
        for rank, pod in enumerate(pods):
            pod.write(f"hello from {rank}")
            pod.write('KFP_GATE_PROGRESS {"epoch": 1, "epochs": 2, "eta_s": 9}')
        deliver(job, folder)
        for pod in pods:
            pod.exit(0)
        job.complete()

    return script


@pytest.mark.parametrize("backend", ["trainjob", "pytorchjob"])
def test_a_training_that_goes_well(cluster, tmp_path, backend):
    launcher = Launcher(cluster, tmp_path, backend)
    outcome = launcher.run(well(tmp_path))
    outcome.raise_if_failed()
    assert outcome.state == "succeeded"
    assert (launcher.out / "model.pt").read_text().startswith("weights of kg-training-")
    assert launcher.lines(0)[0] == "hello from 0"
    assert launcher.lines(1)[0] == "hello from 1"
    assert "progress: epoch 1 of 2, about 9 s left" in launcher.said
    # A retried launcher finds the job that succeeded, makes no other, and fetches the same model.
    (launcher.out / "model.pt").unlink()
    again = launcher.run()
    assert again.state == "succeeded"
    assert (launcher.out / "model.pt").is_file()
    assert len(jobs(cluster, TRAINJOB if backend == "trainjob" else PYTORCHJOB)) == 1


@pytest.mark.all_only
@pytest.mark.parametrize("crd", ["trainjobs-v2.0.1.yaml", "trainjobs-v2.1.0.yaml", "trainjobs.yaml"])
@pytest.mark.parametrize("may_read_crds", [True, False])
def test_every_release_gets_the_field_it_knows(tmp_path, crd, may_read_crds):
    from double import Cluster

    with Cluster(tmp_path, trainjob_crd=crd).running() as cluster:
        if not may_read_crds:
            cluster.denied.append(("*", "apiextensions.k8s.io", "*"))
        launcher = Launcher(
            cluster,
            tmp_path,
            queue="gpu",
            node_selector={"pool": "a"},
            tolerations=({"key": "gpu", "operator": "Exists"},),
            service_account="trainer",
            deadline_seconds=3600,
            gpus_per_node=1,
        )
        assert launcher.run(well(tmp_path)).state == "succeeded"
        (job,) = jobs(cluster)
        field = {"trainjobs-v2.0.1.yaml": "podSpecOverrides", "trainjobs-v2.1.0.yaml": "podTemplateOverrides"}.get(
            crd, "runtimePatches"
        )
        assert field in job["spec"]
        assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu"
        assert "nvidia.com/gpu" in job["spec"]["trainer"]["resourcesPerNode"]["limits"]
        text = str(job["spec"][field])
        assert "'claimName': 'data'" in text and "'medium': 'Memory'" in text and "'pool': 'a'" in text


def test_no_trainer_says_so(tmp_path):
    from double import Cluster

    with Cluster(tmp_path, trainjob_crd="").running() as cluster:
        launcher = Launcher(cluster, tmp_path, "pytorchjob")
        with pytest.raises(InvalidInput, match="no usable Kubeflow Trainer"):
            launcher.run(backend="trainjob")


def test_another_specification_under_the_same_name_is_refused(cluster, tmp_path):
    launcher = Launcher(cluster, tmp_path)
    launcher.run(well(tmp_path))
    with pytest.raises(InvalidInput, match="exists with another specification"):
        launcher.run(memory="32Gi")
    assert len(jobs(cluster)) == 1


def test_what_the_launcher_alone_uses_does_not_change_the_digest(cluster, tmp_path):
    launcher = Launcher(cluster, tmp_path)
    launcher.run(well(tmp_path))
    assert launcher.run(max_restarts=7, keep_failed=False, pending_seconds=9, records=tmp_path).state == "succeeded"
    (job,) = jobs(cluster)
    assert len(job["metadata"]["annotations"][NOTE_DIGEST]) == 64


def test_a_lost_answer_to_the_create_makes_no_second_job(cluster, tmp_path):
    launcher = Launcher(cluster, tmp_path)
    creates = []

    def lose_the_answer(request, status):
        if request.method == "POST" and request.path.endswith("trainjobs") and not creates:
            creates.append(status)
            cluster.down()
            cluster.up()

    cluster.on_answer = lose_the_answer
    # The answer is sent before `on_answer`; break the connection before instead, after the object is stored.
    original = cluster.on_created

    def break_after_storing(resource, body):
        original(resource, body)
        if resource is TRAINJOB and len(creates) == 1:
            creates.append("broken")
            from double.server import CloseAbruptly

            raise CloseAbruptly

    cluster.on_created = break_after_storing
    creates.append("armed")
    assert launcher.run(well(tmp_path)).state == "succeeded"
    assert "broken" in creates
    assert len(jobs(cluster)) == 1


@pytest.mark.all_only
@pytest.mark.parametrize("backend", ["trainjob", "pytorchjob"])
@pytest.mark.parametrize(
    ("condition", "pod_reason", "cause"),
    [
        ("PreemptionByScheduler", "", "preempted"),
        ("TerminationByKubelet", "Evicted", "evicted"),
        ("DeletionByTaintManager", "", "node-lost"),
    ],
)
def test_taken_away_means_a_successor_that_resumes(cluster, tmp_path, backend, condition, pod_reason, cause):
    launcher = Launcher(cluster, tmp_path, backend)

    def taken(job):
        pods = job.start()
        pods[0].write("epoch 1")
        pods[1].disrupt(condition, pod_reason=pod_reason, message="the node was low on resource: memory")
        if backend == "trainjob":
            job.fail_as_jobset(pods)
        else:
            job.fail("PyTorchJobFailed", "one worker failed")

    cluster.scripts = [taken, well(tmp_path)]
    outcome = launcher.run()
    assert outcome.state == "succeeded", outcome.text()
    resource = TRAINJOB if backend == "trainjob" else PYTORCHJOB
    first, second = jobs(cluster, resource)
    assert second["metadata"]["name"] == first["metadata"]["name"] + "-a2"
    assert f'"cause": "{cause}"' in first["metadata"]["annotations"][NOTE_OUTCOME]
    assert first["metadata"]["annotations"][NOTE_DIGEST] == second["metadata"]["annotations"][NOTE_DIGEST]
    assert any("starting again from the last complete checkpoint" in line for line in launcher.said)
    assert (launcher.out / "model.pt").read_text().endswith("-a2")
    # A retry of the launcher attaches to the successor, not to the first.
    assert launcher.run().state == "succeeded"
    assert len(jobs(cluster, resource)) == 2


@pytest.mark.all_only
def test_restarts_are_bounded(cluster, tmp_path):
    def taken(job):
        pods = job.start()
        pods[0].disrupt("PreemptionByScheduler")
        job.fail_as_jobset(pods)

    launcher = Launcher(cluster, tmp_path, max_restarts=2)
    outcome = launcher.run(taken)
    assert (outcome.state, outcome.cause) == ("failed", "preempted")
    assert len(jobs(cluster)) == 3
    # Reported again, not tried again.
    assert launcher.run().cause == "preempted"
    assert len(jobs(cluster)) == 3


def test_a_failure_of_the_program_is_reported_again_and_not_retried(cluster, tmp_path):
    def broken(job):
        pods = job.start()
        pods[0].write("Traceback (most recent call last):\n".rstrip())
        pods[0].write('  File "train.py", line 7, in <module>')
        pods[0].write("ValueError: no such class: 'cone'")
        pods[0].exit(1)
        job.fail_as_jobset(pods)

    launcher = Launcher(cluster, tmp_path)
    first = launcher.run(broken)
    cluster.store.remove(PODS, "ns1", cluster.store.all(PODS, "ns1")[0]["metadata"]["name"])
    second = launcher.run()
    assert (first.cause, first.first_failed_rank) == ("exception", 0)
    assert second.summary == first.summary == "rank 0 failed first, with ValueError: no such class: 'cone'"
    assert second.evidence == first.evidence
    assert len(jobs(cluster)) == 1


@pytest.mark.all_only
def test_failed_jobs_go_if_asked(cluster, tmp_path):
    def broken(job):
        pods = job.start()
        pods[0].exit(3)
        job.fail_as_jobset(pods)

    launcher = Launcher(cluster, tmp_path, keep_failed=False)
    assert launcher.run(broken).cause == "exit-code"
    assert jobs(cluster) == []


@pytest.mark.all_only
def test_the_owner_is_the_workflow_and_never_the_pod(cluster, tmp_path, monkeypatch):
    workflow = cluster.store.put(
        WORKFLOWS,
        {
            "apiVersion": "argoproj.io/v1alpha1",
            "kind": "Workflow",
            "metadata": {"name": "wf", "namespace": "default"},
            "spec": {},
        },
    )
    reference = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "name": "wf",
        "uid": workflow["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    cluster.store.put(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": "step",
                "namespace": "default",
                "labels": {"pipeline/runid": "run-77"},
                "ownerReferences": [reference],
            },
            "spec": {"containers": [{"name": "main"}]},
            "status": {"phase": "Running"},
        },
    )
    monkeypatch.setenv("KFP_POD_NAME", "step")
    monkeypatch.delenv("KFP_GATE_RUN_ID", raising=False)
    launcher = Launcher(cluster, tmp_path, namespace="", run_id="")
    from double.cluster import RUNTIME

    body = cluster.store.all(RUNTIME, "ns1")[0]
    body["metadata"] = {"name": "kfp-gate-training", "namespace": "default"}
    cluster.store.put(RUNTIME, body)
    assert launcher.run(well(tmp_path)).state == "succeeded"
    (job,) = cluster.store.all(TRAINJOB, "default")
    (owner,) = job["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["uid"], owner["blockOwnerDeletion"]) == (
        "Workflow",
        workflow["metadata"]["uid"],
        False,
    )
    assert {"name": "KFP_GATE_RUN_ID", "value": "run-77"} in job["spec"]["trainer"]["env"]
    # The job goes with the run.
    cluster.store.remove(WORKFLOWS, "default", "wf")
    time.sleep(0.5)
    assert cluster.store.all(TRAINJOB, "default") == []


def test_without_a_run_id_nothing_is_created(cluster, tmp_path, monkeypatch):
    monkeypatch.delenv("KFP_GATE_RUN_ID", raising=False)
    monkeypatch.delenv("KFP_POD_NAME", raising=False)
    with pytest.raises(InvalidInput, match="no run id"):
        Launcher(cluster, tmp_path, run_id="").run(well(tmp_path))
    assert jobs(cluster) == []


@pytest.mark.all_only
def test_a_job_that_is_being_deleted_is_waited_for(cluster, tmp_path):
    launcher = Launcher(cluster, tmp_path)
    launcher.run(well(tmp_path))
    (job,) = jobs(cluster)
    body = job | {
        "metadata": job["metadata"]
        | {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["foregroundDeletion"]}
    }
    cluster.store.put(TRAINJOB, body)
    assert launcher.run(well(tmp_path), patience=QUICK).state == "succeeded"
    (again,) = jobs(cluster)
    assert again["metadata"]["uid"] != job["metadata"]["uid"]


@pytest.mark.all_only
def test_a_queue_that_takes_the_pods_back_and_gives_new_ones(cluster, tmp_path):
    """Kueue preempts by suspending the job: no successor, the same job goes on with new pods."""

    def requeued(job):
        first = job.start()
        first[0].write("epoch 1 of the first turn")
        time.sleep(1.2)
        job.suspend("Preempted to accommodate a higher priority workload")
        for pod in first:
            pod.delete()
        time.sleep(2.5)  # longer than pods alone would be waited for
        job.resume()
        job.body["metadata"]["uid"] = "second" + job.body["metadata"]["uid"][6:]  # other names for the new pods
        second = job.start()
        second[0].write("epoch 1 of the second turn")
        deliver(job, tmp_path)
        for pod in second:
            pod.exit(0)
        job.complete()

    launcher = Launcher(cluster, tmp_path)
    outcome = launcher.run(requeued)
    assert outcome.state == "succeeded", outcome.text()
    assert launcher.lines(0) == ["epoch 1 of the first turn", "epoch 1 of the second turn"]
    assert any("waits in its queue: Preempted to accommodate" in line for line in launcher.said)
    assert len(jobs(cluster)) == 1


def test_an_end_that_is_known_before_the_watch_tells_of_it(cluster, tmp_path):
    """The job is read as failed while the watch of its pods hangs: the pods are listed once more."""
    cluster.faults.append(lambda request: time.sleep(4) if request.watch else None)

    def broken(job):
        time.sleep(0.7)  # after the first list of pods
        pods = job.start()
        pods[1].write("the last words")
        pods[1].exit(9)
        pods[0].exit(0)
        job.fail()

    launcher = Launcher(cluster, tmp_path)
    outcome = launcher.run(broken)
    assert (outcome.cause, outcome.first_failed_rank) == ("exit-code", 1), outcome.text()
    assert launcher.lines(1) == ["the last words"]


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_passing_refusal_to_read_the_job_ends_nothing(cluster, tmp_path, status):
    """A token that is being renewed; a server that starts and does not know this kind yet."""

    def goes(job):
        pods = job.start()
        time.sleep(0.5)
        cluster.fail_next(2, status, match=lambda request: request.method == "GET" and request.path.endswith(job.name))
        time.sleep(1.5)  # longer than a job that was deleted would leave its pods
        for pod in pods:
            pod.write("the last words")
            pod.exit(0)
        deliver(job, tmp_path)
        job.complete()

    launcher = Launcher(cluster, tmp_path)
    outcome = launcher.run(goes)
    assert outcome.state == "succeeded", outcome.text()
    assert launcher.lines(1) == ["the last words"]
    assert len(jobs(cluster)) == 1
