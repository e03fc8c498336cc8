"""Follow the logs of four pods over many cut connections: ours against `kubernetes.watch.Watch().stream`.

    python benchmarks/follow.py              1,000,000 lines, 100 cuts
    python benchmarks/follow.py --lines 100000 --cuts 20

The server is the API-server double of the tests, in a process of its own; each client runs in one of its own. A
cut ends a log stream cleanly, as a real API server's does. Lost and doubled lines are counted by their numbers.
The last line is one JSON object.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from pathlib import Path

ROOT = Path(__file__).parents[1]
PODS = 4
BARS = {"lost": 0, "doubled": 0, "lines_per_second": 20_000}
START_NS = 1_796_000_000_000_000_000
LINE_NS = 400_000
"""2,500 lines a second and pod: a reconnect replays up to so many."""


def serve(lines: int, cuts: int) -> None:
    sys.path.insert(0, str(ROOT / "tests" / "cluster"))
    from double import Cluster
    from double.cluster import PODS as POD_RESOURCE
    from double.cluster import PodHandle
    from double.container_log import stamp

    chance = random.Random(1)
    with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder)).running() as cluster:
        size = 0
        for number in range(PODS):
            body = {
                "apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"p{number}", "namespace": "ns1"},
                "spec": {"containers": [{"name": "node"}], "restartPolicy": "Never"}, "status": {"phase": "Pending"},
            }  # fmt: skip
            made = cluster.store.put(POD_RESOURCE, body)
            pod = PodHandle(cluster, "ns1", f"p{number}", made["metadata"]["uid"])
            pod.start()
            data, times, offsets = bytearray(), array("q"), array("q")
            for line in range(lines // PODS):
                at = START_NS + line * LINE_NS
                times.append(at)
                offsets.append(len(data))
                data += stamp(at).encode() + b" %d 2026-11-30 03:00:00 INFO step loss 0.123 lr 0.01 data 0.2 s\n" % line
            pod.log.append_rendered(bytes(data), times, offsets)
            pod.exit(0)
            size += len(data)
        left = [cuts]
        guard = threading.Lock()

        def allowance() -> int | None:
            with guard:
                if not left[0]:
                    return None
                left[0] -= 1
                return chance.randrange(size // (2 * cuts), 3 * size // (2 * cuts))

        cluster.log_allowance = allowance
        print(json.dumps({"port": cluster.port, "ca": str(cluster.ca_file), "token": cluster.token}), flush=True)
        sys.stdin.readline()
        print(json.dumps({"cuts_left": left[0]}), flush=True)


def connect(server: dict):
    from kubernetes import client

    configuration = client.Configuration()
    configuration.host = f"https://127.0.0.1:{server['port']}"
    configuration.ssl_ca_cert = server["ca"]
    configuration.api_key = {"authorization": f"Bearer {server['token']}"}
    configuration.connection_pool_maxsize = 16
    return client.ApiClient(configuration)


def follow_ours(server: dict, count) -> None:
    from kfp_gate.launching.api import Api
    from kfp_gate.launching.logs import Follower
    from kfp_gate.launching.pods import Pod
    from kfp_gate.launching.worker_lines import WorkerLines

    api = Api(connect(server))
    threads = []
    summaries = [WorkerLines() for _ in range(PODS)]
    for number in range(PODS):
        name = f"p{number}"

        def read_pod(name: str = name) -> Pod:
            body = api.once("GET", f"/api/v1/namespaces/ns1/pods/{name}")
            return Pod(name, body["metadata"]["uid"], 0, body, "node")

        def emit(lines: list[bytes], number: int = number) -> None:
            summary = summaries[number]
            for line in lines:
                summary.feed(line.decode("utf-8", errors="replace"))  # what the launcher does with each line
                count(number, int(line[: line.index(b" ")]))

        follower = Follower(api, "ns1", read_pod(), read_pod, emit, threading.Event())
        threads.append(threading.Thread(target=follower.run))
    _all(threads)


def follow_watch(server: dict, count) -> None:
    from kubernetes import client, watch

    api = client.CoreV1Api(connect(server))

    def one(number: int) -> None:
        stream = watch.Watch().stream(api.read_namespaced_pod_log, name=f"p{number}", namespace="ns1", container="node")
        for line in stream:
            count(number, int(line[: line.index(" ")]))

    _all([threading.Thread(target=one, args=(number,)) for number in range(PODS)])


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def client(which: str, server: dict, lines: int) -> None:
    seen = [array("B", bytes(lines // PODS)) for _ in range(PODS)]
    order = [-1] * PODS
    disordered = [0]

    def count(pod: int, line: int) -> None:
        seen[pod][line] = min(255, seen[pod][line] + 1)
        if line < order[pod]:
            disordered[0] += 1
        order[pod] = line

    follow = {"ours": follow_ours, "watch": follow_watch}[which]
    import kubernetes  # noqa: F401  # its import is no part of the work

    before = resource.getrusage(resource.RUSAGE_SELF)
    began = time.perf_counter()
    follow(server, count)
    wall = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    got = sum(min(1, n) for pod in seen for n in pod)
    result = {
        "lines": got, "lost": sum(map(len, seen)) - got, "doubled": sum(max(0, n - 1) for pod in seen for n in pod),
        "disordered": disordered[0], "wall_s": round(wall, 2),
        "cpu_s": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 2),
        "lines_per_second": round(got / wall), "peak_mb_added": round((after.ru_maxrss - before.ru_maxrss) / 1024, 1),
    }  # fmt: skip
    print(json.dumps(result))


def measure(which: str, lines: int, cuts: int) -> dict:
    me = [sys.executable, __file__, "--lines", str(lines), "--cuts", str(cuts)]
    server = subprocess.Popen([*me, "--serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    ready = server.stdout.readline()
    done = subprocess.run([*me, "--client", which, "--server", ready], capture_output=True, text=True, check=True)
    _, _ = server.communicate("\n")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--cuts", type=int, default=100)
    parser.add_argument("--serve", action="store_true")
    parser.add_argument("--client", default="")
    parser.add_argument("--server", default="")
    options = parser.parse_args()
    if options.serve:
        return serve(options.lines, options.cuts)
    if options.client:
        return client(options.client, json.loads(options.server), options.lines)
    results = {which: measure(which, options.lines, options.cuts) for which in ("ours", "watch")}
    keys = list(results["ours"])
    print(f"{options.lines} lines, {PODS} pods, {options.cuts} clean cuts")
    print(f"{'':18}" + "".join(f"{key:>18}" for key in keys))
    for which, row in results.items():
        print(f"{which:18}" + "".join(f"{row[key]:>18}" for key in keys))
    ours, peer = results["ours"], results["watch"]
    met = ours["lost"] == ours["doubled"] == ours["disordered"] == 0
    met = met and ours["lines_per_second"] >= BARS["lines_per_second"]
    ratios = {"cpu_per_line": round((ours["cpu_s"] / ours["lines"]) / (peer["cpu_s"] / max(1, peer["lines"])), 2)}
    print(
        json.dumps(
            {"name": "follow", "ours": ours, "peers": {"watch": peer}, "ratios": ratios, "bars": BARS, "met": met}
        )
    )


if __name__ == "__main__":
    main()
