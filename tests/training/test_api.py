"""The public API for other people's training code: on a laptop without anything, and with storage."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kfp_gate.errors import Broken
from kfp_gate.evaluation.records import match
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
    assert not (tmp_path / "s").exists()


def test_it_imports_neither_torch_nor_the_upstream_trainer() -> None:
    heavy = "{'torch', 'ultralytics', 'mlflow'}"
    code = f"import sys; from kfp_gate.training import api; assert not {heavy} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr == ""
