"""Loader processes on a CPU: they are there when asked for, carry their parts, and end with their worker."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kfp_gate.observing.timeline import read_timeline
from kfp_gate.training.spec import TrainingSpec

from .scene import SCALED, make_scene

pytestmark = pytest.mark.all_only


def start(folder: Path, *, epochs: int) -> "subprocess.Popen[str]":
    scene = make_scene(folder / "data", train=24, val=4)
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), base_model=SCALED, epochs=epochs, image_size=64,
        batch=4, workers=2, sanity_batches=0, overrides={"optimizer": "AdamW", "close_mosaic": 1},
    )  # fmt: skip
    (folder / "spec.json").write_text(spec.to_json(), encoding="utf-8")
    command = [sys.executable, "-m", "kfp_gate.training.worker", "--spec", str(folder / "spec.json")]
    return subprocess.Popen(
        [*command, "--out", str(folder / "out")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def members(group: int) -> list[str]:
    """States of the processes of a process group that are not over."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
        except OSError:
            continue
        if fields and int(fields[2]) == group and fields[0] not in "ZX":
            found.append(fields[0])
    return found


def test_they_make_the_batches_and_say_what_it_cost(tmp_path: Path) -> None:
    process = start(tmp_path, epochs=2)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0, output[-3000:]
    lines = list(read_timeline(tmp_path / "out" / "training" / "timeline.jsonl"))
    conditions = next(x for x in lines if x["kind"] == "conditions")
    # Upstream starts no more than the machine has cores.
    assert conditions["workers"] == min(2, os.cpu_count() or 1) and conditions["prefetch"] == 4
    windows = [x for x in lines if x["kind"] == "window"]
    assert sum(w["steps"] for w in windows) == 12 == sum(w["loader"]["batches"] for w in windows)
    assert all(0 <= w["loader"]["ready"] <= 8 for w in windows)
    read = sum(w["loader"]["parts"]["read"][2] for w in windows if "read" in w["loader"]["parts"])
    assert read >= 24 and sum(w["loader"]["bytes"] for w in windows) > read * 1000
    # The last epoch has no mosaics any more, and its batches say so.
    assert windows[0]["loader"]["parts"]["labels"][2] == 16 and windows[-1]["loader"]["parts"]["labels"][2] == 24


def test_a_signal_to_all_of_them_is_told_once_and_as_what_it_is(tmp_path: Path) -> None:
    process = start(tmp_path, epochs=500)
    timeline = tmp_path / "out" / "rank0" / "timeline.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if timeline.is_file() and any(x["kind"] == "epoch" for x in read_timeline(timeline)):
            break
        time.sleep(0.2)
    assert process.poll() is None and len(members(process.pid)) >= 2
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    failures = [json.loads(x.split(" ", 1)[1]) for x in output.splitlines() if x.startswith("KFP_GATE_FAILURE ")]
    assert [f["kind"] for f in failures] == ["terminated"], output[-3000:]
    assert process.returncode == 143
    deadline = time.monotonic() + 20
    while members(process.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not members(process.pid)


DIES = """
import os, time
from torch.utils.data import DataLoader, Dataset
from kfp_gate.training.stand_ins import LoaderStart

class Large(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        # What goes through the pipe itself, as a batch's file names and profile do, and more than a pipe holds.
        return "x" * 100_000

loader = DataLoader(Large(), batch_size=1, num_workers=1, worker_init_fn=LoaderStart(lambda number: None, None))
batches = iter(loader)
next(batches)
time.sleep(0.5)
print(batches._workers[0].pid, flush=True)
os._exit(1)
"""


def test_they_end_with_their_rank_however_it_ends(tmp_path: Path) -> None:
    """Else torch's wait for ever for somebody to read the batch that they want to hand over."""
    with (tmp_path / "said").open("w") as said:
        code = subprocess.run([sys.executable, "-c", DIES], stdout=said, timeout=100).returncode
    process = Path("/proc") / (tmp_path / "said").read_text().strip()
    deadline = time.monotonic() + 15
    while process.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    alive = process.exists()
    if alive:
        os.kill(int(process.name), signal.SIGKILL)
    assert code == 1 and process.name.isdigit() and not alive
