"""Snapshots of texts: `snapshot(name, text)` compares with `snapshots/<name>.txt` beside the test.

Renew on purpose with `KFP_GATE_RENEW_SNAPSHOTS=1 pytest FOLDER`, and read the diff.
"""

import os

import pytest


@pytest.fixture
def snapshot(request):
    folder = request.path.parent / "snapshots"

    def compare(name: str, text: str) -> None:
        path = folder / f"{name}.txt"
        if os.environ.get("KFP_GATE_RENEW_SNAPSHOTS"):
            folder.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.is_file(), f"no snapshot {path.name}: renew as the head of conftest.py says"
        assert text + "\n" == path.read_text(encoding="utf-8")

    return compare
