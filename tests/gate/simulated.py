"""Simulated detectors: evaluations whose truth is known, and images to go with them."""

from pathlib import Path

import numpy as np

from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.records import Matcher

SHA = "a" * 64


def evaluation(
    skill: dict[str, float],
    *,
    images: int = 60,
    per_image: float = 2.0,
    seed: int = 0,
    absent: tuple[str, ...] = (),
    false_rate: float = 0.3,
    sha256: str = SHA,
    slices: dict[str, tuple[str, ...]] | None = None,
    names: tuple[str, ...] | None = None,
    size: tuple[int, int] = (320, 240),
) -> Evaluation:
    """An evaluation of a detector that finds an object of class c with probability `skill[c]`.

    Args:
        skill: class name to probability.
        per_image: mean number of objects per image and class.
        absent: classes without any object.
        false_rate: mean number of false detections per image.
    """
    rng = np.random.default_rng(seed)
    classes = tuple(skill)
    matcher = Matcher(len(classes), detail=True)
    for image in range(images):
        truth, kinds, found, scores, labels = [], [], [], [], []
        for index, name in enumerate(classes):
            for _ in range(0 if name in absent else rng.poisson(per_image)):
                w, h = rng.uniform(8, 120, 2)
                x, y = rng.uniform(0, size[0] - w), rng.uniform(0, size[1] - h)
                truth.append([x, y, x + w, y + h])
                kinds.append(index)
                if rng.random() < skill[name]:
                    shake = rng.normal(0, 0.03, 4) * [w, h, w, h]
                    found.append(np.array(truth[-1]) + shake)
                    scores.append(rng.beta(6, 2))
                    labels.append(index)
        for _ in range(rng.poisson(false_rate)):
            w, h = rng.uniform(8, 60, 2)
            x, y = rng.uniform(0, size[0] - w), rng.uniform(0, size[1] - h)
            found.append(np.array([x, y, x + w, y + h]))
            scores.append(rng.beta(2, 5))
            labels.append(int(rng.integers(len(classes))))
        matcher.add(
            image, np.array(found).reshape(-1, 4), scores, labels, np.array(truth).reshape(-1, 4), kinds, size=size
        )
    return Evaluation(
        classes=classes, manifest_digest="d" * 64, model_sha256=sha256, settings={"image_size": 320},
        records=matcher.finish(), images=names or tuple(f"frames/{i:04}.jpg" for i in range(images)),
        slices=slices or {},
    )  # fmt: skip


def picture_files(folder: Path, count: int, size: tuple[int, int] = (320, 240)) -> list[Path]:
    """JPEG files with something on them."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(1)
    paths = []
    for i in range(count):
        coarse = rng.integers(60, 200, (size[1] // 20, size[0] // 20, 3), dtype=np.uint8)
        path = folder / f"{i:04}.jpg"
        Image.fromarray(coarse).resize(size, Image.Resampling.BILINEAR).save(path, quality=80)
        paths.append(path)
    return paths


def worked_example() -> Evaluation:
    """The example of docs/gate.md: many cones, some signs, few cables, found with probability .92, .84 and .90."""
    rng = np.random.default_rng(0)
    skill = {"cone": (0.92, 3.0), "sign": (0.84, 0.6), "cable": (0.90, 0.1)}
    matcher = Matcher(3, detail=True)
    for image in range(150):
        truth, kinds, found, scores, labels = [], [], [], [], []
        for index, (chance, rate) in enumerate(skill.values()):
            for _ in range(rng.poisson(rate)):
                w, h = rng.uniform(20, 100, 2)
                x, y = rng.uniform(0, 500, 2)
                truth.append([x, y, x + w, y + h])
                kinds.append(index)
                if rng.random() < chance:
                    found.append(np.array(truth[-1]) + rng.normal(0, 0.04, 4) * [w, h, w, h])
                    scores.append(rng.beta(6, 2))
                    labels.append(index)
        boxes, objects = np.array(found).reshape(-1, 4), np.array(truth).reshape(-1, 4)
        matcher.add(image, boxes, scores, labels, objects, kinds, size=(640, 640))
    return Evaluation(
        classes=tuple(skill), manifest_digest="d" * 64, model_sha256=SHA, settings={}, records=matcher.finish(),
        images=tuple(f"{i}.jpg" for i in range(150)),
    )  # fmt: skip
