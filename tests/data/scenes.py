"""Small labelled datasets on disk, drawn from a seed."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

Box = tuple[int, float, float, float, float]


def picture(seed: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """Coarse noise, so that two seeds look different to a perceptual hash and a shift by a grey level does not."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BILINEAR)


def write_yolo(
    root: Path,
    images: dict[str, Sequence[Box] | None],
    *,
    names: str = "names: [cone, post]",
    splits: str = "",
    size: tuple[int, int] = (64, 48),
) -> Path:
    """A YOLO dataset: image paths and their boxes; None writes no label file."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "data.yaml").write_text(f"{names}\n{splits}\n", encoding="utf-8")
    for seed, (image, boxes) in enumerate(images.items()):
        path = root / image
        path.parent.mkdir(parents=True, exist_ok=True)
        picture(seed, size).save(path)
        if boxes is not None:
            label = root / Path(*("labels" if p == "images" else p for p in Path(image).parts)).with_suffix(".txt")
            label.parent.mkdir(parents=True, exist_ok=True)
            label.write_text("".join(" ".join(map(str, box)) + "\n" for box in boxes))
    return root


def clips(count: int, frames: int, folder: str = "images") -> dict[str, Sequence[Box] | None]:
    """`count` clips of `frames` images each, named `clip<i>__<frame>.png`, one cone in each, a post in every third."""
    out: dict[str, Sequence[Box] | None] = {}
    for clip in range(count):
        for frame in range(frames):
            boxes: list[Box] = [(0, 0.5, 0.5, 0.25, 0.25)]
            if frame % 3 == 0:
                boxes.append((1, 0.25, 0.25, 0.125, 0.25))
            out[f"{folder}/clip{clip:03}__{frame:03}.png"] = boxes
    return out
