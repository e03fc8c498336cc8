"""Runs read from wherever they lie: folders, files, storage, MLflow; and what is said where there is none."""

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import s3, s3_server  # noqa: F401 - fixtures

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.reading.lines import LONGEST_LINE, parse, read_lines
from kfp_gate.diagnosis.reading.runs import one_source, read_run
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import open_store

from .simulated import Training, write

TRAINING = Training(steps=20, epochs=2)


@pytest.fixture(scope="module")
def worker(tmp_path_factory) -> Path:
    """A worker's folder with two ranks."""
    return write(TRAINING.but(ranks=2), tmp_path_factory.mktemp("worker") / "out")


def counts(run):
    return {rank: len(lines) for rank, lines in run.ranks.items()}


def pack(source: Path, target: Path, *, lines: int | None = None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    kept = source.read_bytes().splitlines(keepends=True)[:lines]
    target.write_bytes(gzip.compress(b"".join(kept)))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def layouts(worker: Path, home: Path) -> dict[str, str]:
    """Everything that may be named, with the same lines in it."""
    first, second = worker / "rank0/timeline.jsonl", worker / "rank1/timeline.jsonl"
    record = json.dumps({"schema_version": 1, "epochs": [], "ranks": 2, "device": "cpu"})
    copy(first, home / "run/training/timeline.jsonl")
    copy(second, home / "run/training/timeline-rank1.jsonl")
    (home / "run/training/record.json").write_text(record)
    shutil.copytree(worker, home / "worker")
    copy(first, home / "records/rank-0/training/timeline.jsonl")
    copy(first, home / "records/rank-0/rank0/timeline.jsonl")
    copy(second, home / "records/rank-1/rank1/timeline.jsonl")
    copy(first, home / "started/rank-0/out/rank0/timeline.jsonl")
    copy(second, home / "started/rank-1/out/rank1/timeline.jsonl")
    pack(first, home / "store/timelines/ab12cd/rank0.jsonl.gz")
    pack(second, home / "store/timelines/ab12cd/rank1.jsonl.gz")
    pack(first, home / "store/steps/000002-ab12cd/timeline.jsonl.gz", lines=20)
    (home / "store/steps/000002-ab12cd/record.json").write_text(record)
    copy(first, home / "failed/evidence/timeline-rank0.jsonl")
    copy(second, home / "failed/evidence/timeline-rank1.jsonl")
    pack(second, home / "failed/timelines/ab12cd/rank1.jsonl.gz", lines=5)
    shutil.copytree(home / "run", home / "deeper/some/where/run")
    (home / "deeper/data/images").mkdir(parents=True)
    return {
        "a run's folder": str(home / "run"),
        "a training folder": str(home / "run/training"),
        "its record": str(home / "run/training/record.json"),
        "a worker's folder": str(home / "worker"),
        "a launcher's records": str(home / "records"),
        "a launcher's work": str(home / "started"),
        "a checkpoint location": str(home / "store"),
        "a run's token": str(home / "store/timelines/ab12cd"),
        "a failed run's": str(home / "failed"),
        "its evidence": str(home / "failed/evidence"),
        "a folder above": str(home / "deeper"),
        "a file URI": (home / "run").as_uri(),
    }


def test_every_layout_gives_the_same_run(worker, tmp_path):
    wanted = counts(read_run(str(worker), tmp_path))
    assert set(wanted) == {0, 1}
    for name, where in layouts(worker, tmp_path / "홈 50%").items():
        run = read_run(where, tmp_path / "scratch")
        assert counts(run) == wanted, name
        assert run.notes == () and not run.running and run.conditions["steps_per_epoch"] == 20
    assert read_run(str(tmp_path / "홈 50%/run"), tmp_path).record["ranks"] == 2


def test_single_files_plain_and_packed(worker, tmp_path):
    path = worker / "rank1/timeline.jsonl"
    pack(path, tmp_path / "some name.jsonl.gz")
    for where in (path, tmp_path / "some name.jsonl.gz"):
        run = read_run(str(where), tmp_path)
        assert list(run.ranks) == [1]
        # Rank 1 alone is read as far as it goes, and it is said that rank 0 is not there.
        assert run.notes == ("no timeline of rank 0 of 2",)
        diagnose(run)


def test_storage_and_the_older_checkpoint_alone(worker, tmp_path):
    for count, step in ((10, "000001-ab12cd"), (30, "000002-ab12cd")):
        pack(worker / "rank0/timeline.jsonl", tmp_path / f"s/steps/{step}/timeline.jsonl.gz", lines=count)
    run = read_run(str(tmp_path / "s"), tmp_path)
    assert counts(run) == {0: 30} and run.running


def test_a_place_that_runs_share_is_read_for_the_newest(worker, tmp_path):
    """Two runs of their own, and one that was started again and resumed."""
    first = write(TRAINING, tmp_path / "a") / "rank0/timeline.jsonl"
    later = [json.loads(line) for line in first.read_text().splitlines()]
    for line in later:
        line["time"] = line["time"].replace("T09", "T11")
    second = tmp_path / "b.jsonl"
    second.write_text("".join(json.dumps(line) + "\n" for line in later))
    pack(first, tmp_path / "s/timelines/zz/rank0.jsonl.gz")
    pack(second, tmp_path / "s/timelines/aa/rank0.jsonl.gz")
    run = read_run(str(tmp_path / "s"), tmp_path)
    assert counts(run) == {0: len(later)} and run.ranks[0][0]["time"].startswith("2026-11-30T11")
    assert run.notes == ("1 other run in the same place is left out; this is the newest",)
    older = read_run(str(tmp_path / "s/timelines/zz"), tmp_path)
    assert older.ranks[0][0]["time"].startswith("2026-11-30T09")
    later.insert(2, {**later[1], "kind": "resume", "epoch": 1})
    second.write_text("".join(json.dumps(line) + "\n" for line in later))
    pack(second, tmp_path / "s/timelines/aa/rank0.jsonl.gz")
    run = read_run(str(tmp_path / "s"), tmp_path)
    assert counts(run) == {0: 2 * len(later) - 1} and len(run.last_attempt()) == len(later)
    assert run.notes == ("2 starts of the worker: times are of the last one, memory and lost work of all",)


def test_a_file_that_was_packed_piece_by_piece(worker, tmp_path):
    """As a rank sends it while it trains; the last piece may be cut."""
    lines = (worker / "rank0/timeline.jsonl").read_bytes().splitlines(keepends=True)
    pieces = [gzip.compress(b"".join(lines[i : i + 10])) for i in range(0, len(lines), 10)]
    path = tmp_path / "rank0.jsonl.gz"
    path.write_bytes(b"".join(pieces))
    assert counts(read_run(str(path), tmp_path)) == {0: len(lines)}
    path.write_bytes(b"".join(pieces[:3]) + pieces[3][:20])
    assert 30 <= counts(read_run(str(path), tmp_path))[0] < 40


def test_a_place_of_many_runs_is_not_fetched_whole(worker, tmp_path, monkeypatch):
    """Nine starts for three pipeline runs, and as many without a name: what is read is the newest run's."""
    from kfp_gate.storage import LocalStore

    lines = [json.loads(line) for line in (worker / "rank0/timeline.jsonl").read_text().splitlines()]
    for named in (True, False):
        root = tmp_path / f"named {named}"
        for number in range(9):
            run = f"pipeline-{number // 3}" if named else ""
            kept = [{**line, "run": run, "time": line["time"].replace("T09", f"T{10 + number}")} for line in lines]
            kept.insert(2, {**kept[1], "kind": "resume", "epoch": 1})
            path = root / f"timelines/{9 - number:06x}/rank0.jsonl.gz"
            path.parent.mkdir(parents=True)
            path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in kept).encode()))
        fetched = []

        class Counted(LocalStore):
            def download(self, key, path, fetched=fetched):
                fetched.append(key)
                super().download(key, path)

        monkeypatch.setattr(
            "kfp_gate.diagnosis.reading.runs.open_store", lambda _uri, root=root: _Remote(Counted(root))
        )
        run = read_run("s3://bucket/prefix", tmp_path / f"scratch {named}")
        assert len(fetched) == (3 if named else 4)
        assert len(run.ranks[0]) == len(fetched) * (len(lines) + 1)
        assert run.ranks[0][-1]["time"].startswith("2026-11-30T18")


