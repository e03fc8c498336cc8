"""Where the timelines of a run lie, in whatever somebody hands us: files of a folder, keys of a prefix.

    timeline.jsonl, timeline-rank<k>.jsonl            a training folder, or `training/` below a run's folder
    rank<k>/timeline.jsonl                            a worker's folder, also while it runs
    rank-<k>/...                                      a launcher's records: each a worker's folder
    timelines/<token>/rank<k>.jsonl.gz                storage, written while the run goes on
    evidence/timeline-rank<k>.jsonl                   storage, of a run that failed
    steps/<step>/timeline.jsonl.gz                    storage, inside a checkpoint; `checkpoints/` in a worker's folder

All may also be packed (.gz), or lie one folder deeper where the folder of a whole run was given.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DEPTH = 8
"""Folders below the given one that are looked into."""

MOST_ENTRIES = 200_000
"""Files and folders that are looked at before a folder counts as no run's."""

_WORKER = r"(?:training/)?timeline(?:-rank\d+)?|rank\d+/timeline"
_STORE = r"timelines/[^/]+/rank\d+|evidence/timeline-rank\d+|steps/[^/]+/timeline|rank\d+"
TIMELINE = re.compile(rf"(?:rank-\d+/(?:out/)?)?(?:{_WORKER}|(?:checkpoints/)?(?:{_STORE}))\.jsonl(?:\.gz)?")
"""Keys, from the folder or prefix of a run, under which a timeline lies."""

RECORD = re.compile(r"(?:rank-0/(?:out/)?)?(?:(?:training/)?|(?:checkpoints/)?steps/[^/]+/)record\.json")

_RANK = re.compile(r"rank-?(\d+)")
_STEP = re.compile(r"steps/([^/]+)/")

_PRUNED = frozenset({"data", "images", "labels", "best", "config", "upstream", "uploads", "sanity", "model", "weights",
                     ".git", ".venv", "node_modules", "__pycache__"})  # fmt: skip
"""Folders in which no timeline lies, and that may hold a whole data set."""


@dataclass(frozen=True)
class Found:
    """Keys below one place.

    Attributes:
        base: the folder of the run, below the one that was given; "" for itself.
        timelines: keys with `base`.
        record: key of the newest training record; "" for none.
    """

    base: str
    timelines: tuple[str, ...]
    record: str = ""


def rank_of(key: str) -> int | None:
    """The rank that a file name speaks of, the innermost one; None if none."""
    names = _RANK.findall(key)
    return int(names[-1]) if names and len(names[-1]) < 7 else None


def runs_among(keys: Iterable[str]) -> list[Found]:
    """The runs of which these keys hold timelines.

    A folder that is itself a run's has exactly one. Else every folder further down that is a run's is one; checkpoints
    kept inside a run's folder belong to it.
    """
    known = sorted(keys)
    bases: list[str] = []
    for base in sorted({b for key in known for b in _bases(key)}, key=lambda b: (b.count("/"), b)):
        if not any(base.startswith(above) for above in bases):
            bases.append(base)
    return [_found(base, known) for base in bases]


def folder_keys(folder: Path) -> Iterator[str]:
    """Keys of the files below a folder that may be timelines or records, without those of data sets and models."""
    root, seen = str(folder), 0
    for place, folders, files in os.walk(root):
        inside = os.path.relpath(place, root)
        depth = 0 if inside == "." else inside.count(os.sep) + 1
        folders[:] = sorted(f for f in folders if f not in _PRUNED) if depth < DEPTH else []
        seen += len(folders) + len(files)
        if seen > MOST_ENTRIES:
            return
        for name in sorted(files):
            if name.endswith((".jsonl", ".jsonl.gz")) or name == "record.json":
                yield name if inside == "." else f"{Path(inside).as_posix()}/{name}"


def _bases(key: str) -> Iterator[str]:
    """Prefixes after which the rest of a key is a timeline's; the outermost first."""
    parts = key.split("/")
    for count in range(len(parts)):
        if TIMELINE.fullmatch("/".join(parts[count:])):
            yield "".join(f"{p}/" for p in parts[:count])
            return


def _found(base: str, keys: list[str]) -> Found:
    inside = [k for k in keys if k.startswith(base)]
    timelines = [k for k in inside if TIMELINE.fullmatch(k[len(base) :])]
    records = [k for k in inside if RECORD.fullmatch(k[len(base) :])]
    # One beside the training, else that of the newest checkpoint.
    records.sort(key=lambda k: (_STEP.search(k) is not None, [-ord(c) for c in k]))
    return Found(base, tuple(_without_old_steps(timelines)), records[0] if records else "")


def _without_old_steps(keys: list[str]) -> list[str]:
    """Checkpoints repeat the timeline so far: the newest of each start of the worker says all."""
    steps = [k for k in keys if _STEP.search(k)]
    newest: dict[str, str] = {}
    for key in sorted(steps):
        name = _STEP.search(key)
        newest[name[1].rpartition("-")[2] if name else ""] = key
    return [k for k in keys if k not in steps or k in newest.values()]


def by_rank(lines: Mapping[int, int], fallback: int | None) -> int:
    """The rank of a file: what most of its lines say, else its name, else 0."""
    if lines:
        return max(lines, key=lambda rank: (lines[rank], -rank))
    return fallback or 0
