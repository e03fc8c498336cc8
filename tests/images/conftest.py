"""Checkouts to spoil, and snapshots of texts.

`snapshot(name, text)` compares with `snapshots/<name>.txt`. Renew on purpose with
`KFP_GATE_RENEW_SNAPSHOTS=1 pytest tests/images`, and read the diff.
"""

import os
import shutil
from pathlib import Path

import pytest

from kfp_gate.images.requirements import Project, read_project

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def project() -> Project:
    """This repository."""
    return read_project(ROOT)


@pytest.fixture
def copy(tmp_path: Path) -> Project:
    """A copy of this repository that a test may change."""
    root = tmp_path / "checkout"
    root.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, root / name)
    for name in ("src", "components", "images"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    return read_project(root)


def rewrite(path: Path, old: str, new: str) -> None:
    """Replace the one place where `old` stands; a test that changes nothing would prove nothing."""
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new), encoding="utf-8")
