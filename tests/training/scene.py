"""A small labelled data set with manifests, written without any of the product's own splitting."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from kfp_gate.data.manifest import Manifest, build_table, write_manifest

SCALED = "yolo11n.yaml:depth=0.33,width=0.125"


@dataclass(frozen=True)
class Scene:
    """A folder with images, and the manifests of its splits."""

    root: Path
    train: Path
    val: Path
    classes: tuple[str, ...]


def make_scene(
    folder: Path, *, train: int = 16, val: int = 10, classes: tuple[str, ...] = ("square", "원뿔 (소형)"),
    seed: int = 0, absent_in_val: tuple[str, ...] = (),
) -> Scene:  # fmt: skip
    """Images of mixed aspect ratio with filled rectangles; every fifth image has no object."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    paths = {}
    for split, count in (("train", train), ("val", val)):
        columns: dict[str, list[object]] = {
            n: [] for n in ("image", "bytes", "width", "height", "sha256", "phash", "group")
        }
        offsets, boxes = [0], []
        for number in range(count):
            width, height = [(96, 64), (64, 96), (80, 80), (128, 48)][number % 4]
            pixels = rng.integers(0, 60, (height, width, 3), dtype=np.uint8)
            for _ in range(0 if number % 5 == 4 else int(rng.integers(1, 4))):
                allowed = [i for i, c in enumerate(classes) if split == "train" or c not in absent_in_val]
                label = int(rng.choice(allowed))
                w, h = int(rng.integers(14, width // 2)), int(rng.integers(14, height // 2))
                x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
                colour = np.array([220, 60, 60]) if label % 2 == 0 else np.array([60, 220, 60])
                pixels[y : y + h, x : x + w] = colour
                boxes.append([label, (x + w / 2) / width, (y + h / 2) / height, w / width, h / height])
            offsets.append(len(boxes))
            name = f"images/{split} {number:03d}.{'jpg' if number == 1 else 'png'}"
            Image.fromarray(pixels).save(folder / name)
            if number == 1:
                # Upstream re-encodes JPEG files that do not end as they should, in place.
                with (folder / name).open("ab") as handle:
                    handle.write(b"\0\0")
            raw = (folder / name).read_bytes()
            row = (name, len(raw), width, height, hashlib.sha256(raw).hexdigest(), number, f"{split}-{number}")
            for key, value in zip(columns, row, strict=True):
                columns[key].append(value)
        rows = np.array(boxes, np.float64).reshape(-1, 5)
        table = build_table(columns, np.array(offsets, np.int64), rows, np.zeros(len(rows), bool))
        manifest = Manifest(table, classes, split, str(folder), seed, "test", "0")
        paths[split] = folder / f"{split}.parquet"
        write_manifest(manifest, paths[split])
    return Scene(folder, paths["train"], paths["val"], classes)
