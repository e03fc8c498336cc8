"""The process in which one rank runs, on this machine and in a pod alike: `python -m kfp_gate.launching.rank`.

It starts the worker as its child, passes signals on, and prints one last line (`KFP_GATE_RANK_END {json}`)
with what only somebody outside the worker and inside the container can see: the signal that ended it, the
kernel's out-of-memory counter, and the container's memory. It never reads the worker's output, so it adds
nothing to what a line costs. On a cluster it also delivers rank 0's model, and for a command of the user's own
it watches the launcher's heartbeat; the built-in worker watches it itself.

Exit code: the worker's; 128 + N if signal N ended it.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from kfp_gate.observing.memory import Memory, find_control_group, read_memory
from kfp_gate.training.heartbeat import Heartbeat

END_PREFIX = "KFP_GATE_RANK_END "
GRACE_SECONDS = 5.0
"""Between SIGTERM and SIGKILL for the worker and its children, where the launcher waits for them."""

POD_GRACE_SECONDS = 25.0
"""The same in a pod, whose end comes after 30 s: evidence takes its time to reach storage."""


def main(arguments: list[str] | None = None) -> int:
    """Run one rank to its end and report how it ended."""
    options = _parse(sys.argv[1:] if arguments is None else arguments)
    if options.parent:
        _die_with_parent(options.parent)
    work = Path(options.work)
    out = work / "out"
    out.mkdir(parents=True, exist_ok=True)
    spec = work / "spec.json"
    if text := os.environ.pop("KFP_GATE_SPEC", ""):
        spec.write_text(text, encoding="utf-8")
    _name_checkpoints(spec)
    places = {"{spec}": str(spec), "{out}": str(out)}
    command = [places.get(word, word) for word in options.command]
    group = find_control_group()
    before = read_memory(group=group)
    started = time.time()
    stop = _Stop(GRACE_SECONDS if options.parent else POD_GRACE_SECONDS)
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=_kill_with_parent)
    except OSError as error:
        _report({"exit_code": 127, "reason": f"the command did not start: {error}", "seconds": 0.0})
        return 127
    stop.watch(child)
    if options.heartbeat:
        Heartbeat(options.heartbeat, bound_s=options.heartbeat_bound).watch(stop.launcher_lost)
    code = child.wait()
    stop.sweep()
    end: dict[str, Any] = {"exit_code": code if code >= 0 else 128 - code, "seconds": round(time.time() - started, 1)}
    if code < 0:
        end["signal"] = -code
    if stop.reason:
        end["reason"] = stop.reason
    end["memory"] = _counters(before, read_memory(group=group))
    if code == 0 and options.deliver and int(os.environ.get("RANK", os.environ.get("PET_NODE_RANK", "0"))) == 0:
        _deliver(out, options.deliver, end)
    _report(end)
    return int(end["exit_code"])


class _Stop:
    """Passes SIGTERM on to the worker's process group, and after a grace time kills what is left of it."""

    def __init__(self, grace: float) -> None:
        self.grace = grace
        self.reason = ""
        self.group = 0
        self.timer: threading.Timer | None = None
        signal.signal(signal.SIGTERM, self._on_signal)
        signal.signal(signal.SIGINT, self._on_signal)

    def watch(self, child: "subprocess.Popen[bytes]") -> None:
        self.group = child.pid
        if self.reason:  # the signal came before the child did
            self._end_group()

    def launcher_lost(self, reason: str) -> None:
        self.reason = reason
        self._end_group()

    def sweep(self) -> None:
        """Children of the worker (data loaders) must not outlive it: they would hold our output open."""
        if self.timer is not None:
            self.timer.cancel()
        self._send(signal.SIGKILL)

    def _on_signal(self, number: int, _frame: object) -> None:
        self.reason = self.reason or f"stopped by {signal.Signals(number).name}"
        self._end_group()

    def _end_group(self) -> None:
        if self.group and self.timer is None:
            self._send(signal.SIGTERM)
            self.timer = threading.Timer(self.grace, self._send, (signal.SIGKILL,))
            self.timer.daemon = True
            self.timer.start()

    def _send(self, number: signal.Signals) -> None:
        if self.group:
            try:
                os.killpg(self.group, number)
            except (ProcessLookupError, PermissionError):  # all gone, or only a zombie left
                return


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kfp_gate.launching.rank")
    parser.add_argument("--work", required=True)
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--deliver", default="")
    parser.add_argument("--heartbeat", default="")
    parser.add_argument("--heartbeat-bound", type=float, default=1800.0)
    parser.add_argument("command", nargs="+")
    return parser.parse_args(arguments)


def _name_checkpoints(spec: Path) -> None:
    """Tell `kfp_gate.training.api`, in a command of the user's own, where checkpoints go."""
    try:
        uri = json.loads(spec.read_text(encoding="utf-8")).get("checkpoint_uri")
    except (OSError, ValueError, AttributeError):
        return  # what does not read it needs none
    if uri and isinstance(uri, str):
        os.environ.setdefault("KFP_GATE_CHECKPOINT_URI", uri)


def _die_with_parent(parent: int) -> None:
    """SIGTERM for us when the launcher dies, however it dies; at once if that happened before we asked."""
    _prctl_death_signal(signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(128 + signal.SIGTERM)


def _kill_with_parent() -> None:
    _prctl_death_signal(signal.SIGKILL)


def _prctl_death_signal(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(number))  # PR_SET_PDEATHSIG


def _counters(before: Memory, after: Memory) -> dict[str, int]:
    names = ("cgroup", "limit", "cgroup_peak", "anon", "file", "shmem", "oom_kills")
    counters = {name: value for name in names if (value := getattr(after, name)) is not None}
    if after.oom_kills is not None and before.oom_kills is not None:
        counters["oom_kills"] = after.oom_kills - before.oom_kills
    return counters


def _deliver(out: Path, uri: str, end: dict[str, Any]) -> None:
    """Put model and record where the launcher finds them."""
    from kfp_gate.errors import KfpGateError
    from kfp_gate.launching.delivery import upload_folder

    try:
        if (out / "training").is_dir():
            upload_folder(out / "training", f"{uri}/training")
        upload_folder(out / "model", f"{uri}/model")
    except KfpGateError as error:
        end["exit_code"] = error.exit_code
        end["error"] = {
            "kind": type(error).__name__, "found": f"the model was trained but could not be delivered: {error.found}",
            "expected": error.expected, "where": error.where, "next_step": error.next_step,
        }  # fmt: skip


def _report(end: dict[str, Any]) -> None:
    line = END_PREFIX + json.dumps(end, ensure_ascii=True)
    # The newline in front ends whatever unfinished line the worker left.
    os.write(1, f"\n{line}\n".encode())
    try:
        # Kubernetes keeps the first 4096 bytes of this file in the pod's status, also when the log is lost.
        if (log := Path("/dev/termination-log")).exists():
            log.write_text(line[:4096])
    except OSError:
        return


if __name__ == "__main__":
    sys.exit(main())
