"""The kept record of a hunt: what was seen, what was thought, what was changed, and what came of it.

One JSON object a line, added and never rewritten, so that `git merge` with the `union` driver (in .gitattributes:
`*.jsonl merge=union`) is always right and a diff shows what is new:

    {"schema_version": 1, "at": "2026-01-02T03:04:05+00:00", "kind": "comparison", "runs": [...], "symptom": ...,
     "hypothesis": ..., "change": ..., "conditions": {...}, "result": ..., "rejected": [...], "numbers": {...}}

A line is written in one piece under a lock, and forced to the disk. Texts are kept as they are but for secrets and
length, and shown inert: `markdown` escapes what would be markup, links or terminal control.
"""

import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from typing import Any

from kfp_gate.diagnosis.comparing.comparable import show
from kfp_gate.diagnosis.comparing.compare import Comparison
from kfp_gate.diagnosis.findings import Diagnosis
from kfp_gate.errors import InvalidInput, Problem, hide_secrets

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
KINDS = ("diagnosis", "comparison")
LONGEST_TEXT = 4000
"""Characters of one text."""

_MARKUP = re.compile(r"[\\`*\[\]<&|~$]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.")
"""What Markdown would take for more than text; a line never begins with a text, and an address is no link."""

_DIGEST = re.compile(r"[0-9a-f]{40,}")
_KEPT = ("train_data", "val_data", "batch", "ranks", "workers", "precision", "image_size", "device", "gpu_name", "cpus",
         "cpu_quota", "base_model", "seed", "epochs", "stop_on")  # fmt: skip
"""Conditions that a note holds."""


