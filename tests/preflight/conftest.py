"""A small labelled data set in three splits, and a request that finds nothing wrong with it."""

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from kfp_gate.data.manifest import Manifest, schema, write_manifest
from kfp_gate.gate.settings import GateSettings
from kfp_gate.preflight.request import PreflightRequest

CLASSES = ("cone", "원뿔 (소형)", "50%")


@dataclass(frozen=True)
class Dataset:
    """Manifests on disk, with their images beside."""

    folder: Path
    manifests: dict[str, Manifest]

    def path(self, split: str) -> Path:
        return self.folder / f"{split}.parquet"

    def change(self, split: str, **fields: object) -> None:
        """Write another manifest for a split."""
        self.manifests[split] = replace(self.manifests[split], **fields)
        write_manifest(self.manifests[split], self.path(split))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "data")


def make_dataset(folder: Path, classes: tuple[str, ...] = CLASSES, size: int = 64) -> Dataset:
    """Six train, three val and three test images; each has one object of each class."""
    from PIL import Image

    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    manifests = {}
    for split, count in (("train", 6), ("val", 3), ("test", 3)):
        rows = []
        for i in range(count):
            path = folder / "images" / f"{split} {i} é.png"
            Image.fromarray(rng.integers(0, 256, (size, size, 3), dtype=np.uint8)).save(path)
            data = path.read_bytes()
            boxes = [{"class": c, "cx": 0.5, "cy": 0.5, "w": 0.3, "h": 0.3} for c in range(len(classes))]
            rows.append({
                "image": f"images/{path.name}", "bytes": len(data), "width": size, "height": size,
                "sha256": sha256(data).hexdigest(), "phash": int(rng.integers(0, 2**63)), "group": f"{split}{i}",
                "boxes": boxes, "crowd": [False] * len(boxes),
            })  # fmt: skip
        table = pa.Table.from_pylist(rows, schema=schema())
        manifests[split] = Manifest(table, classes, split, str(folder), 0, "test", "0")
    made = Dataset(folder, manifests)
    for split, manifest in manifests.items():
        write_manifest(manifest, made.path(split))
    return made


@pytest.fixture
def request_for(dataset: Dataset, tracking_uri: str) -> Callable[..., PreflightRequest]:
    def make(**changes: object) -> PreflightRequest:
        values = {
            "train": dataset.path("train"), "val": dataset.path("val"), "test": dataset.path("test"),
            "image_size": 64, "tracking_uri": tracking_uri, "registered_model": "det", "try_images": 0,
            "gate": GateSettings(class_thresholds={"*": {"map50": 0.5}}),
        }  # fmt: skip
        return PreflightRequest(**{**values, **changes})

    return make


@pytest.fixture(scope="session")
def prepared_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    for name in list(os.environ):
        if name.startswith(("MLFLOW_TRACKING", "MLFLOW_RUN", "MLFLOW_EXPERIMENT", "KFP_GATE_", "AWS_")):
            monkeypatch.delenv(name)
    yield
