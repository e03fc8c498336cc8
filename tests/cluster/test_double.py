"""Behaviour of the double beyond the recorded answers, seen through the real client: what the launcher leans on."""

import json
import threading
import time

import pytest
from double.cluster import PODS, TRAINJOB
from harness import Launcher
from kubernetes import client, watch
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from kfp_gate.launching.api import Api, Away, Refused
from kfp_gate.launching.pod_watch import PodWatch
from kfp_gate.launching.pods import Pod

JOB = {
    "apiVersion": "trainer.kubeflow.org/v1alpha1",
    "kind": "TrainJob",
    "metadata": {"name": "j"},
    "spec": {"runtimeRef": {"name": "r"}},
}
PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/ns1/trainjobs"


def make_pod(cluster, name: str, **labels: str) -> dict:
    return cluster.store.put(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns1", "labels": labels},
            "spec": {"containers": [{"name": "node"}]},
            "status": {"phase": "Pending"},
        },
    )


def test_a_client_that_does_not_know_the_authority_is_refused(cluster):
    api = cluster.api_client()
    api.configuration.ssl_ca_cert = None
    stranger = client.ApiClient(api.configuration)
    with pytest.raises((HTTPError, ApiException)):
        client.CoreV1Api(stranger).list_namespaced_pod("ns1", _request_timeout=5)


@pytest.mark.parametrize("word", ["true", "True", "1"])
def test_a_watch_is_one_however_it_is_spelt(cluster, word):
    make_pod(cluster, "p")
    response = Api(cluster.api_client()).open(
        "GET", "/api/v1/namespaces/ns1/pods", query={"watch": word, "timeoutSeconds": 1}
    )
    assert json.loads(response.data.splitlines()[0])["type"] == "ADDED"


def test_the_clients_own_watch_sees_changes_selectors_and_bookmarks(cluster):
    cluster.bookmark_seconds = 0.1
    listing = client.CoreV1Api(cluster.api_client()).list_namespaced_pod("ns1")

    def change() -> None:
        time.sleep(0.3)
        make_pod(cluster, "other", job="x")
        pod = make_pod(cluster, "mine", job="y")
        pod["metadata"]["labels"]["job"] = "x"
        cluster.store.put(PODS, pod)

    threading.Thread(target=change).start()
    seen = [
        (event["type"], event["raw_object"]["metadata"].get("name"))
        for event in watch.Watch().stream(
            client.CoreV1Api(cluster.api_client()).list_namespaced_pod,
            "ns1",
            label_selector="job=y",
            resource_version=listing.metadata.resource_version,
            allow_watch_bookmarks=True,
            timeout_seconds=1,
        )
    ]
    # An object that leaves the selection is DELETED for those who selected it.
    assert [kind for kind in seen if kind[0] != "BOOKMARK"] == [("ADDED", "mine"), ("DELETED", "mine")]
    assert ("BOOKMARK", None) in seen


def test_initial_events_end_with_a_marked_bookmark(cluster):
    make_pod(cluster, "p")
    query = {"watch": "true", "sendInitialEvents": "true", "allowWatchBookmarks": "true", "timeoutSeconds": 1}
    response = Api(cluster.api_client()).open("GET", "/api/v1/namespaces/ns1/pods", query=query)
    events = [json.loads(line) for line in response.data.splitlines()]
    assert events[0]["type"] == "ADDED"
    assert events[1]["object"]["metadata"]["annotations"] == {"k8s.io/initial-events-end": "true"}


def test_an_invalid_object_and_an_unknown_field(cluster):
    api = Api(cluster.api_client())
    wrong = JOB | {"spec": {"runtimeRef": {"name": "r"}, "trainer": {"numNodes": "two", "numProcPerNode": 0}}}
    with pytest.raises(Refused) as refused:
        api.once("POST", PATH, body=wrong)
    assert refused.value.status == 422
    assert "spec.trainer.numNodes in body must be of type integer" in refused.value.message
    unknown = JOB | {"spec": {"runtimeRef": {"name": "r"}, "podSpecOverrides": [], "runtimePatches": [{"managr": "x"}]}}
    with pytest.raises(Refused) as refused:
        api.once("POST", PATH, query={"fieldValidation": "Strict"}, body=unknown)
    for field in ("spec.runtimePatches[0].managr", "spec.podSpecOverrides"):
        assert f'unknown field "{field}"' in refused.value.message
    with pytest.raises(Refused, match="RFC 1035"):
        api.once("POST", PATH, body=JOB | {"metadata": {"name": "1-begins-with-a-digit"}})


