"""Snapshots of texts: `snapshot(name, text)` compares with `snapshots/<name>.txt`.

Renew on purpose with `KFP_GATE_RENEW_SNAPSHOTS=1 pytest tests/gate`, and read the diff.
"""

import os
from pathlib import Path

import pytest

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


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    from detectors import make_place

    return make_place(tmp_path_factory.mktemp("gate"))
