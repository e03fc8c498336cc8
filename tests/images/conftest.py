"""Checkouts to spoil."""

import shutil
from pathlib import Path

import pytest

from kfp_gate.images.requirements import Project, read_project

ROOT = Path(__file__).resolve().parents[2]


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
