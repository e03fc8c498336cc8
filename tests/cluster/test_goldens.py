"""Each recorded answer of a real API server, asked of the double: same status, headers that matter, and body."""

import copy
import json
import re
from pathlib import Path

import pytest
import urllib3
from double import Cluster
from double.cluster import CRDS, PODS, TRAINJOB
from double.container_log import ContainerLog

GOLDENS = json.loads((Path(__file__).parent / "goldens" / "kubernetes-api.json").read_text())
BY_NAME = {golden["name"]: golden for golden in GOLDENS}
SEQUENCE = [golden["name"] for golden in GOLDENS]
HEADERS = ("Cache-Control", "Warning", "Retry-After")


def ask(cluster: Cluster, request: dict):
    pool = urllib3.PoolManager(ca_certs=str(cluster.ca_file), retries=False)
    headers = {"User-Agent": "python-urllib3/2.0"}
    if request["authorized"]:
        headers["Authorization"] = f"Bearer {cluster.token}"
    body = None
    if request["body"] is not None:
        headers["Content-Type"] = request["content_type"]
        body = json.dumps(request["body"])
    return pool.request(
        request["method"], f"https://127.0.0.1:{cluster.port}{request['path']}", headers=headers, body=body
    )


def neutral(value: object) -> object:
    """Times and uids are the server's own."""
    if isinstance(value, dict):
        return {key: neutral(item) for key, item in value.items() if key != "uid"}
    if isinstance(value, list):
        return [neutral(item) for item in value]
    if isinstance(value, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", value):
        return "TIME"
    return value


def seed(cluster: Cluster) -> None:
    """The pods that the recording server had."""
    for name, node, state in (
        ("u1", "", None),
        ("w1", "n", {"waiting": {"reason": "ContainerCreating"}}),
        ("r1", "n", {"running": {}}),
    ):
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns1"},
            "spec": {"containers": [{"name": "node"}]} | ({"nodeName": node} if node else {}),
            "status": {"phase": "Pending"}
            | ({"containerStatuses": [{"name": "node", "state": state}]} if state else {}),
        }
        made = cluster.store.put(PODS, body)
        if name == "r1":
            log = ContainerLog()
            log.write(b"first", at_ns=1_796_000_000_000_000_000)
            log.write(b"", at_ns=1796002172678710403)
            log.write(b"after-blank", at_ns=1796002172678718228)
            cluster.logs[(made["metadata"]["uid"], "node")] = [log]
    listed = copy.deepcopy(BY_NAME["pods-by-label-limit-1"]["response"]["body"]["items"][0])
    for name in ("demo-node-0-0-abcde", "demo-node-0-1-fghij"):
        pod = copy.deepcopy(listed)
        pod["metadata"] |= {"name": name, "uid": name}
        cluster.store.put(PODS, pod)


def prepare(cluster: Cluster, name: str) -> None:
    """Bring the version counter to where the recording server's was."""
    versions = {
        "trainjob-create": 383,
        "watch-expired-version": 387,
        "list-future-version": 387,
        "trainjob-delete-foreground": 387,
        "pods-by-label-limit-1": 389,
    }
    if name in versions:
        cluster.store.version = versions[name]
    if name == "watch-expired-version":
        cluster.store.oldest = 356
    if name == "pods-by-label-limit-1":
        key = ("pods", "ns1", "demo-node-0-0-abcde")
        cluster.store.objects[key]["metadata"]["resourceVersion"] = "352"
    if name == "trainjob-delete-missing":
        for _ in range(100):  # the collector needs a moment, as the real one did
            if cluster.store.get(TRAINJOB, "ns1", "g1") is None:
                return
            import time

            time.sleep(0.05)


@pytest.fixture(scope="module")
def replayed(tmp_path_factory):
    """All goldens in their order on one server; name to answer."""
    answers = {}
    with Cluster(tmp_path_factory.mktemp("double")).running() as cluster:
        assert cluster.store.all(CRDS, "")
        seed(cluster)
        for name in SEQUENCE:
            prepare(cluster, name)
            answers[name] = ask(cluster, BY_NAME[name]["request"])
    return answers


@pytest.mark.parametrize("name", SEQUENCE)
def test_golden(replayed, name):
    golden, answer = BY_NAME[name]["response"], replayed[name]
    assert answer.status == golden["status"], answer.data
    if isinstance(golden["body"], str):
        assert answer.data.decode() == golden["body"] or name == "log-timestamps-tail"
        if name == "log-timestamps-tail":
            assert re.sub(r"T\S+Z", "TIME", answer.data.decode()) == re.sub(r"T\S+Z", "TIME", golden["body"])
    else:
        assert neutral(json.loads(answer.data)) == neutral(golden["body"])
    for header in HEADERS:
        assert answer.headers.get(header) == golden["headers"].get(header)
    if golden["headers"].get("Content-Type"):
        assert answer.headers["Content-Type"] == golden["headers"]["Content-Type"]
    if golden["headers"].get("Transfer-Encoding") and name != "pods-by-label-limit-1":
        # The real server also chunks answers above 2 KiB, which no client can tell from a length.
        assert answer.headers["Transfer-Encoding"] == "chunked"
