"""A run as its ranks recorded it: the lines of their timelines, and the training record if it was kept."""

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from kfp_gate.diagnosis.reading import places
from kfp_gate.diagnosis.reading.lines import read_lines
from kfp_gate.diagnosis.reading.lives import Life, lives_of, merge
from kfp_gate.diagnosis.reading.shapes import KINDS
from kfp_gate.diagnosis.reading.tokens import of_newest_run
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import LocalStore, Store, local_path, open_store, path_within

Line = Mapping[str, Any]

_MLFLOW_ID = re.compile(r"(?:runs:/+)?([0-9a-f]{32})/?")
_RUNS = "runs:/"
LARGEST_RECORD = 64 << 20
PATIENCE_S = 20.0
"""How long a tracking server may take to answer at all: somebody waits for this."""
LISTED = 8


@dataclass(frozen=True)
class Run:
    """What is known of one training.

    Attributes:
        where: as the user named it.
        ranks: rank to its lines, in the order in which they were written. Lines of earlier attempts come first.
        record: record.json of rank 0; empty if it was not kept.
        notes: what a reader of the answer should know about the reading: lines that were left out, other runs that
            lie in the same place, ranks of which nothing was found.
    """

    where: str
    ranks: Mapping[int, Sequence[Line]]
    record: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kept: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What was computed from this run, for those who need it again."""

    def lines(self, kind: str, rank: int = 0) -> Iterator[Line]:
        """The lines of one kind of one rank."""
        return (line for line in self.ranks.get(rank, ()) if line.get("kind") == kind)

    def last_attempt(self, rank: int = 0) -> Sequence[Line]:
        """The lines of a rank since its worker was last started."""
        lines = self.ranks.get(rank, ())
        starts = [i for i, line in enumerate(lines) if line.get("kind") == "start"]
        return lines[starts[-1] :] if starts else lines

    @property
    def running(self) -> bool:
        """Whether rank 0 has neither stopped training nor failed."""
        return not {line.get("kind") for line in self.last_attempt(0)} & {"stop", "end", "failure"}

    @property
    def conditions(self) -> Line:
        """What rank 0 ran under; empty if its timeline does not say."""
        return next(iter(reversed(list(self.lines("conditions")))), {})


def one_source(record: str, run_uri: str) -> str:
    """The one place to read, of the two in which a step may be handed it.

    Raises:
        InvalidInput: neither, or both.
    """
    if bool(record) == bool(run_uri.strip()):
        raise InvalidInput(
            "a record and a run_uri" if record else "neither a record nor a run_uri", expected="exactly one of them",
            where="parameters of diagnose_training",
            next_step="connect the output `record` of launch_training, or name a run in run_uri",
        )  # fmt: skip
    return record or run_uri.strip()


def read_run(where: str, scratch: Path, *, tracking_uri: str = "") -> Run:
    """Read a run, also while it goes on.

    Args:
        where: a run's folder, its training folder, a worker's folder, a launcher's records, one timeline (.jsonl or
            .jsonl.gz), a checkpoint location (path or s3://), or an MLflow run (`runs:/ID`, or the ID's 32 digits).
        scratch: a folder for what has to be fetched.
        tracking_uri: for an MLflow run; empty: the environment's.

    Raises:
        InvalidInput: nothing there, no timeline in it, or several runs; an address that may not be asked.
        Unavailable: the store or the server does not answer.
    """
    where = where.strip()
    match = _MLFLOW_ID.fullmatch(where)
    if where.startswith(_RUNS) or (match is not None and not local_path(where).exists()):
        if match is None:
            raise InvalidInput(
                f"MLflow run {where!r}", expected="runs:/ and the 32 hexadecimal digits of a run", where="run",
                next_step="copy the run's ID from its page in MLflow",
            )  # fmt: skip
        return _read_mlflow(match[1], where, scratch, tracking_uri)
    if not where:
        raise InvalidInput(
            "an empty location", expected=_PLACES, where="run", next_step="name the run to read",
        )  # fmt: skip
    store, named = open_store(where), False
    if isinstance(store, LocalStore):
        if store.root.is_file():
            return _read_file(where, store.root)
        if not store.root.is_dir():
            raise _nothing(where)
        keys = list(places.folder_keys(store.root))
    else:
        keys = [e.key for e in store.list() if e.key.endswith((".jsonl", ".jsonl.gz", "record.json"))]
        if not keys and "." in where.rpartition("/")[2]:
            base, _, last = where.rpartition("/")
            store, keys, named = open_store(base), [last], True
    found = places.runs_among(keys)
    if not found and named and keys[0].endswith((".jsonl", ".jsonl.gz")):
        # A timeline under a name of its own, as a file may have one.
        found = [places.Found("", tuple(keys))]
    if not found:
        raise InvalidInput(
            "no timeline", expected=_PLACES, where=where,
            next_step="give the folder or prefix of one training; one that failed in a pipeline left its timelines at "
            "its checkpoint location, and a run made before timelines were kept has none",
        )  # fmt: skip
    if len(found) > 1:
        names = ", ".join(f.base.rstrip("/") for f in found[:LISTED])
        more = f" and {len(found) - LISTED} more" if len(found) > LISTED else ""
        raise InvalidInput(
            f"{len(found)} runs: {names}{more}", expected="one run", where=where, next_step="name one of these folders",
        )  # fmt: skip
    return _read_keys(where, store, found[0], scratch)


_PLACES = (
    "a run's folder, a training folder, a timeline (.jsonl or .jsonl.gz), a checkpoint location, or an MLflow run "
    "(runs:/ID)"
)


def _nothing(where: str) -> InvalidInput:
    return InvalidInput(
        "nothing there", expected=_PLACES, where=where, next_step="check the spelling, and that it is mounted here",
    )  # fmt: skip


def _read_file(where: str, path: Path) -> Run:
    if path.name == "record.json":
        return replace(read_run(str(path.parent), path.parent), where=where)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        raise InvalidInput(
            f"the file {path.name}", expected=_PLACES, where=where,
            next_step="give the training's folder; of a model folder, the run that made it",
        )  # fmt: skip
    record = path.parent / "record.json"
    return _assemble(where, [(path.name, path)], _record(record))


def _read_keys(where: str, store: Store, found: places.Found, scratch: Path) -> Run:
    files = [(key, _local(store, key, scratch)) for key in of_newest_run(store, found.timelines)]
    return _assemble(where, files, _record(_local(store, found.record, scratch)) if found.record else {})


def _local(store: Store, key: str, scratch: Path) -> Path:
    if isinstance(store, LocalStore):
        return store.root / key
    path = path_within(scratch, key, store.uri)
    store.download(key, path)
    return path


def _read_mlflow(run_id: str, where: str, scratch: Path, tracking_uri: str) -> Run:
    from kfp_gate.registry.artifacts import get_run_file
    from kfp_gate.registry.fetch import connect_for_reading

    tracking = connect_for_reading(tracking_uri, PATIENCE_S)
    run = tracking.attempt("reading the run", "RESOURCE_DOES_NOT_EXIST", tracking.client.get_run, run_id)
    if run is None:
        raise InvalidInput(
            f"no run {run_id}", expected="an MLflow run of a training", where=tracking.where,
            next_step="check the ID, and that tracking_uri names the server it is on",
        )  # fmt: skip
    keys = _mlflow_files(tracking, run)
    found = places.runs_among(keys)
    if not found:
        raise InvalidInput(
            "an MLflow run without a timeline", expected="a run of launch_training, which keeps training/timeline-*",
            where=f"{tracking.where}, run {run_id}",
            next_step="name the training's run, not the pipeline's or the gate's, or read its checkpoint location",
        )  # fmt: skip
    folder = Path(mkdtemp(dir=_made(scratch), prefix="mlflow-"))
    wanted = [*found[0].timelines, *([found[0].record] if found[0].record else [])]
    for key in wanted:
        path_within(folder, key, where)
    paths = {key: get_run_file(tracking, run_id, key, folder) for key in wanted}
    record = _record(paths[found[0].record]) if found[0].record else {}
    return _assemble(where, [(key, paths[key]) for key in found[0].timelines], record)


def _mlflow_files(tracking: Any, run: Any) -> list[str]:
    """Artifacts of a run in the folders in which a training keeps its timelines."""
    location = str(run.info.artifact_uri)
    if location.startswith("s3://"):
        return [e.key for e in open_store(location).list() if e.key.endswith((".jsonl", ".jsonl.gz", "record.json"))]
    entries = tracking.call("listing the run's files", tracking.client.list_artifacts, run.info.run_id, "training")
    return [str(e.path) for e in entries if not e.is_dir]


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _record(path: Path) -> Mapping[str, Any]:
    """The training record, if it is there and is one: a timeline says enough without it."""
    try:
        if path.stat().st_size > LARGEST_RECORD:
            return {}
        value = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _assemble(where: str, files: Sequence[tuple[str, Path]], record: Mapping[str, Any]) -> Run:
    found: list[Life] = []
    dropped, cut, known = 0, [], False
    for key, path in files:
        read = read_lines(path, f"{where}: {key}" if len(files) > 1 else where)
        dropped += read.dropped
        cut += [key] if read.cut else []
        known = known or any(line["kind"] in KINDS for line in read.lines)
        ranks = Counter(line["rank"] for line in read.lines if line.get("rank") is not None)
        found += lives_of(places.by_rank(ranks, places.rank_of(key)), read.lines)
    if not known:
        raise InvalidInput(
            f"{'files' if len(files) > 1 else 'a file'} without a line of a timeline", expected=_PLACES, where=where,
            next_step="give the timeline as the worker wrote it: JSON lines with a `kind`; if it was cut while it was "
            "packed, take the one of another place, such as the checkpoint location",
        )  # fmt: skip
    ranks_lines, notes = merge(found)
    if dropped:
        notes.append(f"{dropped} line{'s' * (dropped > 1)} that are no timeline's were left out")
    if cut and not _goes_on(ranks_lines):
        notes.append(f"the end of {', '.join(cut[:LISTED])} is cut")
    return Run(where, ranks_lines, record, tuple(notes))


def _goes_on(ranks: Mapping[int, Sequence[Line]]) -> bool:
    """While a run goes on, its file may well end in half a line."""
    return Run("", ranks).running
