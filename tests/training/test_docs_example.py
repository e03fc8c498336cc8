"""The example of docs/training.md runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kfp_gate.observing.timeline import read_timeline

pytestmark = pytest.mark.all_only

DOCS = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_example_writes_the_lines_that_the_text_promises(tmp_path: Path) -> None:
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL) if "api.start" in c]
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "KFP_GATE_", "PET_"))}
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**clean, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = list(read_timeline(tmp_path / "run" / "rank0" / "timeline.jsonl"))
    windows = [x for x in lines if x["kind"] == "window"]
    assert sum(w["images"] for w in windows) == 64
    assert all({"open", "read", "decode", "collate"} <= set(w["loader"]["parts"]) for w in windows)
    assert next(x for x in lines if x["kind"] == "conditions")["workers"] == 2
    assert all(0 <= w["loader"]["ready"] <= 4 for w in windows)
    assert list((tmp_path / "store" / "timelines").rglob("rank0.jsonl.gz"))
