"""What the registry's tests share: a prepared MLflow file, a model folder, verdicts."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from kfp_gate.evaluation.model_folder import ModelCard, write_model_folder
from kfp_gate.gate.verdict import Champion, Entry, Separation, Verdict, write_verdict

CLASSES = ("cone", "원뿔 (소형)", "50%")


@pytest.fixture(scope="session")
def prepared_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An MLflow file whose migrations have run: they cost more than all that a test does with it."""
    from kfp_gate.registry.tracking import open_client

    path = tmp_path_factory.mktemp("prepared") / "mlflow.db"
    _, client = open_client(f"sqlite:///{path}")
    client.search_registered_models()
    return path


@pytest.fixture
def tracking_uri(prepared_file: Path, tmp_path: Path) -> str:
    shutil.copy(prepared_file, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path}/mlflow.db"


@pytest.fixture(autouse=True)
def own_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees the tracking server or the secrets of the machine it runs on."""
    for name in list(os.environ):
        if name.startswith(("MLFLOW_TRACKING", "MLFLOW_RUN", "MLFLOW_EXPERIMENT", "KFP_GATE_", "AWS_")):
            monkeypatch.delenv(name)
    yield


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    """A model folder with the given weights; the registry hashes weights and never opens them."""

    def make(weights: bytes = b"weights", name: str = "model", **card: object) -> Path:
        source = tmp_path / f"{name}-source.pt"
        source.write_bytes(weights)
        values = {
            "classes": CLASSES, "image_size": 64, "monitors": ("map50_95",), "manifests": {"train": "a1", "val": "b2"},
            "versions": {"ultralytics": "8.4.190"}, "run_id": "training-run",
        }  # fmt: skip
        seen = pa.table({"sha256": ["00"], "phash": ["11"], "group": ["g"]})
        write_model_folder(tmp_path / name, source, ModelCard("", **{**values, **card}), [seen])
        return tmp_path / name

    return make


@pytest.fixture
def make_verdict(tmp_path: Path) -> Callable[..., Path]:
    """A verdict on the weights of a model folder."""
    from kfp_gate.evaluation.model_folder import read_card

    def make(model: Path, *, passed: bool = True, champion: str = "", name: str = "verdict", **more: object) -> Path:
        state = "met" if passed else "missed"
        entries = (
            Entry("map50:min", "map50", "min", 0.5, state, 0.75 if passed else 0.25),
            Entry("class/cone/map50:min", "class/cone/map50", "min", 0.5, "met", 0.8),
        )
        seen = Champion("compared", "models:/m/1", champion) if champion else Champion()
        values = {
            "passed": passed, "entries": entries, "ungated": ("50%",), "data": {"digest": "t3", "split": "test"},
            "model": {"sha256": read_card(model).sha256, "classes": list(CLASSES)},
            "separation": Separation("proven", 1), "champion": seen,
        }  # fmt: skip
        path = tmp_path / f"{name}.json"
        write_verdict(Verdict(**{**values, **more}), path)
        return path

    return make