def test_identity_and_versions(cluster):
    api = Api(cluster.api_client())
    made = api.once("POST", PATH, body=JOB)
    assert made["metadata"]["uid"] and made["metadata"]["generation"] == 1
    changed = api.once(
        "PATCH", f"{PATH}/j", body={"spec": {"suspend": True}}, content_type="application/merge-patch+json"
    )
    assert changed["metadata"]["uid"] == made["metadata"]["uid"]
    assert changed["metadata"]["generation"] == 2
    assert int(changed["metadata"]["resourceVersion"]) > int(made["metadata"]["resourceVersion"])
    with pytest.raises(Refused) as refused:
        api.once("PUT", f"{PATH}/j", body=made)
    assert (refused.value.status, refused.value.reason) == (409, "Conflict")
    with pytest.raises(Refused) as refused:
        api.once("PATCH", f"{PATH}/j", body={"spec": {}}, content_type="application/json")
    assert refused.value.status == 415


def test_away_is_told_from_no(cluster):
    api = Api(cluster.api_client(), outage_seconds=1)
    cluster.fail_next(1, 429, retry_after="3")
    with pytest.raises(Away) as away:
        api.once("GET", PATH)
    assert away.value.retry_after == 3
    cluster.fail_next(1, 0)
    with pytest.raises(Away):
        api.once("GET", PATH)
    cluster.down()
    with pytest.raises(Away):
        api.once("GET", PATH)
    cluster.up()
    assert api.once("GET", PATH)["items"] == []


def watched(cluster) -> PodWatch:
    pods = PodWatch(
        Api(cluster.api_client()), "ns1", "job=x",
        lambda body: Pod(body["metadata"]["name"], body["metadata"]["uid"], 0, body, "node"),
    )  # fmt: skip
    pods.start()
    return pods


def eventually(what) -> None:
    end = time.monotonic() + 15
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("fault", ["expired", "cut clean", "cut abrupt", "restart", "garbage collected while away"])
def test_the_watch_of_pods_goes_on_after(cluster, fault):
    make_pod(cluster, "first", job="x")
    pods = watched(cluster)
    eventually(lambda: [pod.name for pod, _ in pods.pods()] == ["first"])
    if fault == "expired":
        cluster.store.expire_history()
    elif fault.startswith("cut"):
        eventually(lambda: cluster.cut_streams(fault.split()[1]))
    elif fault == "restart":
        cluster.outage(0.5)
        cluster.store.expire_history()
    else:
        cluster.down()
        cluster.store.remove(PODS, "ns1", "first")
        cluster.store.expire_history()
        cluster.up()
    make_pod(cluster, "second", job="x")
    eventually(lambda: "second" in [pod.name for pod, _ in pods.pods()])
    gone = {pod.name: gone for pod, gone in pods.pods()}
    assert gone == {"first": fault == "garbage collected while away", "second": False}
    pods.stop.set()


def test_a_pod_of_the_same_name_is_another_pod(cluster):
    first = make_pod(cluster, "p", job="x")
    pods = watched(cluster)
    eventually(lambda: len(pods.pods()) == 1)
    cluster.store.remove(PODS, "ns1", "p")
    make_pod(cluster, "p", job="x")
    eventually(lambda: len(pods.pods()) == 2)
    assert pods.read("p", first["metadata"]["uid"]) is None
    pods.stop.set()


def test_foreground_deletion_waits_for_the_pods(cluster, tmp_path):
    Launcher(cluster, tmp_path)
    handles: list = []
    api = Api(cluster.api_client())
    body = JOB | {"spec": {"runtimeRef": {"name": "r"}, "trainer": {"numNodes": 1, "env": [], "command": ["x"]}}}
    cluster.scripts = [lambda job: handles.extend(job.start())]
    api.once("POST", PATH, body=body)
    eventually(lambda: handles)
    deleted = api.once("DELETE", f"{PATH}/j", query={"propagationPolicy": "Foreground"})
    assert deleted["metadata"]["finalizers"] == ["foregroundDeletion"]
    assert cluster.store.get(TRAINJOB, "ns1", "j") is not None
    eventually(lambda: cluster.store.get(TRAINJOB, "ns1", "j") is None)
    assert cluster.store.all(PODS, "ns1") == []
