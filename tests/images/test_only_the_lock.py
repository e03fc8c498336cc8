"""Every image, the large ones too, verified in an environment that holds its lock and nothing else.

Nothing is built or downloaded but one package: the files of the locked distributions are linked from the environment
that runs the tests. So an import that works here only because a test tool or the compiler brought its package fails.
"""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from images.conftest import ROOT
from kfp_gate.images.locks import read_locks
from kfp_gate.images.requirements import read_project

pytestmark = [pytest.mark.all_only, pytest.mark.timeout(900)]

IMAGES = read_project(ROOT).images
HEADLESS = "opencv-python-headless"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """kfp-gate as a wheel installs it, and the one package that images hold instead of what is installed here."""
    target = tmp_path_factory.mktemp("own")
    version = read_locks(read_project(ROOT))["worker"][HEADLESS]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    subprocess.run([*pip, str(ROOT), f"{HEADLESS}=={version}"], check=True)
    return target


def link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        target.symlink_to(source)


def environment(folder: Path, locked: dict[str, str], own: Path) -> Path:
    """A virtual environment with the locked distributions; returns its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for file in own.rglob("*"):
        name = file.relative_to(own)
        headless = name.parts[0].startswith(("cv2", "opencv_python_headless"))
        if file.is_file() and name.parts[0] != "bin" and (HEADLESS in locked or not headless):
            link(file, site / name)
    for package, version in locked.items():
        if package == HEADLESS:
            continue
        distribution = importlib.metadata.distribution(package)
        assert distribution.version == version, f"tests run with {package} {distribution.version}, locked is {version}"
        for file in distribution.files or ():
            if ".." not in file.parts:
                link(Path(str(file.locate())), site / file)
    return folder / "bin" / "python"


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_needs_nothing_beyond_its_lock(image, own, tmp_path, project):
    python = environment(tmp_path / "image", read_locks(project)[image], own)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "KFP_GATE", "VIRTUAL_ENV", "YOLO"))}
    settings = {"KFP_GATE_IMAGE": image, "YOLO_CONFIG_DIR": str(tmp_path / "yolo"), "HOME": str(tmp_path)}
    command = [str(python), "-m", "kfp_gate.images"]
    done = subprocess.run(command, env=clean | settings, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "imports work, installed packages are the locked ones" in done.stdout
    assert ("evaluated and judged" in done.stdout) is (image in ("worker", "validation-gate"))