class _Remote:
    """A store whose files are not on this machine."""

    def __init__(self, store):
        self.store, self.uri = store, "s3://bucket/prefix"

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_runs_of_one_pipeline_run_follow_each_other(tmp_path):
    path = write(TRAINING, tmp_path / "a") / "rank0/timeline.jsonl"
    lines = [json.loads(line) | {"run": "pipeline-1"} for line in path.read_text().splitlines()]
    again = [line | {"time": line["time"].replace("T09", "T10")} for line in lines]
    path.write_text("".join(json.dumps(line) + "\n" for line in (*lines[:30], *again)))
    run = read_run(str(path), tmp_path)
    assert counts(run) == {0: 30 + len(again)}
    # All of the first start was done again from the beginning.
    found = diagnose(run)
    lost = next(f for f in (*found.findings, *found.minor) if f.cause == "discarded_work")
    assert lost.detail["starts"] == 2 and lost.weight > 0.2


def test_a_run_that_goes_on_ends_in_half_a_line(worker, tmp_path):
    raw = (worker / "rank0/timeline.jsonl").read_bytes()
    at = raw.index(b'"kind": "stop"')
    half = tmp_path / "half.jsonl"
    half.write_bytes(raw[: at - 200])
    run = read_run(str(half), tmp_path)
    assert run.running and not any("cut" in n for n in run.notes)
    packed = tmp_path / "half.jsonl.gz"
    whole = gzip.compress(raw)
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    run = read_run(str(packed), tmp_path)
    assert run.running and 0 < len(run.ranks[0]) < raw.count(b"\n")


