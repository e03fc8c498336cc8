"""A small real detector on disk, and a test set that it is right about: its own best detections are the labels."""

import copy
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

CLASSES = ("cone", "원뿔 (소형)", "50%", "<img src=x onerror=alert(1)>")
SIZE = 96


@dataclass(frozen=True)
class Place:
    """Files of the gate's end-to-end tests.

    Attributes:
        model: model folder whose detections the labels are; it has seen none of the test images.
        weak: model folder of the same architecture that knows nothing.
        manifest: of the test set.
    """

    folder: Path
    model: Path
    weak: Path
    manifest: Path


def make_place(folder: Path) -> Place:
    os.environ["YOLO_OFFLINE"], os.environ["YOLO_CONFIG_DIR"] = "1", str(folder)
    import torch

    torch.set_num_threads(1)
    images = _images(folder / "images", 16)
    model = _model_folder(folder / "model", seed=0)
    weak = _model_folder(folder / "weak", seed=7)
    return Place(folder, model, weak, _labelled(model, images, folder / "test.parquet"))


def checkpoint(path: Path, *, classes=CLASSES, seed: int = 0) -> Path:
    """A checkpoint as upstream's trainer writes it, at an eighth of the width."""
    import torch
    from ultralytics.nn.tasks import DetectionModel, yaml_model_load

    config = yaml_model_load("yolo11n.yaml")
    config["scales"], config["scale"] = {"n": [0.33, 0.125, 1024]}, "n"
    torch.manual_seed(seed)
    model = DetectionModel(config, nc=len(classes), verbose=False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
            module.weight.data.uniform_(0.5, 2.5)
    for branch in model.model[-1].cv3:
        branch[-1].bias.data.fill_(-2.5)
        branch[-1].weight.data *= 4  # so that each class wins somewhere
    model.names = dict(enumerate(classes))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": -1, "model": None, "ema": copy.deepcopy(model.eval()).half(), "train_args": {}}, path)
    return path


def fingerprints(rows):
    """A table of (sha256, phash, group) rows."""
    import pyarrow as pa

    digests, looks, groups = zip(*rows, strict=True)
    return pa.table({"sha256": digests, "phash": pa.array(looks, pa.uint64()), "group": groups})


def predict_settings():
    """Settings under which the detections of `model` are exactly the labels."""
    from kfp_gate.evaluation.predict import PredictSettings

    return PredictSettings(image_size=SIZE, confidence_floor=0.01, max_detections=4)


UNSEEN = [("f" * 64, 0x5555_5555_5555_5555, "elsewhere")]


def _model_folder(folder: Path, seed: int) -> Path:
    from kfp_gate.evaluation.model_folder import ModelCard, write_model_folder

    weights = checkpoint(folder.parent / f"weights-{seed}.pt", seed=seed)
    write_model_folder(folder, weights, ModelCard("", CLASSES, SIZE, run_id=f"run-{seed}"), [fingerprints(UNSEEN)])
    return folder


def _images(folder: Path, count: int) -> list[Path]:
    from PIL import Image, ImageDraw, ImageFilter

    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    paths = []
    for i in range(count):
        size = [(96, 64), (64, 96), (160, 48), (100, 100)][i % 4]
        image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
        image = image.filter(ImageFilter.GaussianBlur(3))
        ImageDraw.Draw(image).ellipse((10, 10, 40, 40), fill=tuple(rng.integers(0, 256, 3).tolist()))
        paths.append(folder / f"프레임 <b>{i:02} 50%.png")
        image.save(paths[-1])
    return paths


def _labelled(model: Path, images: list[Path], path: Path) -> Path:
    import pyarrow as pa

    from kfp_gate.data import manifest as room
    from kfp_gate.evaluation.predict import Detector

    rows = []
    found = Detector.load(model / "model.pt").predict(images, predict_settings())
    for i, (image, detections) in enumerate(zip(images, found, strict=True)):
        boxes, data = [], image.read_bytes()
        w, h = detections.width, detections.height
        for box, kind in zip(detections.boxes, detections.classes, strict=True):
            # Not clipped: random weights draw boxes beyond the image, and they shall be right.
            x1, y1, x2, y2 = box / [w, h, w, h]
            if i % 8 != 7:
                boxes.append({"class": int(kind), "cx": (x1 + x2) / 2, "cy": (y1 + y2) / 2, "w": x2 - x1, "h": y2 - y1})
        rows.append({
            "image": image.name, "bytes": len(data), "width": w, "height": h, "sha256": sha256(data).hexdigest(),
            "phash": 1 << (i * 4) | 1 << 63 - i, "group": f"scene {i // 8}",
            "boxes": boxes, "crowd": [False] * len(boxes),
        })  # fmt: skip
    table = pa.Table.from_pylist(rows, schema=room.schema()).sort_by("image")
    room.write_manifest(
        room.Manifest(table, CLASSES, "test", str(images[0].parent), 0, "test", "0"), path
    )  # fmt: skip
    return path
