"""Ranks as processes of this machine, apart from each other as pods would be: own folder, own environment.

One loop reads all ranks' output and waits for their ends; there are no threads, so nothing can outlive the
loop. When a rank fails the others are stopped: SIGTERM, a grace time, SIGKILL.
"""

import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.launching.causes import NEXT_CHECK, Seen, explain, with_cause
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.outcome import Outcome, RankEnd
from kfp_gate.launching.output import write_lines
from kfp_gate.launching.rank import GRACE_SECONDS
from kfp_gate.launching.worker_lines import MACHINE_PREFIXES, ProgressReport, WorkerLines

WORKER = (sys.executable, "-m", "kfp_gate.training.worker", "--spec", "{spec}", "--out", "{out}")
MAX_LINE_BYTES = 64 * 1024
"""A longer line is passed on in parts: memory stays bounded whatever a rank prints."""

POLL_SECONDS = 0.1
LINGER_SECONDS = 1.0
"""Between the first failure and the stop of the others: the rank that is to blame may end a moment later."""

OWN_FAILURES = ("broken", "user", "memory", "unavailable")
"""What a worker reports when it failed by itself, also if we told it to stop at the same moment."""


def run_processes(spec: str, options: LaunchOptions, out: Path) -> Outcome:
    """Run `options.world_size` ranks of `spec` (JSON text) here; rank 0's model ends in `out`.

    Raises:
        InvalidInput: more ranks than visible GPUs.
    """
    say = options.say or (lambda line: write_lines([line]))
    work = Path(tempfile.mkdtemp(prefix="kfp-gate-ranks-"))
    ranks: list[_Rank] = []
    try:
        environments = _environments(options)
        for number, environment in enumerate(environments):
            ranks.append(_Rank.start(number, work / f"rank-{number}", spec, options.command or WORKER, environment))
        timed_out = _follow(ranks, say, options.deadline_seconds)
        return _outcome(ranks, out, timed_out, options.deadline_seconds)
    finally:
        for rank in ranks:
            rank.signal(signal.SIGTERM)  # all at once: only an interrupted launch has any left
        for rank in ranks:
            rank.close()
        if options.records is not None:
            _keep_records(ranks, options.records)
        shutil.rmtree(work, ignore_errors=True)


