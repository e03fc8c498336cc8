"""The public API for other people's training code: on a laptop without anything, and with storage."""

import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfp_gate.errors import Broken
from kfp_gate.evaluation.records import match
from kfp_gate.observing import loading
from kfp_gate.observing.timeline import read_timeline
from kfp_gate.training import api


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_", "MLFLOW_", "KFP_GATE_")):
            monkeypatch.delenv(name)


def test_a_loop_of_ones_own_runs_without_a_launcher(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = tmp_path / "w.bin"
    with api.start(epochs=3, folder=tmp_path / "run", checkpoint_uri=str(tmp_path / "store")) as run:
        run.sanity(lambda: None)
        assert run.latest(["w.bin"], tmp_path / "got") is None
        for epoch in (1, 2, 3):
            weights.write_bytes(bytes([epoch]))
            run.log({"a@b": 1.0, "none": None, "nan": float("nan")}, step=epoch)
            records = match([(0, [[0, 0, 9, 9]], [0.9], [0], [[0, 0, 9, 9]], [0])], 1)
            gathered = run.gather(records)
            assert gathered is not None and np.array_equal(gathered.scores, records.scores)
            assert run.memory_line(epoch).startswith(f"memory epoch {epoch}/3: rss ")
            assert run.checkpoint(epoch, {"w.bin": weights}, finished=epoch == 3)
            run.progress(epoch, monitors={"map50": 0.5})
    lines = [
        json.loads(x.split(" ", 1)[1])
        for x in capsys.readouterr().out.splitlines()
        if x.startswith("KFP_GATE_PROGRESS")
    ]
    assert [x["epoch"] for x in lines] == [1, 2, 3] and lines[-1]["eta_s"] == 0
    with api.start(epochs=3, folder=tmp_path / "again", checkpoint_uri=str(tmp_path / "store")) as run:
        found = run.latest(["w.bin"], tmp_path / "got")
    assert found is not None and found[0] == 3 and found[1]["w.bin"].read_bytes() == b"\x03"


class Items:
    """A data set of one's own, with parts of its own."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> np.ndarray:
        raw = loading.read_file(self.paths[index])
        with loading.PARTS.during("decode"):
            return np.frombuffer(raw, np.uint8)


class Loader:
    """What any framework's loader does with a data set and a collate function."""

    batch_size, num_workers = 2, 0

    def __init__(self, items: loading.TimedItems, collate: loading.TimedCollate) -> None:
        self.items, self.collate = items, collate

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, len(self.items), 2):
            yield self.collate(self.items.__getitems__(range(start, min(start + 2, len(self.items)))))


def test_the_timeline_of_ones_own_loop_has_the_workers_lines(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "files").mkdir()
    for name in "abcde":
        (tmp_path / "files" / name).write_bytes(bytes(8))
    loader = Loader(loading.TimedItems(Items(tmp_path / "files")), loading.TimedCollate(np.stack))
    caplog.set_level("INFO")
    with api.start(epochs=2, folder=tmp_path / "run", checkpoint_uri=str(tmp_path / "store")) as run:
        run.conditions(loader, batch=2, precision="fp32")
        for epoch in (1, 2):
            with run.epoch(epoch):
                for images in run.batches(loader):
                    assert images.shape[1:] == (8,)
                    run.phases.enter("backward")
                    time.sleep(0.002)
                    run.step_done(images=len(images))
                with run.phases.during("validation"):
                    time.sleep(0.002)
    lines = list(read_timeline(tmp_path / "run" / "rank0" / "timeline.jsonl"))
    assert [lines[0]["kind"], lines[-1]["kind"]] == ["start", "end"] and all("gpu" in x for x in lines)
    conditions = next(x for x in lines if x["kind"] == "conditions")
    assert conditions["workers"] == 0 and conditions["rank_batch"] == 2 and conditions["cpus"] >= 1
    windows = [x for x in lines if x["kind"] == "window"]
    assert [w["batches"] for w in windows] == [[0, 0], [1, 1], [2, 2], [3, 5]]
    assert [w["warmup"] for w in windows] == [True, True, True, False]
    last = windows[-1]
    assert last["steps"] == 3 and last["images"] == 5 and last["bytes"] == 40 and last["epoch"] == 2
    assert len(last["each"]) == 3 and all(0 < data < total for data, total in last["each"])
    assert set(last["loader"]["parts"]) == {"open", "read", "decode", "collate", "other"}
    assert last["loader"]["bytes"] == 40 and last["loader"]["ready"] is None
    assert {"data", "forward", "backward"} <= set(last["seconds"])
    phases = [x for x in lines if x["kind"] == "phases"]
    assert [p["epoch"] for p in phases] == [1, 2] and all(p["seconds"]["validation"] >= 0.002 for p in phases)
    assert "phases epoch 2/2: " in caplog.text
    stored = list((tmp_path / "store" / "timelines").rglob("rank0.jsonl.gz"))
    assert len(stored) == 1 and len(gzip.decompress(stored[0].read_bytes()).splitlines()) == len(lines)


def test_a_second_try_leaves_the_timeline_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KFP_GATE_RUN_ID", "monday")
    for name in ("first", "second"):
        with api.start(epochs=1, folder=tmp_path / name, checkpoint_uri=str(tmp_path / "store")):
            pass
    assert len(list((tmp_path / "store" / "timelines").rglob("rank0.jsonl.gz"))) == 2


class Closed(dict[str, Any]):
    """A dictionary that nothing may be taken out of."""

    def pop(self, *_: Any) -> Any:
        raise TypeError("immutable")


class Sizeless:
    """As torch's sparse tensors, which raise where others tell their size."""

    @property
    def nbytes(self) -> int:
        raise RuntimeError("nbytes is not defined for sparse tensors")


def test_a_batch_may_hold_anything(tmp_path: Path) -> None:
    batches = [Closed(a=np.zeros(3, np.uint8), b=Sizeless()), (Sizeless(),), Sizeless(), "text"]
    with api.start(epochs=1, folder=tmp_path / "run") as run, run.epoch(1):
        for found, expected in zip(run.batches(batches), batches, strict=True):
            assert found is expected
            run.step_done()
    windows = [x for x in read_timeline(tmp_path / "run" / "rank0" / "timeline.jsonl") if x["kind"] == "window"]
    assert [w["bytes"] for w in windows] == [3, None, None, None]


def test_a_sanity_check_that_fails_says_that_nothing_was_trained(tmp_path: Path) -> None:
    def check() -> None:
        raise KeyError("mAP_0.5")

    with pytest.raises(Broken, match="KeyError"), api.start(epochs=1, folder=tmp_path) as run:
        run.sanity(check)


def test_several_ranks_without_a_process_group_are_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with api.start(epochs=1, folder=tmp_path, checkpoint_uri=str(tmp_path / "s")) as run:
        assert not run.is_first
        assert run.checkpoint(1, {"x": tmp_path / "does not matter"}) is True
        with pytest.raises(Broken, match="no process group on rank 1 of 2"):
            run.gather(match([], 1))
    # A rank other than 0 stores its timeline alone.
    assert [p.name for p in (tmp_path / "s").rglob("*") if p.is_file()] == ["rank1.jsonl.gz"]


def test_it_imports_neither_torch_nor_the_upstream_trainer() -> None:
    heavy = "{'torch', 'ultralytics', 'mlflow'}"
    code = f"import sys; from kfp_gate.training import api; assert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
