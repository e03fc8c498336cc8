"""Labelled images in the sizes that a planting asks for, with their manifests."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from kfp_gate.data.manifest import Manifest, build_table, write_manifest

CLASSES = ("thing", "other")
BOXES = 3


@dataclass(frozen=True)
class Images:
    """What to make: numbers of images, pixels, and the file format (`png` of noise: about 3 bytes a pixel)."""

    train: int = 48
    val: int = 8
    width: int = 96
    height: int = 96
    suffix: str = "jpg"


def make_images(folder: Path, images: Images) -> tuple[Path, Path]:
    """Noise with boxes: what is learnt does not matter here. Returns the manifests of train and val."""
    rng, paths = np.random.default_rng(0), []
    (folder / "images").mkdir(parents=True)
    for split, count in (("train", images.train), ("val", images.val)):
        columns: dict[str, list[object]] = {
            n: [] for n in ("image", "bytes", "width", "height", "sha256", "phash", "group")
        }
        for i in range(count):
            name = f"images/{split}{i}.{images.suffix}"
            pixels = rng.integers(0, 255, (images.height, images.width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name)
            raw = (folder / name).read_bytes()
            row = (name, len(raw), images.width, images.height, hashlib.sha256(raw).hexdigest(), i, f"{split}{i}")
            for key, value in zip(columns, row, strict=True):
                columns[key].append(value)
        total = count * BOXES
        boxes = np.column_stack([
            np.arange(total) % len(CLASSES), rng.uniform(0.3, 0.7, (total, 2)), rng.uniform(0.1, 0.3, (total, 2))
        ])  # fmt: skip
        table = build_table(columns, np.arange(count + 1) * BOXES, boxes, np.zeros(total, bool))
        paths.append(folder / f"{split}.parquet")
        write_manifest(Manifest(table, CLASSES, split, str(folder), 0, "planted", "0"), paths[-1])
    return paths[0], paths[1]
