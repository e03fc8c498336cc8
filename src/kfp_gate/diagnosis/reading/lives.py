"""The lives of workers: what one process wrote between its start and its end, put together to one run.

One file may hold several lives (a worker that was started again in the same folder), and one life may lie in several
files (a folder, storage, a checkpoint), each up to another moment. Lives of the same run follow each other; a place
that several runs share is read for the newest of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Life:
    """The lines of one process.

    Attributes:
        rank: of the process.
        identity: what tells it from other lives of this rank.
        run: the pipeline run; "" if it was not part of one.
        began, ended: seconds since 1970 of the first and the last line that has a time; None if none has.
    """

    rank: int
    identity: tuple[str, ...]
    run: str
    began: float | None
    ended: float | None
    lines: tuple[Line, ...]


def lives_of(rank: int, lines: Sequence[Line]) -> list[Life]:
    """Cut the lines of one file at each start of a process."""
    cuts = [i for i, line in enumerate(lines) if line["kind"] == "start"]
    if not cuts or cuts[0] > 0:
        cuts = [0, *cuts]
    return [_life(rank, lines[a:b]) for a, b in zip(cuts, [*cuts[1:], len(lines)], strict=True) if b > a]


def merge(lives: Iterable[Life]) -> tuple[dict[int, tuple[Line, ...]], list[str]]:
    """Rank to its lines over all lives of one run, and notes on what was left out."""
    kept: dict[tuple[int, tuple[str, ...]], Life] = {}
    for life in lives:
        key = (life.rank, life.identity)
        # The same life from two places: the one that saw more of it.
        if key not in kept or len(life.lines) > len(kept[key].lines):
            kept[key] = life
    ordered = sorted(kept.values(), key=lambda life: life.began or 0.0)
    if not ordered:
        return {}, []
    firsts = [life for life in ordered if life.rank == min(entry.rank for entry in ordered)]
    run = firsts[-1].run
    own = _same_run(ordered, firsts, run)
    notes = []
    others = len({life.run for life in ordered} - {run}) + sum(
        life.run == run and life not in own and life.rank == firsts[-1].rank for life in ordered
    )
    if others:
        notes.append(f"{_count(others, 'other run')} in the same place {'are' if others > 1 else 'is'} left out; "
                     "this is the newest")  # fmt: skip
    ranks: dict[int, tuple[Line, ...]] = {}
    for life in own:
        ranks[life.rank] = (*ranks.get(life.rank, ()), *life.lines)
    attempts = sum(life.rank == firsts[-1].rank for life in own)
    if attempts > 1:
        notes.append(f"{attempts} starts of the worker: times are of the last one, memory and lost work of all")
    notes += _absent(ranks, own, firsts[-1])
    return dict(sorted(ranks.items())), notes


def _same_run(ordered: Sequence[Life], firsts: Sequence[Life], run: str) -> list[Life]:
    """Lives that belong to the newest life of the first rank.

    A pipeline run has a name. Without one, a life that did not resume began a training of its own.
    """
    own = [life for life in ordered if life.run == run]
    if run:
        return own
    mine = [life for life in firsts if life.run == run]
    begin = max((i for i, life in enumerate(mine) if not _resumed(life)), default=0)
    dropped = mine[:begin]
    since = mine[begin].began
    return [
        life for life in own
        if life not in dropped and (since is None or life.ended is None or life.ended >= since)
    ]  # fmt: skip


def _resumed(life: Life) -> bool:
    return any(line["kind"] == "resume" for line in life.lines)


def _absent(ranks: Mapping[int, Sequence[Line]], own: Sequence[Life], last: Life) -> list[str]:
    size = 0
    for line in last.lines:
        value = (line.get("ranks") or {}).get("world_size") if line["kind"] == "start" else None
        if isinstance(value, int) and not isinstance(value, bool):
            size = min(value, 1 << 16)
    missing = [r for r in range(size) if r not in ranks]
    notes = []
    if missing:
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        notes.append(f"no timeline of rank{'s' * (len(missing) > 1)} {shown} of {size}")
    return notes


def _life(rank: int, lines: Sequence[Line]) -> Life:
    first = lines[0]
    times = [t for line in lines if (t := seconds(line)) is not None]
    run = next((line["run"] for line in lines if line.get("run")), "")
    if first["kind"] == "start":
        identity: tuple[str, ...] = (str(first.get("time")), str(first.get("pid")), str(first.get("node")))
    else:
        identity = ("no start", str(first.get("time")), str(first.get("mono")))
    return Life(rank, identity, run, times[0] if times else None, times[-1] if times else None, tuple(lines))


def seconds(line: Line) -> float | None:
    """A line's time in seconds since 1970."""
    try:
        return datetime.fromisoformat(line["time"]).timestamp() if line.get("time") else None
    except (ValueError, OverflowError, TypeError):
        return None


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
