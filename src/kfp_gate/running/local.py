"""A pipeline run on this machine, seen from outside: start it, read its events and progress, know its end.

The run itself is kfp's local runner in a child process (the command line starts it), so that everything it
and the steps print goes to one log file and the terminal shows only what a person needs.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EVENTS_FILE, LOG_FILE = "events.jsonl", "run.log"
PROGRESS_MARK = "KFP_GATE_PROGRESS "

_LAST_LINES = 15

PASSED, BROKEN, BAD_INPUT, REFUSED = 0, 1, 2, 3
"""Exit codes of `run`: registered or passed, broken, bad input, refused by the gate."""

GATES = ("validation_gate", "judge_evaluation")
"""Steps that refuse."""


@dataclass
class RunState:
    """What is known of a run so far.

    Attributes:
        events: last event of each step that started, in order of their start.
        progress: the trainer's last progress line.
        failed: the event of the step that failed, if one did.
    """

    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    failed: dict[str, Any] | None = None

    def result(self, step: str) -> dict[str, Any]:
        """What a step told when it was done; empty if it did not end well, or was taken from the cache."""
        event = self.events.get(step, {})
        result: dict[str, Any] = event.get("result", {}) if event.get("state") == "done" else {}
        return result

    @property
    def exit_code(self) -> int:
        """Exit code of the run once it ended."""
        if self.failed is not None:
            return BAD_INPUT if self.failed.get("exit_code") == BAD_INPUT else BROKEN
        gates = [self.result(step)["passed"] for step in GATES if "passed" in self.result(step)]
        if not gates:
            # A gate that began must say something; a pipeline without one has nothing to refuse.
            return BROKEN if not self.events or any(step in self.events for step in GATES) else PASSED
        return PASSED if all(gates) else REFUSED


Seen = Callable[[RunState], None]


def follow(command: Sequence[str], folder: Path, environment: Mapping[str, str], seen: Seen) -> RunState:
    """Run `command`, log what it prints to `folder/run.log`, and call `seen` whenever something changed.

    The child leads a process group of its own, which is ended when this process is interrupted, so that no
    rank is left behind.
    """
    folder.mkdir(parents=True, exist_ok=True)
    events = folder / EVENTS_FILE
    events.write_text("", encoding="utf-8")
    state, read = RunState(), 0
    environment = {**os.environ, **environment, "KFP_GATE_EVENTS": str(events), "PYTHONUNBUFFERED": "1"}
    with (
        (folder / LOG_FILE).open("w", encoding="utf-8") as log,
        subprocess.Popen(  # our own command line
            [*command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            env=environment, start_new_session=True,
        ) as child,
    ):  # fmt: skip
        assert child.stdout is not None
        try:
            for line in child.stdout:
                log.write(line)
                log.flush()
                changed = _note_progress(state, line)
                read, more = _note_events(state, events, read)
                if changed or more:
                    seen(state)
        except BaseException:
            os.killpg(child.pid, signal.SIGTERM)
            raise
    _note_events(state, events, read)
    if state.failed is None:
        state.failed = _silent_failure(state, (folder / LOG_FILE).read_text(encoding="utf-8"), child.returncode)
    seen(state)
    return state


def code_digest() -> str:
    """16 hexadecimal digits over this library's installed Python files."""
    digest = hashlib.sha256()
    root = Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def python(*arguments: str) -> list[str]:
    """A command that runs this very Python."""
    return [sys.executable, *arguments]


def _silent_failure(state: RunState, log: str, code: int) -> dict[str, Any] | None:
    """What failed without a word of its own: a step that was killed, or that could not even begin."""
    named = re.search(r"Task \S*'([\w-]+)'\S* finished with status \S*FAILURE", log)
    mute = [name for name, event in state.events.items() if event["state"] == "started"]
    if not (named or mute or code):
        return None
    end = (log[: named.start()] if named else log).splitlines()[-_LAST_LINES:]
    message = "it ended without saying why; the last lines of the log before its end:\n" + "\n".join(end)
    step = mute[0] if mute else named[1].replace("-", "_") if named else "the pipeline"
    return {"step": step, "state": "failed", "exit_code": BROKEN, "message": message}


def _note_progress(state: RunState, line: str) -> bool:
    _, mark, text = line.partition(PROGRESS_MARK)
    if not mark:
        return False
    try:
        state.progress = json.loads(text)
    except ValueError:
        return False
    return True


def _note_events(state: RunState, path: Path, position: int) -> tuple[int, bool]:
    with path.open(encoding="utf-8") as handle:
        handle.seek(position)
        lines = handle.readlines()
        end = handle.tell()
    for line in lines:
        event = json.loads(line)
        state.events[event["step"]] = {**state.events.get(event["step"], {}), **event}
        if event["state"] == "failed" and state.failed is None:
            state.failed = event
    return end, bool(lines)