@pytest.mark.all_only
def test_s3(worker, tmp_path, s3):  # noqa: F811 - the fixture
    s3.client().make_bucket("kfp-gate")
    store = open_store("s3://kfp-gate/checkpoints/run one")
    for rank in (0, 1):
        pack(worker / f"rank{rank}/timeline.jsonl", tmp_path / "packed.gz")
        store.upload(tmp_path / "packed.gz", f"timelines/ab12cd/rank{rank}.jsonl.gz")
    store.write("latest.json", b"{}")
    wanted = counts(read_run(str(worker), tmp_path))
    for where in ("s3://kfp-gate/checkpoints/run one", "s3://kfp-gate/checkpoints/run one/timelines/ab12cd/"):
        assert counts(read_run(where, tmp_path / "scratch")) == wanted
    one = read_run("s3://kfp-gate/checkpoints/run one/timelines/ab12cd/rank0.jsonl.gz", tmp_path / "scratch")
    assert counts(one) == {0: wanted[0]}
    with pytest.raises(InvalidInput, match="no timeline"):
        read_run("s3://kfp-gate/checkpoints/another", tmp_path)


@pytest.mark.all_only
def test_mlflow(worker, tmp_path, monkeypatch):
    from kfp_gate.registry.tracking import connect

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    tracking = connect(uri, experiment="kfp-gate")
    run_id = tracking.client.create_run(tracking.experiment_id).info.run_id
    other = tracking.client.create_run(tracking.experiment_id).info.run_id
    pack(worker / "rank0/timeline.jsonl", tmp_path / "timeline-rank0.jsonl.gz")
    (tmp_path / "record.json").write_text('{"ranks": 2}')
    for name in ("timeline-rank0.jsonl.gz", "record.json"):
        tracking.client.log_artifact(run_id, str(tmp_path / name), "training")
    for where in (f"runs:/{run_id}", run_id):
        run = read_run(where, tmp_path / "scratch", tracking_uri=uri)
        assert counts(run) == {0: counts(read_run(str(worker), tmp_path))[0]} and run.record["ranks"] == 2
    with pytest.raises(InvalidInput, match="without a timeline"):
        read_run(other, tmp_path, tracking_uri=uri)
    with pytest.raises(InvalidInput, match="no run"):
        read_run("0" * 32, tmp_path, tracking_uri=uri)
    with pytest.raises(InvalidInput, match="tracking host"):
        read_run(run_id, tmp_path, tracking_uri="https://elsewhere.example.org")


