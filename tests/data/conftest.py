"""Snapshots of texts: `snapshot(name, text)` compares with `snapshots/<name>.txt`.

Renew on purpose with `KFP_GATE_RENEW_SNAPSHOTS=1 pytest tests/data`, and read the diff.
"""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # scenes.py, shared by the tests of this folder
sys.path.insert(0, str(Path(__file__).parents[1]))  # s3_server.py, shared with the tests of storage

FOLDER = Path(__file__).parent / "snapshots"


@pytest.fixture
def snapshot():
    def compare(name: str, text: str) -> None:
        path = FOLDER / f"{name}.txt"
        if os.environ.get("KFP_GATE_RENEW_SNAPSHOTS"):
            FOLDER.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.is_file(), f"no snapshot {path.name}: renew as the head of conftest.py says"
        assert text + "\n" == path.read_text(encoding="utf-8")

    return compare
