"""The follower against the double: every kind of cut, and the log comes out whole."""

import itertools
import random
import threading
import time
from array import array

import pytest
from double.cluster import PODS, PodHandle
from double.container_log import stamp

from kfp_gate.launching.api import Api
from kfp_gate.launching.logs import Follower
from kfp_gate.launching.pods import Pod


class Collected:
    """One follower and what it emitted."""

    def __init__(self, cluster, pod: PodHandle, **settings) -> None:
        self.lines: list[bytes] = []
        self.notes: list[str] = []
        self.api = Api(cluster.api_client(), outage_seconds=30)
        self.handle = pod
        self.stop = threading.Event()

        def read_pod() -> Pod | None:
            body = self.api.once("GET", f"/api/v1/namespaces/ns1/pods/{pod.name}")
            return Pod(pod.name, pod.uid, 0, body, "node")

        first = Pod(pod.name, pod.uid, 0, pod.body, "node")
        self.follower = Follower(
            self.api, "ns1", first, read_pod, self.lines.extend, self.stop, note=self.notes.append, **settings
        )
        self.thread = threading.Thread(target=self.follower.run, daemon=True)

    def start(self) -> "Collected":
        self.thread.start()
        return self

    def finish(self, seconds: float = 60) -> list[bytes]:
        self.thread.join(seconds)
        self.stop.set()
        assert not self.thread.is_alive(), f"still following after {len(self.lines)} lines"
        return self.lines

    def wait_for(self, count: int, seconds: float = 20) -> None:
        end = time.monotonic() + seconds
        while len(self.lines) < count:
            assert time.monotonic() < end, f"{len(self.lines)} of {count} lines"
            time.sleep(0.02)


@pytest.fixture
def pod(cluster) -> PodHandle:
    return make_pod(cluster, "p0")


def make_pod(cluster, name: str) -> PodHandle:
    made = cluster.store.put(
        PODS,
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "namespace": "ns1", "labels": {"a": "b"}},
            "spec": {"containers": [{"name": "node"}], "restartPolicy": "Never"},
            "status": {"phase": "Pending"},
        },
    )
    return PodHandle(cluster, "ns1", name, made["metadata"]["uid"])


def test_from_pending_to_the_end(cluster, pod):
    got = Collected(cluster, pod).start()
    time.sleep(0.3)
    pod.schedule()
    pod.start()
    for number in range(50):
        pod.write(f"line {number}")
    pod.exit(0)
    assert got.finish() == [b"line %d" % n for n in range(50)]
    assert got.follower.complete


@pytest.mark.parametrize("style", ["clean", "abrupt"])
def test_cuts_that_look_like_an_end(cluster, pod, style):
    chance = random.Random(7)
    pod.start()
    cluster.log_allowance = lambda: chance.randrange(20, 4000)
    cluster.cut_style = lambda: style
    got = Collected(cluster, pod).start()
    for number in range(1500):
        pod.write(f"line {number} {'x' * chance.randrange(60)}")
        if number % 100 == 0:
            time.sleep(0.01)
    pod.exit(0)
    time.sleep(1.5)
    cluster.log_allowance = lambda: None
    lines = got.finish()
    assert [int(line.split()[1]) for line in lines] == list(range(1500))
    assert got.follower.connections >= 4


@pytest.mark.parametrize("beyond", [0, 7], ids=["between two lines", "within a line"])
def test_a_cut_while_an_ended_containers_log_is_drained(cluster, pod, beyond):
    pod.start()
    at = 1_796_000_000_000_000_000
    for number in range(3000):
        pod.write(f"line {number} {'y' * 40}", at_ns=at + number)
    pod.exit(0)
    # All in one second: each connection begins at the first line again, and ends where it is cut.
    allowances = [pod.log.offsets[line] + beyond for line in (1000, 1001, 2500)]
    cluster.log_allowance = lambda: allowances.pop(0) if allowances else None
    assert [int(line.split()[1]) for line in Collected(cluster, pod).start().finish()] == list(range(3000))
    assert not allowances