def test_messages(tmp_path, monkeypatch, snapshot):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        write(TRAINING, Path("several") / name)
    Path("empty").mkdir()
    Path("failed").mkdir()
    Path("failed/events.jsonl").write_text('{"step": "launch_training", "state": "failed"}\n')
    Path("model").mkdir()
    Path("model/model.pt").write_bytes(b"weights")
    Path("binary.jsonl").write_bytes(os.urandom(3000))
    Path("other.jsonl").write_text('{"kind": "cat"}\n{"a": 1}\n[1, 2]\n')
    Path("empty.jsonl").write_bytes(b"")
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"kind":"start"}\n' * 100)[:12])
    cases = {
        "nothing there": "runs/none", "an empty folder": "empty",
        "a pipeline's run without a training": "failed", "a model": "model", "a file of another kind":
        "model/model.pt", "no text": "binary.jsonl", "other lines": "other.jsonl", "an empty file": "empty.jsonl",
        "cut before the first line": "cut.jsonl.gz", "several runs": "several", "an empty location": " ",
        "half an MLflow id": "runs:/12ab", "an MLflow run without a server": "runs:/" + "ab" * 16,
        "another scheme": "gs://bucket/run", "credentials": "s3://key:secret@host/x",
    }  # fmt: skip
    texts = []
    for name, where in cases.items():
        with pytest.raises(InvalidInput) as caught:
            read_run(where, tmp_path / "scratch")
        texts.append(f"# {name}\n{caught.value}")
    for record, uri in (("", " "), ("folder", "s3://b/x")):
        with pytest.raises(InvalidInput) as caught:
            one_source(record, uri)
        texts.append(f"# sources: {record!r}, {uri!r}\n{caught.value}")
    snapshot("runs-messages", "\n\n".join(texts).replace(str(tmp_path), "FOLDER"))
    assert one_source("folder", "") == "folder" and one_source("", " s3://b/x ") == "s3://b/x"


def test_hostile_lines_are_left_out_and_counted(worker, tmp_path):
    lines = (worker / "rank0/timeline.jsonl").read_bytes().splitlines(keepends=True)
    hostile = [
        b'{"kind": "window", "seconds": ' + b"[" * 100_000 + b"\n",
        b'{"kind": 3}\n', b"null\n", b'"text"\n', b"\xff\xfe\x00\n",
        b'{"kind": "sample", "x": "' + b"a" * (LONGEST_LINE + 10) + b'"}\n',
        b"{" + b'"a":' * 1000 + b"\n",
    ]  # fmt: skip
    path = tmp_path / "hostile.jsonl"
    path.write_bytes(b"".join([*lines[:10], *hostile, b"\n", *lines[10:]]))
    run = read_run(str(path), tmp_path)
    assert counts(run) == {0: len(lines)}
    assert f"{len(hostile)} lines that are no timeline's were left out" in run.notes


def test_a_small_file_that_unpacks_to_too_much_is_refused(tmp_path, monkeypatch):
    from kfp_gate.diagnosis.reading import lines

    monkeypatch.setattr(lines, "MOST_LINES", 1000)
    monkeypatch.setattr(lines, "LARGEST_FILE", 1 << 30)
    path = tmp_path / "bomb.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * 2000))
    with pytest.raises(InvalidInput, match="more than 1 GiB or 1,000 lines"):
        read_lines(path, "x")
    monkeypatch.setattr(lines, "LARGEST_FILE", 3 * LONGEST_LINE)
    path.write_bytes(gzip.compress(b'{"kind":"end"}\n' + b"a" * (5 * LONGEST_LINE)))
    assert len(read_lines(path, "x").lines) == 1


