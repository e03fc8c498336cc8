"""A real training on two ranks, one of them killed: it ends in seconds, names the rank, and leaves no model."""

import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kfp_gate.errors import Broken
from kfp_gate.launching.launch import launch
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.training.spec import TrainingSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from scene import SCALED, make_scene


@pytest.mark.all_only
def test_a_rank_killed_during_training(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    scene = make_scene(tmp_path / "scene")
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=400, image_size=64,
        batch=4, patience=0,
    )  # fmt: skip
    killed_at: list[float] = []

    def kill() -> None:
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            ours = any(parent.pid == os.getpid() for parent in process.parents())
            if ours and "kfp_gate.training.worker" in words and any("rank-1" in word for word in words):
                killed_at.append(time.monotonic())
                process.kill()

    def say(line: str) -> None:
        print(line)
        if line.startswith("[rank 0] KFP_GATE_PROGRESS") and not killed_at:
            threading.Thread(target=kill).start()

    before = set(psutil.Process().children(recursive=True))
    outcome = launch(spec, LaunchOptions(nodes=2, say=say), tmp_path / "model")
    assert killed_at and time.monotonic() - killed_at[0] < 60
    assert (outcome.first_failed_rank, outcome.cause) == (1, "killed"), outcome.text()
    assert "ended by signal 9 (SIGKILL)" in outcome.evidence
    with pytest.raises(Broken, match="last lines of rank 1"):
        outcome.raise_if_failed()
    assert not (tmp_path / "model").exists()
    assert not set(psutil.Process().children(recursive=True)) - before
