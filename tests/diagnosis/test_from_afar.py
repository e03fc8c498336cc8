"""`kfp-gate diagnose` and the step on a real training whose lines lie in a real S3 service and on an MLflow server."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from registry.server import Server, free_port
from s3_server import S3Server, s3_server  # noqa: F401 - a fixture

from kfp_gate.components import diagnose_training
from kfp_gate.registry.tracking import open_client
from kfp_gate.training.spec import TrainingSpec

from .planted.plantings import SETTINGS
from .planted.scenes import Images, make_images

pytestmark = pytest.mark.all_only

STORE, EPOCHS = "s3://diagnosed/한 run/1", 30


@dataclass
class Training:
    """A worker in a folder of its own, with its checkpoints and its MLflow run elsewhere."""

    home: Path
    environment: dict[str, str]
    server: Server
    process: subprocess.Popen[bytes]

    @property
    def timeline(self) -> Path:
        return self.home / "out" / "rank0" / "timeline.jsonl"

    def diagnose(self, *arguments: str, **environment: str) -> tuple[int, str, str]:
        """Exit code, what was printed, and the error."""
        done = subprocess.run(
            [sys.executable, "-m", "kfp_gate.cli", "diagnose", *arguments], capture_output=True, text=True, check=False,
            env=self.environment | environment,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    def wait_for(self, what: str, times: int) -> None:
        """Until the worker has written so many lines of a kind."""
        until = time.monotonic() + 120
        while not self.timeline.exists() or self.timeline.read_text(encoding="utf-8").count(f'"{what}"') < times:
            assert self.process.poll() is None and time.monotonic() < until, self.log()
            time.sleep(0.2)

    def log(self) -> str:
        return (self.home / "log").read_text(encoding="utf-8")[-3000:]

    def mlflow_run(self) -> str:
        _, client = open_client(self.server.uri)
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return str(run.info.run_id)


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory, s3_server: S3Server) -> Iterator[Training]:  # noqa: F811
    home = tmp_path_factory.mktemp("afar")
    _, client = open_client(f"sqlite:///{home}/prepared.db")
    client.search_registered_models()
    server = Server(home / "mlflow", home / "prepared.db").start()
    s3_server.bucket("diagnosed")
    train, val = make_images(home / "data", Images())
    spec = TrainingSpec(**{
        **SETTINGS, "train_manifest": str(train), "val_manifest": str(val), "source_uri": str(home / "data"),
        "epochs": EPOCHS, "checkpoint_uri": STORE, "tracking_uri": server.uri,
    })  # fmt: skip
    (home / "spec.json").write_text(spec.to_json(), encoding="utf-8")
    others = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "AWS_", "KFP_GATE_"))}
    environment = {**others, **s3_server.environment(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "kfp_gate.training.worker", "--spec", str(home / "spec.json"), "--out",
             str(home / "out")], stdout=log, stderr=subprocess.STDOUT, env=environment,
        )  # fmt: skip
    try:
        yield Training(home, environment, server, process)
    finally:
        process.kill()
        process.wait()
        server.kill()


def test_a_run_is_read_while_it_goes_on_and_after(training: Training) -> None:
    training.wait_for("epoch", 3)
    code, shown, error = training.diagnose(str(training.home / "out"))
    assert code == 0 and "not ended yet" in shown, error
    until = time.monotonic() + 60
    while (found := training.diagnose(STORE))[0] and time.monotonic() < until:
        time.sleep(1)
    assert found[0] == 0 and "not ended yet" in found[1], found[2]
    assert training.process.poll() is None, "else nothing was read while it went on"

    assert training.process.wait(240) == 0, training.log()
    kept = training.home / "why.json"
    answers = []
    tracked = (f"runs:/{training.mlflow_run()}", "--tracking-uri", training.server.uri)
    for arguments in ((str(training.home / "out"),), (STORE,), tracked):
        code, shown, error = training.diagnose(*arguments, "--json", str(kept))
        assert code == 0 and "not ended yet" not in shown, error
        found = json.loads(kept.read_text(encoding="utf-8"))
        # But for the line of the last upload, which is written after it.
        answers.append(
            {k: found[k] for k in ("answer", "state", "running", "conditions", "phases", "scenarios", "growth")}
        )
    assert answers[0] == answers[1] == answers[2] and answers[0]["conditions"]["epochs"] == EPOCHS


def test_what_keeps_a_run_from_being_read_is_said(training: Training) -> None:
    run, dead = f"runs:/{training.mlflow_run()}", f"http://127.0.0.1:{free_port()}"
    for arguments, environment, code, words in (
        ((STORE,), {"AWS_SECRET_ACCESS_KEY": "wrong"}, 2, "the store refused the credentials"),
        ((STORE,), {"AWS_ENDPOINT_URL_S3": dead}, 1, "Connection refused"),
        (("s3://nowhere/x",), {}, 2, "no bucket 'nowhere'"),
        (("s3://diagnosed/other",), {}, 2, "no timeline"),
        ((run,), {}, 2, "no tracking server"),
        ((run,), {"MLFLOW_TRACKING_URI": dead}, 1, "the tracking server did not answer"),
        ((run, "--tracking-uri", "https://mlflow.example.org"), {}, 2, "host"),
        (("runs:/" + "0" * 32, "--tracking-uri", training.server.uri), {}, 2, "no run 0000"),
    ):  # fmt: skip
        found, shown, error = training.diagnose(*arguments, **environment)
        assert (found, shown) == (code, "") and words in error and "Traceback" not in error, error
        assert "writing-secret" not in error and "wrong" not in error


def test_the_step_reads_the_same(training: Training, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in os.environ if n.startswith(("MLFLOW_", "AWS_", "KFP_GATE_"))]:
        monkeypatch.delenv(name)
    for name, value in training.environment.items():
        monkeypatch.setenv(name, value)
    answers = []
    for number, uri in enumerate((STORE, f"runs:/{training.mlflow_run()}")):
        outputs = {n: SimpleNamespace(path=str(tmp_path / f"{n}{number}")) for n in ("diagnosis", "report")}
        diagnose_training.python_func(**outputs, run_uri=uri, tracking_uri=training.server.uri)
        answers.append(json.loads(Path(outputs["diagnosis"].path).read_text(encoding="utf-8"))["answer"])
        assert answers[-1].split(". ")[0] in Path(outputs["report"].path).read_text(encoding="utf-8")
    assert answers[0] == answers[1]