def test_all_at_one_instant_and_on_whole_seconds(cluster, pod):
    pod.start()
    at = 1_796_000_000_000_000_000
    for number in range(300):
        pod.write(f"line {number}", at_ns=at + (number // 100) * 1_000_000_000)
    allowances = [1000, 3000, 5000, 9000, None]
    cluster.log_allowance = lambda: allowances.pop(0) if len(allowances) > 1 else None
    pod.exit(0)
    assert Collected(cluster, pod).start().finish() == [b"line %d" % n for n in range(300)]


def test_long_lines_bad_bytes_blank_lines_and_no_last_newline(cluster, pod):
    pod.start()
    long = b"a" * 16384 + b"b" * 16384 + b"c" * 100
    texts = [
        b"",
        b"\xff\xfe not utf-8",
        long,
        b"  indented",
        b"2026-11-30T00:00:00Z looks like a stamp",
        b"\tlast, no newline",
    ]
    for number, text in enumerate(texts):
        pod.write(text, newline=number < len(texts) - 1)
    pod.exit(1)
    allowances = [40, 20_000, 33_000, None]
    cluster.log_allowance = lambda: allowances.pop(0) if len(allowances) > 1 else None
    assert Collected(cluster, pod).start().finish() == texts


def test_the_rest_of_a_split_line_alone_at_the_head_of_a_reconnect(cluster, pod):
    pod.start()
    at = 1_796_000_000_999_999_999  # the second part's time lies in the next second
    pod.write(b"p" * 16384 + b"q" * 10, at_ns=at)
    pod.write(b"next", at_ns=at + 10)
    got = Collected(cluster, pod).start()
    got.wait_for(2)
    cluster.cut_streams()
    time.sleep(0.3)
    pod.write(b"after", at_ns=at + 20)
    pod.exit(0)
    assert got.finish() == [b"p" * 16384 + b"q" * 10, b"next", b"after"]


@pytest.mark.all_only
def test_server_answers_that_are_not_the_end(cluster, pod):
    pod.start()
    for number in range(20):
        pod.write(f"line {number}")
    for status, after in ((429, "1"), (500, ""), (503, ""), (401, ""), (0, "")):
        cluster.fail_next(1, status, match=lambda r: r.log, retry_after=after)
    got = Collected(cluster, pod).start()
    got.wait_for(20)
    pod.exit(0)
    assert got.finish() == [b"line %d" % n for n in range(20)]


@pytest.mark.all_only
def test_an_api_server_that_is_away_for_seconds(cluster, pod):
    pod.start()
    got = Collected(cluster, pod).start()
    for number in range(100):
        pod.write(f"line {number}")
    got.wait_for(50)
    cluster.down()
    for number in range(100, 200):
        pod.write(f"line {number}")
    time.sleep(1.5)
    cluster.up()
    pod.exit(0)
    assert got.finish() == [b"line %d" % n for n in range(200)]


@pytest.mark.all_only
def test_silence_longer_than_the_read_timeout(cluster, pod):
    pod.start()
    pod.write("before")
    got = Collected(cluster, pod, quiet_seconds=0.5).start()
    time.sleep(2)
    pod.write("after")
    pod.exit(0)
    assert got.finish() == [b"before", b"after"]
    assert got.follower.connections >= 3


@pytest.mark.all_only
def test_a_container_that_restarts(cluster, pod):
    pod.change(lambda body: body["spec"].update(restartPolicy="OnFailure"))
    pod.start()
    for number in range(10):
        pod.write(f"first {number}")
    got = Collected(cluster, pod).start()
    got.wait_for(10)
    pod.write("first last words")
    pod.restart()
    pod.write("second begins")
    got.wait_for(12)
    pod.change(lambda body: body["spec"].update(restartPolicy="Never"))
    pod.exit(0)
    assert got.finish() == [*[b"first %d" % n for n in range(10)], b"first last words", b"second begins"]
    assert any("restarted" in note for note in got.notes)


@pytest.mark.all_only
def test_rotation_while_cut_off_is_said(cluster, pod):
    pod.start()
    pod.write("old")
    got = Collected(cluster, pod).start()
    got.wait_for(1)
    cluster.down()
    pod.write("lost to rotation")
    pod.log.rotate()
    pod.write("new")
    cluster.up()
    got.wait_for(2)
    pod.exit(0)
    assert got.finish() == [b"old", b"new"]
    assert got.notes == ["the node rotated this log while the connection was cut: lines before this one may be missing"]


def test_rotation_while_reading_loses_nothing(cluster, pod):
    pod.start()
    got = Collected(cluster, pod).start()
    for number in range(100):
        pod.write(f"line {number}")
        if number == 0:
            got.wait_for(1)  # reading, before the first file goes
        if number % 30 == 0:
            pod.log.rotate()
    got.wait_for(100)
    pod.exit(0)
    assert got.finish() == [b"line %d" % n for n in range(100)]


def test_a_pod_that_is_deleted_ends_the_follower(cluster, pod):
    pod.start()
    pod.write("one")
    got = Collected(cluster, pod).start()
    got.wait_for(1)
    pod.delete()
    assert got.finish() == [b"one"]


def soak(cluster, pods: int, lines: int, cuts: int, outage: float) -> list[Collected]:
    """Many lines, random cuts by scripted chance, one outage; returns what was collected."""
    chance = random.Random(20261130)
    handles = [make_pod(cluster, f"soak-{n}") for n in range(pods)]
    for handle in handles:
        handle.start()
    followers = [Collected(cluster, handle).start() for handle in handles]
    bounds = [lines * n // cuts for n in range(cuts + 1)]
    for number, (begin, end) in enumerate(itertools.pairwise(bounds)):
        for handle in handles:
            data, times, offsets = bytearray(), array("q"), array("q")
            at = time.time_ns()
            for line in range(begin, end):
                at += chance.choice((0, 0, 1, 1000))
                times.append(at)
                offsets.append(len(data))
                data += stamp(at).encode() + b" line %d of a training that goes on\n" % line
            handle.log.append_rendered(bytes(data), times, offsets)
        if number == cuts // 2:
            cluster.outage(outage)
        time.sleep(chance.uniform(0.0, 0.05))
        while not cluster.cut_streams(chance.choice(["clean", "abrupt"])):
            time.sleep(0.005)  # each cut cuts something
    for handle in handles:
        handle.exit(0)
    for follower in followers:
        follower.finish(600)
    return followers


def check_soak(followers: list[Collected], lines: int) -> None:
    for follower in followers:
        assert len(follower.lines) == lines
        assert all(line.startswith(b"line %d " % number) for number, line in enumerate(follower.lines))


@pytest.mark.all_only
def test_many_lines_many_cuts_one_outage(cluster):
    check_soak(soak(cluster, pods=4, lines=25_000, cuts=30, outage=3), 25_000)


@pytest.mark.slow
def test_a_million_lines_a_hundred_cuts_and_a_long_outage(cluster):
    followers = soak(cluster, pods=4, lines=250_000, cuts=100, outage=30)
    check_soak(followers, 250_000)
    print("connections:", [follower.follower.connections for follower in followers])
