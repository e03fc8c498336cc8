"""`kfp-gate demo` as a newcomer runs it, then what must hold of everything it left behind.

One training serves all tests of this module: the runs after the first take it from the local cache.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from end_to_end.command import TINY, Run, kfp_gate, parameters
from kfp_gate.data.manifest import read_manifest

pytestmark = pytest.mark.all_only


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(out: Path) -> Run:
    run = kfp_gate("demo", out=out)
    assert run.code == 0, run.text + run.log[-6000:]
    return run


@pytest.fixture(scope="module")
def strict(demo: Run, out: Path) -> Run:
    return kfp_gate("demo", "--strict", out=out)


def _versions(out: Path) -> list[Any]:
    from mlflow import MlflowClient

    return list(MlflowClient(f"sqlite:///{out / 'mlflow.db'}").search_model_versions("name='kfp-gate-demo'"))


def test_it_passes_and_registers(demo: Run, out: Path) -> None:
    assert "PASSED" in demo.text
    assert re.search(r"registered: kfp-gate-demo version 1 as @champion", demo.text)
    card = json.loads((demo.artifact("launch-training", "model") / "model.json").read_text())
    (version,) = _versions(out)
    assert version.tags["sha256"] == card["sha256"]


def test_the_screen_names_every_class_and_the_report(demo: Run) -> None:
    for name in ("cone", "barrel", "sign", "bolt"):
        assert f"class/{name}/map50" in demo.text
    report = Path(re.search(r"report:\s+(\S+)", demo.text)[1])
    assert "<svg" in report.read_text(encoding="utf-8")
    # kfp's warnings about settings that a laptop ignores belong to the log.
    assert "no effect" not in demo.text


def test_the_ranks_folders_do_not_stay(demo: Run, out: Path) -> None:
    """Images, checkpoints and states of every rank: gigabytes a run, in a place that nobody looks at."""
    assert not [p for p in (out / "tmp").rglob("*") if p.name.startswith("rank-")]


def test_outcome_is_recorded(demo: Run, strict: Run) -> None:
    assert demo.events["record_outcome"]["result"]["state"] == "registered"
    assert strict.events["record_outcome"]["result"]["state"] == "refused"


def test_strict_is_refused_with_all_artifacts_and_nothing_registered(strict: Run, out: Path) -> None:
    assert strict.code == 0, strict.text
    assert "REFUSED" in strict.text and "registered: nothing" in strict.text
    verdict = json.loads(strict.artifact("validation-gate", "verdict").read_text())
    missed = {e["metric"] for e in verdict["entries"] if e["state"] == "missed"}
    assert missed, "the strict thresholds are beyond the demo model"
    page = strict.artifact("validation-gate", "report").read_text(encoding="utf-8")
    for metric in missed:
        assert metric.split("/")[1] in page
    assert "register_model" not in strict.events
    assert len(_versions(out)) == 1


def test_strict_took_the_training_from_the_cache(strict: Run) -> None:
    assert {"preflight", "validation_gate"} <= set(strict.events)
    assert not {"split_dataset", "launch_training"} & set(strict.events)


def test_the_gate_broke_once_and_the_next_run_repeats_only_what_it_must(demo: Run, out: Path) -> None:
    """An image of the test set vanishes after the preflight: the gate fails, and does not refuse. Then it is back."""
    test = read_manifest(demo.artifact("split-dataset", "test"))
    image = out / "dataset" / next(test.rows()).image
    away = image.with_suffix(".away")
    with _when_step_is(out, "preflight", "done", lambda: image.rename(away)):
        broken = kfp_gate("demo", out=out)
    away.rename(image)
    assert broken.code == 2, "who can restore the image is the caller"
    assert image.name in broken.text and "validation_gate failed" in broken.text
    assert "Traceback" not in broken.text
    again = kfp_gate("demo", out=out)
    assert again.code == 0, again.text
    assert {"preflight", "validation_gate", "register_model"} <= set(again.events)
    assert not {"split_dataset", "launch_training"} & set(again.events)
    assert len(_versions(out)) == 1, "the same weights are registered once"


class _when_step_is:  # noqa: N801  # reads as a sentence
    """Call something as soon as a step of the next run in `out` is in a state."""

    def __init__(self, out: Path, step: str, state: str, then: Any) -> None:
        self.known = set((out / "runs").iterdir())
        self.out, self.step, self.state, self.then = out, step, state, then
        self.stop = threading.Event()

    def __enter__(self) -> None:
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.stop.wait(0.02):
            for folder in set((self.out / "runs").iterdir()) - self.known:
                file = folder / "events.jsonl"
                for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else ():
                    event = json.loads(line)
                    if event["step"] == self.step and event["state"] == self.state:
                        self.then()
                        return


def _ranks(marker: str) -> Iterator[int]:
    """Process ids of worker processes whose command line names `marker`."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "kfp_gate.training.worker" in command and marker in command:
                yield int(process.name)


def test_a_killed_rank_stops_the_step_and_registers_nothing(tmp_path: Path, demo: Run, out: Path) -> None:
    killed: list[float] = []

    def kill() -> None:
        while not killed:
            ranks = sorted(_ranks("rank-1"))
            if ranks and b"KFP_GATE_PROGRESS" in (b"".join(f.read_bytes() for f in tmp_path.glob("runs/*/run.log"))):
                os.kill(ranks[0], signal.SIGKILL)
                killed.append(time.monotonic())
            time.sleep(0.05)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    wanted = parameters(epochs=50, image_size=64, processes_per_node=2, registered_model="killed")
    run = kfp_gate("run", "--dataset", str(out / "dataset"), "-p", TINY, *wanted, out=tmp_path)
    assert killed and run.code == 1
    assert "launch_training failed" in run.text and "rank 1" in run.text and "SIGKILL" in run.text
    assert "register_model" not in run.events and "validation_gate" not in run.events
    assert run.events["record_outcome"]["result"] == {"state": "broken", "step": "launch_training"}
