"""What is read from a rank's output, and that reading it stays cheap and bounded."""

import json
import sys

import pytest

from kfp_gate.launching.triage import copies_evidence, growth_evidence, memory_evidence
from kfp_gate.launching.worker_lines import (
    KEPT_EPOCHS,
    KEPT_LINES,
    MARKS,
    TELLING_WORDS,
    TRACEBACK_LINES,
    WorkerLines,
    progress_text,
)
from kfp_gate.observing.memory import Memory, memory_line

GIB = 1 << 30


def fed(*lines: str) -> WorkerLines:
    summary = WorkerLines()
    for line in lines:
        summary.feed(line)
    return summary


@pytest.mark.parametrize(
    ("line", "mark"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "gpu-out-of-memory"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_ALLOC_FAILED", "gpu-out-of-memory"),
        ("[rank0]:[E] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)", "collective-timeout"),
        ("RuntimeError: [gloo/pair.cc:1] Timed out waiting 600000ms for recv operation", "collective-timeout"),
        ("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:1", "peer-lost"),
        ("ncclRemoteError: A call failed possibly due to a network error", "peer-lost"),
        ("torch.distributed.DistNetworkError: Failed to recv, got 0 bytes. Connection was likely closed", "peer-lost"),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "child-killed"),
        ("RuntimeError: unable to allocate shared memory(shm) for file </torch_1>: Resource", "shm"),
        ("ERROR: Unexpected bus error encountered in worker.", "shm"),
    ],
)
def test_texts_that_name_a_cause(line, mark):
    """Each also passes the quick search that most lines fail."""
    assert any(word in line for word in TELLING_WORDS)
    assert fed(line).marks == [mark]


def test_every_mark_is_tried_above():
    assert {name for name, _ in MARKS} == {
        "gpu-out-of-memory",
        "collective-timeout",
        "peer-lost",
        "child-killed",
        "shm",
    }


def test_the_last_traceback_is_kept_with_its_innermost_frames():
    frames = [f'  File "f{n}.py", line {n}, in f' for n in range(200)]
    summary = fed("Traceback (most recent call last):", *frames, "ValueError: deep", *["later"] * 500)
    assert summary.exception == "ValueError: deep"
    assert frames[-1] in summary.traceback
    assert len(summary.traceback) <= TRACEBACK_LINES + 1
    assert len(summary.last) == KEPT_LINES


def test_torch_prefixes_do_not_hide_a_traceback():
    summary = fed(
        "[rank1]: Traceback (most recent call last):", '[rank1]:   File "a.py", line 1', "[rank1]: KeyError: 1"
    )
    assert summary.exception == "KeyError: 1"


def test_machine_lines_are_read_whole_and_are_no_evidence():
    message = "found:     " + "x" * 9000
    summary = fed("KFP_GATE_FAILURE " + json.dumps({"kind": "user", "message": message}), "KFP_GATE_PROGRESS {broken")
    assert summary.failure["message"] == message
    assert summary.progress == {}
    assert not summary.last


def test_memory_stays_bounded_over_a_long_run():
    summary = WorkerLines()
    for epoch in range(5000):
        summary.feed("03:00 INFO " + memory_line(epoch, 5000, Memory(rss=GIB, cgroup=GIB + epoch, limit=8 * GIB)))
        summary.feed("x" * 100_000)
    assert len(summary.growth) <= KEPT_EPOCHS
    assert sum(map(sys.getsizeof, summary.last)) < 1_000_000


def test_the_workers_own_memory_line_is_understood():
    lines = [
        "2026-11-30 03:00:00,123 INFO "
        + memory_line(
            epoch, 12, Memory(rss=2 * GIB, peak=3 * GIB, children=9 * GIB, cgroup=(5 + epoch) * GIB, limit=12 * GIB,
                              cgroup_peak=11 * GIB, anon=4 * GIB, file=GIB, shmem=GIB),
        )
        for epoch in range(1, 7)
    ]  # fmt: skip
    summary = fed(*lines)
    assert summary.memory.startswith("memory epoch 6/12: ")
    assert growth_evidence(summary.growth) == ["memory changed by +1024.0 MiB an epoch over the last 3 epochs"]
    assert copies_evidence(summary.memory) == [
        "the processes' resident sizes add up to 11264 MiB, the container holds 11264 MiB: "
        "the processes hold memory of their own"
    ]
    shared = memory_line(1, 2, Memory(rss=4 * GIB, peak=4 * GIB, children=16 * GIB, cgroup=6 * GIB, limit=8 * GIB))
    assert "forked copies share pages now" in copies_evidence(shared)[0]
    alone = memory_line(1, 2, Memory(rss=4 * GIB, peak=4 * GIB, cgroup=6 * GIB))
    assert copies_evidence(alone) == []


def test_steady_memory_is_called_steady():
    assert "steady" in growth_evidence([(n, 4e9) for n in range(10)])[0]
    assert growth_evidence([(1, 4e9), (2, 5e9)]) == []


def test_the_end_line_tells_limit_shares_and_kernel():
    summary = WorkerLines()
    summary.end = {"memory": {"limit": 8 * GIB, "cgroup_peak": 8 * GIB, "cgroup": 6 * GIB, "anon": 3 * GIB,
                              "file": 2 * GIB, "shmem": 2 * GIB, "oom_kills": 1}}  # fmt: skip
    assert memory_evidence(summary) == [
        "peak 8192 MiB of 8192 MiB (100%): the container's own limit was reached",
        "memory when the worker had ended: anon 3072 MiB, shmem 2048 MiB, file 2048 MiB, kernel and other 1024 MiB",
    ]
    summary.end["memory"] = {"cgroup_peak": GIB}
    assert memory_evidence(summary) == [
        "peak 1024 MiB, no limit set on the container: the node's memory is the constraint"
    ]


@pytest.mark.parametrize(
    ("record", "text"),
    [
        ({"epoch": 3, "epochs": 12, "eta_s": 41.0}, "progress: epoch 3 of 12, about 41 s left"),
        ({"epoch": 3, "eta_s": 7000, "monitors": {"f1": 0.41234}}, "progress: epoch 3, f1 0.4123, about 117 min left"),
        ({"epoch": 1, "epochs": 2, "eta_s": 90000.0}, "progress: epoch 1 of 2, about 25.0 h left"),
        ({"monitors": {"map50": None}, "eta_s": float("nan")}, "progress: running"),
        ({}, "progress: running"),
    ],
)  # fmt: skip
def test_progress_in_words(record, text):
    assert progress_text(record) == text
