"""One small real detector, and generated images with a manifest, shared by the tests of this room."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

os.environ["YOLO_OFFLINE"] = "1"
os.environ["YOLO_AUTOINSTALL"] = "0"

CLASSES = ("circle", "원뿔 (소형)", "50%", "a/b")
SIZE = 96


@dataclass(frozen=True)
class Scene:
    """A model on disk and a data set on disk."""

    weights: Path
    manifest: object
    images: list[Path]


@pytest.fixture(scope="session", autouse=True)
def _quiet_upstream(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import torch

    os.environ["YOLO_CONFIG_DIR"] = str(tmp_path_factory.mktemp("yolo"))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny_module(name: str = "yolo11n.yaml", classes: tuple[str, ...] = CLASSES, seed: int = 0):
    """An upstream model at an eighth of the width, with weights that find something everywhere."""
    import torch
    from ultralytics.nn.tasks import DetectionModel, yaml_model_load

    config = yaml_model_load(name)
    config["scales"], config["scale"] = {"n": [0.33, 0.125, 1024]}, "n"
    torch.manual_seed(seed)
    model = DetectionModel(config, nc=len(classes), verbose=False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2.5)
    for head in (model.model[-1].cv3, getattr(model.model[-1], "one2one_cv3", None) or []):
        for branch in head:
            branch[-1].bias.data.uniform_(-3.2, -2)
    model.names = dict(enumerate(classes))
    return model.eval()


def save_checkpoint(model, path: Path) -> Path:
    """As upstream's trainer does: the averaged weights as a whole module in half precision."""
    import copy

    import torch

    torch.save({"epoch": -1, "model": None, "ema": copy.deepcopy(model).half(), "train_args": {"imgsz": SIZE}}, path)
    return path


def write_images(folder: Path, count: int, seed: int = 0) -> list[Path]:
    """Images of mixed shapes with bright blobs, under names with spaces and letters of other scripts."""
    import cv2

    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for i in range(count):
        h, w = [(64, 96), (96, 64), (48, 160), (100, 100), (33, 47)][i % 5]
        image = rng.integers(0, 256, (h, w, 3), dtype=np.uint8)
        image = cv2.GaussianBlur(image, (9, 9), 3)
        cv2.circle(image, (w // 2, h // 2), h // 4, (0, 0, 255), -1)
        paths.append(folder / f"프레임 {i:03d} é.png")
        paths[-1].write_bytes(cv2.imencode(".png", image)[1].tobytes())
    return paths


def make_manifest(images: list[Path], classes: tuple[str, ...] = CLASSES, seed: int = 0):
    """A manifest with one to three boxes on most images, none on every fifth; the last class has no object."""
    import cv2
    import pyarrow as pa

    from kfp_gate.data import manifest as room

    rng = np.random.default_rng(seed)
    rows = []
    for i, path in enumerate(images):
        data = path.read_bytes()
        h, w = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR).shape[:2]
        n = 0 if i % 5 == 4 else int(rng.integers(1, 4))
        boxes = [
            {"class": int(rng.integers(0, max(len(classes) - 1, 1))), "cx": 0.5, "cy": 0.5,
             "w": float(rng.uniform(0.2, 0.6)), "h": float(rng.uniform(0.2, 0.6))}
            for _ in range(n)
        ]  # fmt: skip
        rows.append({
            "image": path.name, "bytes": len(data), "width": w, "height": h, "sha256": sha256(data).hexdigest(),
            "phash": i, "group": f"g{i // 3}", "boxes": boxes, "crowd": [False] * n,
        })  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=room.schema())
    return room.Manifest(
        table=table, classes=classes, split="test", source_uri=str(images[0].parent) if images else "", seed=0,
        rule="test", tool_version="0",
    )  # fmt: skip


@pytest.fixture(scope="session")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    folder = tmp_path_factory.mktemp("scene")
    images = write_images(folder / "images", 21)
    return Scene(save_checkpoint(tiny_module(), folder / "model.pt"), make_manifest(images), images)
