"""What a rank did when, as a ribbon of few colours, and the events of a run as numbered marks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kfp_gate.diagnosis.amounts import duration
from kfp_gate.diagnosis.pages.time_axis import WIDTH, TimeAxis, moment
from kfp_gate.diagnosis.reading.runs import Line, Run
from kfp_gate.diagnosis.reading.shapes import number

CELLS = 500
"""Cells of a ribbon; each takes the colour of what filled most of it."""

DOINGS = {
    "warmup": "warm-up",
    "train": "train",
    "prepared": "steps on prepared input",
    "profiled": "profiled steps",
    "validate": "validate",
    "checkpoint": "stand still for a checkpoint",
    "sanity": "sanity pass",
}
MOST_MARKS = 9


@dataclass(frozen=True)
class Piece:
    """A stretch of a ribbon, in units of the axis; `doing` is a key of `DOINGS`."""

    start: float
    width: float
    doing: str


@dataclass(frozen=True)
class Mark:
    """An event: its place, a short sign, one line, and whether it is bad news."""

    at: float
    sign: str
    text: str
    bad: bool


def ribbon(run: Run, rank: int, axis: TimeAxis) -> list[Piece]:
    """The doings of a rank, without the time of which the timeline says nothing."""
    cell = WIDTH / CELLS
    filled: list[dict[str, float]] = [{} for _ in range(CELLS)]
    for start, end, doing in _spans(run, rank):
        a, b = axis.at(start), axis.at(end)
        for i in range(int(a / cell), min(int(b / cell), CELLS - 1) + 1):
            inside = min(b, (i + 1) * cell) - max(a, i * cell)
            if inside > 0:
                filled[i][doing] = filled[i].get(doing, 0.0) + inside
    pieces: list[Piece] = []
    for i, doings in enumerate(filled):
        if not doings or sum(doings.values()) < 0.2 * cell:
            continue
        most = max(doings, key=lambda d: doings[d])
        last = pieces[-1] if pieces else None
        if last is not None and last.doing == most and abs(last.start + last.width - i * cell) < 1e-6:
            pieces[-1] = Piece(last.start, last.width + cell, most)
        else:
            pieces.append(Piece(i * cell, cell, most))
    return pieces


def _spans(run: Run, rank: int) -> Iterator[tuple[float, float, str]]:
    """(from, to, doing). Windows tell of steps; where they tell less than half, as in short epochs, epochs' sums do."""
    lines = run.ranks.get(rank, ())
    own = {line.get("kind") for line in lines}
    told = 0.0
    for line in lines:
        end, kind = moment(line), line.get("kind")
        if end is None:
            continue
        if kind == "window":
            seconds = _sum(line.get("seconds"))
            told += seconds
            yield end - seconds, end, _steps(line)
        elif kind in ("validation", "checkpoint", "sanity"):
            lasted = number(line.get("seconds"))
            if lasted:
                yield end - lasted, end, "validate" if kind == "validation" else str(kind)
        elif kind == "phases" and isinstance(line.get("seconds"), Mapping):
            # An epoch: its steps first, then validation, then the checkpoint.
            whole, parts = _sum(line["seconds"]), line["seconds"]
            checkpoint, validation = (number(parts.get(p)) or 0.0 for p in ("checkpoint", "validation"))
            steps = whole - checkpoint - validation - (number(parts.get("other")) or 0.0)
            if told < 0.5 * steps:
                yield end - checkpoint - validation - steps, end - checkpoint - validation, "train"
            if "validation" not in own:
                yield end - checkpoint - validation, end - checkpoint, "validate"
            if "checkpoint" not in own:
                yield end - checkpoint, end, "checkpoint"
            told = 0.0


def _steps(line: Line) -> str:
    if line.get("input") == "prepared":
        return "prepared"
    if line.get("profiled"):
        return "profiled"
    return "warmup" if line.get("warmup") else "train"


def _sum(seconds: object) -> float:
    return sum(number(s) or 0.0 for s in seconds.values()) if isinstance(seconds, Mapping) else 0.0


def marks(run: Run, axis: TimeAxis) -> tuple[list[Mark], int]:
    """Recoveries, resumes, stops and failures of all ranks in order, and how many more there are."""
    found: list[tuple[float, str, bool]] = []
    for rank, lines in sorted(run.ranks.items()):
        for line in lines:
            at, kind = moment(line), line.get("kind")
            who = f"rank {rank}: " if len(run.ranks) > 1 else ""
            if at is None or (kind in ("recover", "resume", "stop") and rank != min(run.ranks)):
                continue  # what all ranks do together is said once
            if kind == "recover":
                found.append((at, f"the epoch is done again: {line.get('reason', 'no reason given')}", True))
            elif kind == "resume":
                found.append((at, f"resumed{_of_epoch(line)}", False))
            elif kind == "stop":
                found.append((at, f"stopped: {line.get('reason', 'no reason given')}", False))
            elif kind == "failure":
                said = line.get("message", line.get("error", "no message"))
                found.append((at, f"{who}failed: {str(said)[:200]}", True))
            elif kind == "growth":
                found.append((at, f"{who}{str(line.get('text', 'memory grows'))[:200]}", True))
    found.sort()
    shown = [
        Mark(axis.at(at), str(i), f"{duration(at - axis.start)} after the start: {text}", bad)
        for i, (at, text, bad) in enumerate(found[:MOST_MARKS], 1)
    ]
    return shown, len(found) - len(shown)


def _of_epoch(line: Line) -> str:
    epoch = number(line.get("epoch"))
    return "" if epoch is None else f" at epoch {epoch:.0f}"