@pytest.mark.parametrize(
    ("line", "key", "kept"),
    [
        ('{"kind":"window","seconds":{"data":"1","forward":2}}', "seconds", None),
        ('{"kind":"window","seconds":{"data":NaN}}', "seconds", None),
        ('{"kind":"window","seconds":{"data":-1}}', "seconds", None),
        ('{"kind":"window","steps":1e400}', "steps", None),
        ('{"kind":"window","batches":[1,"2"]}', "batches", None),
        ('{"kind":"window","each":[[1,2],[3],"x",[1,null]]}', "each", [[1, 2]]),
        ('{"kind":"window","loader":{"parts":{"read":[1,null,2]}}}', "loader", {"parts": {"read": [1, None, 2]}}),
        ('{"kind":"window","loader":7}', "loader", None),
        ('{"kind":"sample","rss":"much"}', "rss", None),
        ('{"kind":"sample","made_up":"much"}', "made_up", None),
        ('{"kind":"sample","gpu_throttle":"hot"}', "gpu_throttle", None),
        ('{"kind":"memory","rss":true}', "rss", None),
        ('{"kind":"epoch","values":{"map50":0.5,"a":"x"}}', "values", {"map50": 0.5}),
        ('{"kind":"epoch","epoch":2.5}', "epoch", None),
        ('{"kind":"end","time":"2026-01-01T00:00:00"}', "time", None),
        ('{"kind":"end","node":"\\ud800x"}', "node", "?x"),
        ('{"kind":"new","thing":{"a":[1]}}', "thing", {"a": [1]}),
    ],
)
def test_known_keys_hold_what_they_should(line, key, kept):
    assert parse(line.encode())[key] == kept


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3), max_leaves=8,
)  # fmt: skip


def mutated(data, tmp_path_factory):
    """Lines with values of any kind in the place of known ones, lost, doubled and cut lines."""
    base = _base(tmp_path_factory)
    lines = [dict(line) for line in base]
    for _ in range(data.draw(st.integers(1, 12))):
        line = lines[data.draw(st.integers(0, len(lines) - 1))]
        spot, key = line, data.draw(st.sampled_from(sorted(line)))
        while isinstance(spot[key], dict) and spot[key] and data.draw(st.booleans()):
            spot[key] = dict(spot[key])
            spot, key = spot[key], data.draw(st.sampled_from(sorted(spot[key])))
        if data.draw(st.booleans()):
            del spot[key]
            continue
        spot[key] = data.draw(JSON)
        if not line:
            break
    gone = data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=len(lines)))
    if data.draw(st.booleans()):
        lines = [line for i, line in enumerate(lines) if i not in gone] or lines
    if data.draw(st.booleans()):
        lines = data.draw(st.permutations(lines))
    folder = tmp_path_factory.mktemp("mutated")
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "timeline.jsonl").write_text(
        text[: data.draw(st.integers(0, len(text)))] if data.draw(st.booleans()) else text
    )
    try:
        run = read_run(str(folder), folder)
    except InvalidInput:
        return
    diagnose(run).to_json().encode()


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_no_timeline_gives_a_traceback(data, tmp_path_factory):
    mutated(data, tmp_path_factory)


@pytest.mark.all_only
@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_no_timeline_gives_a_traceback_in_many_tries(data, tmp_path_factory):
    mutated(data, tmp_path_factory)


_BASE: list[dict] = []


def _base(factory) -> list[dict]:
    if not _BASE:
        path = write(Training(workers=2, steps=20, epochs=2, redo=(2,)), factory.mktemp("base") / "out")
        _BASE.extend(json.loads(line) for line in (path / "rank0/timeline.jsonl").read_text().splitlines())
        _BASE.extend([
            {"kind": "probe", "part": "usual", "steps": 9, "step_s": 0.5, "low": 0.4, "high": 0.6},
            {"kind": "probe", "part": "prepared", "steps": 9, "step_s": 0.3, "low": 0.2, "high": 0.4},
            {"kind": "profile", "steps": 5, "step_s": 0.5, "around_s": 0.4, "cost": 0.2, "ops": [
                {"name": "conv", "calls": 3, "cpu_s": 1.0, "device_s": None}], "kernels": 10, "device_busy_s": 1.0,
             "transforms": {"Mosaic": 0.5}, "functions": [
                {"function": "a.py:1:f", "part": "transform:Mosaic", "calls": 3, "own_s": 0.5, "total_s": 0.6}]},
            {"kind": "gpu", "uuid": "GPU-1", "name": "x", "unknown": {"gpu_util": "not supported"}},
        ])  # fmt: skip
    return [json.loads(json.dumps(line)) for line in _BASE]


def test_reading_a_run_loads_no_framework(worker):
    code = (
        "import sys; from pathlib import Path; from kfp_gate.diagnosis.reading.runs import read_run;"
        "from kfp_gate.diagnosis.diagnose import diagnose; diagnose(read_run(sys.argv[1], Path('.')));"
        "print(sorted({'torch', 'ultralytics', 'mlflow', 'kfp', 'minio'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code, str(worker)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
