"""An environment is verified as an image, and named failures say what was found and what was locked."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from images.conftest import ROOT
from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.images.locks import Change
from kfp_gate.images.verify import ImportFailure, Verification, lock_of, refuse, summary, verify


def test_an_image_must_be_named(monkeypatch, snapshot):
    monkeypatch.delenv("KFP_GATE_IMAGE", raising=False)
    with pytest.raises(InvalidInput) as caught:
        verify()
    snapshot("no_image_named", str(caught.value))
    with pytest.raises(InvalidInput, match="'spilt'"):
        verify("spilt")


@pytest.mark.all_only
def test_the_smallest_image_passes_here(monkeypatch):
    """Outside the image, versions may differ from the lock: only imports decide."""
    monkeypatch.delenv("KFP_GATE_IMAGE", raising=False)
    verification = verify("record_outcome")
    assert verification.passed and not verification.exact and verification.tried > 30
    refuse(verification)
    assert summary(verification).startswith(f"record-outcome: {verification.tried} imports work")


def test_inside_the_image_the_installed_set_must_be_the_locked_one(monkeypatch):
    monkeypatch.setenv("KFP_GATE_IMAGE", "record_outcome")
    verification = verify()
    # This environment holds the test tools too, so it is not the image.
    assert verification.exact and not verification.failures and not verification.passed
    assert any(d.package == "pytest" and d.before is None for d in verification.differences)
    with pytest.raises(Broken, match=r"found: +\d+ installed versions are not the locked ones") as caught:
        refuse(verification)
    assert re.search(r"\n +\S+: found \S+, locked none\n", str(caught.value))


def test_all_failures_in_one_message(snapshot):
    verification = Verification(
        image="validation-gate",
        tried=400,
        failures=(
            ImportFailure(
                "kfp_gate/evaluation/letterbox.py:51: import cv2",
                "ImportError: libGL.so.1: cannot open shared object file: No such file or directory",
                "opencv-python",
                "5.0.0.93",
                None,
            ),
            ImportFailure("minio", "ModuleNotFoundError: No module named 'minio'", "minio", None, "7.2.20"),
        ),
        differences=(Change("validation-gate", "opencv-python", None, "5.0.0.93"),),
        exact=True,
        evaluation_error="OSError: libGL.so.1",
    )
    with pytest.raises(Broken) as caught:
        refuse(verification)
    snapshot("verification", str(caught.value).replace(sys.prefix, "PREFIX"))


@pytest.mark.all_only
def test_the_gates_image_passes_here_with_a_tiny_evaluation(monkeypatch):
    monkeypatch.delenv("KFP_GATE_IMAGE", raising=False)
    verification = verify("validation-gate")
    assert not verification.failures
    assert verification.evaluation.startswith("evaluated and judged")
    import torch

    assert ("no GPU is visible" in verification.evaluation) is not torch.cuda.is_available()


@pytest.mark.all_only
def test_a_pin_that_breaks_what_only_evaluation_imports(tmp_path):
    """OpenCV 4.8 was compiled for NumPy 1: metadata lets it stand beside NumPy 2, and its import fails.

    No resolver sees that, and no module of ours imports cv2 but one function of the evaluation.
    """
    pin = "4.8.1.78"
    assert lock_of("validation-gate")["opencv-python-headless"] != pin
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site)]
    subprocess.run([*pip, f"opencv-python-headless=={pin}"], check=True)
    program = """
import json, sys
from kfp_gate.images.verify import verify
v = verify("validation-gate", evaluate=False)
print(json.dumps([[f.what, f.package, f.found, f.locked] for f in v.failures]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={k: v for k, v in os.environ.items() if k != "KFP_GATE_IMAGE"} | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    failures = json.loads(done.stdout.splitlines()[-1])
    ours = [failure for failure in failures if failure[0].startswith("kfp_gate/evaluation/")]
    locked = lock_of("validation-gate")["opencv-python-headless"]
    assert any(
        what.endswith(": import cv2") and rest == ["opencv-python-headless", pin, locked] for what, *rest in ours
    )


def test_the_entry_point_of_the_containerfile():
    """`python -m kfp_gate.images` is what the last step of a build runs."""
    last = [line for line in Path(ROOT, "images", "Containerfile").read_text().splitlines() if line.strip()][-1]
    assert last == "RUN umask 0002 && python -m kfp_gate.images"
    environment = {k: v for k, v in os.environ.items() if k != "KFP_GATE_IMAGE"}
    command = [sys.executable, "-m", "kfp_gate.images"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "KFP_GATE_IMAGE is not set" in done.stderr and "Traceback" not in done.stderr