class _Rank:
    """One started rank: its process, the unfinished end of its output, and the summary of what it said."""

    def __init__(self, number: int, work: Path, process: "subprocess.Popen[bytes]") -> None:
        self.number = number
        self.out = work / "out"
        self.process = process
        self.lines = WorkerLines()
        self.rest = b""
        self.ended_at: float | None = None
        self.stopped_by_us = False
        self.reading = True
        assert process.stdout is not None
        self.fd = process.stdout.fileno()
        os.set_blocking(self.fd, False)

    @classmethod
    def start(
        cls, number: int, work: Path, spec: str, command: tuple[str, ...], environment: dict[str, str]
    ) -> "_Rank":
        work.mkdir(parents=True)
        (work / "spec.json").write_text(spec, encoding="utf-8")
        wrapper = [sys.executable, "-m", "kfp_gate.launching.rank", "--work", str(work), "--parent", str(os.getpid())]
        process = subprocess.Popen(
            [*wrapper, "--", *command], cwd=work, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return cls(number, work, process)

    def read(self, say: Callable[[str], None]) -> bool:
        """Pass on the lines that are there; whether there may be more right now."""
        try:
            data = os.read(self.fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.reading = False
            if self.rest:
                self._line(self.rest, say)
                self.rest = b""
            return False
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._line(line, say)
        if len(self.rest) > MAX_LINE_BYTES:
            self._line(self.rest, say)
            self.rest = b""
        return True

    def _line(self, raw: bytes, say: Callable[[str], None]) -> None:
        line = raw.decode("utf-8", errors="replace").rstrip("\r")
        self.lines.feed(line)
        if line and not line.startswith(MACHINE_PREFIXES):
            say(f"[rank {self.number}] {line}")

    def poll(self) -> bool:
        """Whether the process has ended; notes the time when it is first seen."""
        if self.process.poll() is None:
            return False
        if self.ended_at is None:
            self.ended_at = time.time()
        return True

    @property
    def exit_code(self) -> int | None:
        code = self.process.returncode
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_stopped(self) -> bool:
        """Whether it ended because we told it to, and not by itself at the same moment."""
        return self.stopped_by_us and self.lines.failure.get("kind") not in OWN_FAILURES

    def signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def close(self) -> None:
        """End what still runs (an exception, Ctrl-C) and release the pipe."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            try:
                self.process.wait(GRACE_SECONDS + 1)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def _follow(ranks: list[_Rank], say: Callable[[str], None], deadline_seconds: int) -> bool:
    """Until all have ended and all output is read. Returns whether the deadline passed."""
    report = ProgressReport(say)
    selector = selectors.DefaultSelector()
    for rank in ranks:
        selector.register(rank.fd, selectors.EVENT_READ, rank)
    deadline = time.monotonic() + deadline_seconds if deadline_seconds else float("inf")
    stop_at = kill_at = float("inf")
    timed_out = False
    while True:
        for key, _ in selector.select(POLL_SECONDS):
            reader: _Rank = key.data
            reader.read(say)
            if not reader.reading:
                selector.unregister(reader.fd)
        report.update(ranks[0].lines, time.monotonic())
        ended = [rank for rank in ranks if rank.poll()]
        failed = any(rank.exit_code != 0 for rank in ended)
        now = time.monotonic()
        timed_out = timed_out or (now >= deadline and len(ended) < len(ranks))
        if failed and stop_at == float("inf"):
            stop_at = now + LINGER_SECONDS
        if (now >= stop_at or timed_out) and kill_at == float("inf"):
            kill_at = now + GRACE_SECONDS + 1
            for rank in ranks:
                if rank not in ended:
                    rank.stopped_by_us = True
                    rank.signal(signal.SIGTERM)
        if now >= kill_at:
            for rank in ranks:
                rank.signal(signal.SIGKILL)
        if len(ended) == len(ranks):
            break
    for rank in ranks:
        # What is in the pipe is ours; a grandchild that still holds it open must not keep us.
        while rank.reading and rank.read(say):
            pass
        if rank.rest:
            rank._line(rank.rest, say)
            rank.rest = b""
    selector.close()
    return timed_out


def _outcome(ranks: list[_Rank], out: Path, timed_out: bool, deadline_seconds: int) -> Outcome:
    seen = [Seen(rank.number, rank.exit_code, rank.ended_at, rank.lines, None, (), rank.was_stopped) for rank in ranks]
    if timed_out:
        return with_cause(
            explain(seen), "deadline", f"the ranks were stopped: the deadline of {deadline_seconds} s passed"
        )
    if any(one.exit_code != 0 for one in seen):
        return explain(seen)
    ends = tuple(RankEnd(one.rank, one.exit_code, one.ended_at, "none") for one in seen)
    model = ranks[0].out / "model"
    if not model.is_dir() or not any(model.iterdir()):
        return Outcome(
            "failed", "no-model", 0, "all ranks ended well but rank 0 left no model", (f"no files in {model.name}/",),
            NEXT_CHECK["no-model"], ends,
        )  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists():
        shutil.rmtree(out)
    shutil.move(model, out)
    return Outcome("succeeded", ranks=ends, model=out, summary=f"{len(ranks)} ranks ended well")


def _environments(options: LaunchOptions) -> list[dict[str, str]]:
    """One environment a rank. `LOCAL_RANK` is 0 on all: each rank sees at most one GPU, as in a pod."""
    world = options.world_size
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(n) for n in range(world)] if visible is None else [d for d in visible.split(",") if d.strip()]
    if options.gpus_per_node and len(devices) < world:
        raise InvalidInput(
            f"{world} ranks and {len(devices)} visible GPUs", expected="one GPU for each rank",
            where="nodes, processes_per_node, gpus_per_node",
            next_step="start fewer ranks, or set gpus_per_node=0 to train on the CPU",
        )  # fmt: skip
    shared = {
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "PYTHONUNBUFFERED": "1",
        # Without this each of N ranks starts as many threads as the machine has cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // world))),
        **options.environment,
    }
    return [
        {
            **os.environ, **shared, "RANK": str(rank),
            "CUDA_VISIBLE_DEVICES": devices[rank] if options.gpus_per_node else "",
        }
        for rank in range(world)
    ]  # fmt: skip


def free_port() -> int:
    """A port that nothing listens on now, below the range from which the kernel gives ports to connections: one of
    those could be taken by the time that rank 0 listens."""
    for port in random.SystemRandom().sample(range(20000, 32000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise Broken(
        "no free port among 100 tried", expected="a free one from 20000 to 31999", where="this machine",
        next_step="end what holds the ports",
    )  # fmt: skip


def _keep_records(ranks: list[_Rank], records: Path) -> None:
    for rank in ranks:
        if rank.out.is_dir():
            target = records / f"rank-{rank.number}"
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(rank.out, target)