@dataclass(frozen=True)
class Note:
    """One entry.

    Attributes:
        at: when it was written, ISO with a time zone.
        kind: one of `KINDS`.
        runs: as the user named them; before and after for a comparison.
        symptom: what was seen.
        hypothesis: what was held for the cause.
        change: what was changed.
        conditions: under which the runs ran; what differs between two is "before -> after".
        result: what came of the change; empty if nothing was changed yet.
        rejected: paths that led nowhere, and why.
        numbers: for programs: seconds of a step and an epoch, ratios with their intervals.
    """

    at: str
    kind: str
    runs: tuple[str, ...]
    symptom: str
    hypothesis: str = ""
    change: str = ""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    result: str = ""
    rejected: tuple[str, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def add_note(
    path: Path, subject: Diagnosis | Comparison, *, symptom: str = "", hypothesis: str = "", change: str = "",
    rejected: Sequence[str] = (), now: datetime | None = None,
) -> Note:  # fmt: skip
    """Add an entry to a record, which is made if it does not exist. Safe while others add to it.

    Args:
        path: the record.
        subject: what was found.
        symptom: what was seen; empty: as the diagnosis or comparison says.
        hypothesis: what is held for the cause; empty: the first finding of a diagnosis.
        change: what was changed.
        rejected: paths that led nowhere, and why.
        now: when; with a time zone.

    Raises:
        InvalidInput: the file is no such record, or cannot be written.
    """
    at = (now or datetime.now().astimezone()).isoformat(timespec="seconds")
    made = _of_diagnosis(subject) if isinstance(subject, Diagnosis) else _of_comparison(subject)
    made |= {k: v for k, v in {"symptom": symptom, "hypothesis": hypothesis, "change": change}.items() if v}
    note = Note(at, rejected=tuple(_text(r) for r in rejected if r), **{k: _clean(v) for k, v in made.items()})
    line = json.dumps({"schema_version": SCHEMA_VERSION, **asdict(note)}, ensure_ascii=False, default=str)
    _append(path, line.encode("utf-8", "replace"))
    return note


def read_notes(path: Path) -> tuple[Note, ...]:
    """All entries, as they were added. A last line that was cut while it was written is left out.

    Raises:
        InvalidInput: the file cannot be read, or lines are no entries, such as those of an unfinished merge.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unusable(path, f"unreadable ({type(error).__name__})") from None
    lines = content.split(b"\n")
    cut = lines.pop()
    notes, problems = [], []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = _parse(line)
            if isinstance(found, Note):
                notes.append(found)
            else:
                problems.append(Problem(f"line {number}", found))
    if cut.strip():
        found = _parse(cut)
        if isinstance(found, Note):
            notes.append(found)
        else:
            log.warning("the last line of %s was cut and is left out", path)
    if problems:
        raise InvalidInput(
            f"{len(problems)} line{'s' * (len(problems) != 1)} that are no entries",
            expected="one JSON object a line, as kfp-gate diagnose --record writes them", where=str(path),
            next_step="finish the merge, or take these lines out", problems=problems,
        )  # fmt: skip
    return tuple(notes)


def markdown(notes: Sequence[Note]) -> str:
    """The record for people, the oldest entry first."""
    blocks = ["# What was tried"]
    for note in notes:
        rows = [
            ("Runs" if len(note.runs) > 1 else "Run", " -> ".join(note.runs)), ("Hypothesis", note.hypothesis),
            ("Change", note.change),
            ("Conditions", ", ".join(f"{k} {_condition(v)}" for k, v in note.conditions.items() if v != "")),
            ("Result", note.result),
        ]  # fmt: skip
        blocks.append(f"## {_inert(note.at[:16].replace('T', ' '))}: {_inert(note.symptom) or 'no symptom'}")
        lines = [f"- {name}: {_inert(text)}" for name, text in rows if text]
        blocks.append("\n".join([*lines, *(f"- Rejected: {_inert(r)}" for r in note.rejected)]))
    return "\n\n".join(blocks) + "\n"


def _of_diagnosis(found: Diagnosis) -> dict[str, Any]:
    first = found.findings[0] if found.findings else None
    return {
        "kind": "diagnosis", "runs": (found.where,), "symptom": found.answer,
        "hypothesis": first.title if first is not None else "",
        "conditions": {k: found.conditions[k] for k in _KEPT if found.conditions.get(k) is not None},
        "numbers": {"epoch_s": found.epoch_s, "state": found.state, "cause": first.cause if first else None,
                    "weight": first.weight if first else None},
    }  # fmt: skip


def _of_comparison(found: Comparison) -> dict[str, Any]:
    step = next((c for c in found.changes if c.what == "step"), None)
    phases = [c for c in found.changes if c.what.startswith("phase ")]
    seen = ""
    if step is not None:
        heaviest = max(phases, key=lambda c: c.before, default=None)
        most = f", of it {1000 * heaviest.before:.3g} ms {heaviest.what[6:]}" if heaviest is not None else ""
        seen = f"a step takes {1000 * step.before:.3g} ms{most}"
    differing = {d.name: f"{show(d.before)} -> {show(d.after)}" for d in found.differences}
    return {
        "kind": "comparison", "runs": (found.before, found.after), "symptom": seen,
        "conditions": {k: found.conditions[k] for k in _KEPT if k in found.conditions} | differing,
        "result": found.answer,
        "numbers": {c.what: {"before": c.before, "after": c.after, "ratio": c.ratio, "low": c.low, "high": c.high}
                    for c in found.changes if c.what in ("step", "images a second", "validation, an epoch")}
        | {"outputs": found.outputs.state},
    }  # fmt: skip


def _append(path: Path, line: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        raise _unusable(path, f"cannot be written ({type(error).__name__})") from None
    try:
        with suppress(OSError, ImportError):
            # A file system without locks still appends in one piece.
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX)
        size = os.fstat(handle).st_size
        head = os.pread(handle, 1 << 20, 0).split(b"\n", 1)[0] if size else b""
        if head.strip() and b"schema_version" not in head:
            raise _unusable(path, "a file that is no such record")
        # A line that was cut by the end of its writer must not swallow this one.
        ended = not size or os.pread(handle, 1, size - 1) == b"\n"
        data = (b"" if ended else b"\n") + line + b"\n"
        written = os.write(handle, data)
        if written < len(data):
            os.write(handle, data[written:])
        os.fsync(handle)
    except OSError as error:
        raise _unusable(path, f"cannot be written ({type(error).__name__})") from None
    finally:
        os.close(handle)


def _parse(line: bytes) -> Note | str:
    try:
        values = json.loads(line)
    except ValueError:
        return repr(line[:60].decode("utf-8", "replace"))
    if not isinstance(values, dict) or values.get("kind") not in KINDS or not isinstance(values.get("runs"), list):
        return f"no entry: {line[:60].decode('utf-8', 'replace')!r}"
    if values.get("schema_version") != SCHEMA_VERSION:
        return f"schema_version {values.get('schema_version')!r}: this version reads {SCHEMA_VERSION}"
    known = {f.name for f in fields(Note)}
    kept = {k: v for k, v in values.items() if k in known}
    texts = {k: str(kept.get(k) or "") for k in ("at", "symptom", "hypothesis", "change", "result")}
    lists = {k: tuple(str(v) for v in kept.get(k) or ()) for k in ("runs", "rejected")}
    maps = {k: kept[k] if isinstance(kept.get(k), dict) else {} for k in ("conditions", "numbers")}
    return Note(**{**kept, **texts, **lists, **maps})


def _unusable(path: Path, found: str) -> InvalidInput:
    return InvalidInput(
        found, expected="a record of kfp-gate diagnose, or a file that does not exist yet", where=str(path),
        next_step="name another file with --record, one whose folder may be written",
    )  # fmt: skip


def _clean(value: Any) -> Any:
    """Without secrets, at all depths, and not longer than a note should be."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return {_text(str(k)): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_clean(v) for v in value)
    return value


def _text(text: str) -> str:
    text = hide_secrets(text)
    return text if len(text) <= LONGEST_TEXT else text[: LONGEST_TEXT - 3] + "..."


def _condition(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:12]}..." if _DIGEST.fullmatch(value) else value
    return show(value)


def _inert(text: str) -> str:
    """One line of Markdown that shows the text and does nothing else."""
    shown = "".join(c if c.isprintable() else " " if c.isspace() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return _MARKUP.sub(r"\\\g<0>", shown.strip())
