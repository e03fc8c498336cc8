"""The labelled set that `kfp-gate demo` makes: drawn, small, and hard in the ways that real sets are.

Clips of near-duplicate frames (a random split would leak), four classes of which `bolt` is a few pixels
wide, clips without any object, and class names as people write them.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CLASSES = ("cone", "barrel", "sign", "bolt")
SIZE = 160
_COLOURS = {"cone": (226, 110, 30), "barrel": (40, 90, 200), "sign": (200, 30, 60), "bolt": (20, 20, 20)}
_RADIUS = {"cone": (13, 20), "barrel": (12, 18), "sign": (12, 18), "bolt": (4, 6)}


@dataclass
class _Thing:
    name: str
    x: float
    y: float
    radius: float
    dx: float
    dy: float


def make_dataset(folder: Path, *, clips: int = 72, frames: int = 5, seed: int = 7) -> Path:
    """Draw `clips * frames` images with YOLO labels into `folder`; one clip in eight holds no object.

    Returns:
        `folder`, with `data.yaml`, `images/` and `labels/`. The same arguments give the same bytes.
    """
    from PIL import Image

    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    (folder / "labels").mkdir(exist_ok=True)
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASSES))
    (folder / "data.yaml").write_text(f"train: images\nnames:\n{names}", encoding="utf-8")
    for clip in range(clips):
        background = rng.integers(120, 215, size=3)
        texture = rng.normal(0, 9, size=(SIZE // 8, SIZE // 8, 1)).repeat(8, axis=0).repeat(8, axis=1)
        things = [] if clip % 8 == 5 else _things(rng)
        for frame in range(frames):
            pixels = background + texture + rng.normal(0, 4, size=(SIZE, SIZE, 3))
            image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8))
            lines = [_draw(image, thing, frame) for thing in things]
            stem = f"clip{clip:03d}_frame_{frame:03d}"
            image.save(folder / "images" / f"{stem}.jpg", quality=92)
            (folder / "labels" / f"{stem}.txt").write_text("".join(line for line in lines if line), encoding="utf-8")
    return folder


def _things(rng: np.random.Generator) -> list[_Thing]:
    things: list[_Thing] = []
    for name in rng.permutation([*CLASSES, *rng.choice(CLASSES, size=2), "bolt"]):
        radius = float(rng.uniform(*_RADIUS[str(name)]))
        for _ in range(20):  # a free place, so that a label never names a hidden object
            x, y = rng.uniform(radius + 8, SIZE - radius - 8, size=2)
            if all(math.hypot(x - t.x, y - t.y) > radius + t.radius + 8 for t in things):
                things.append(_Thing(str(name), x, y, radius, *rng.uniform(-0.6, 0.6, size=2)))
                break
    return things


def _draw(image: "object", thing: _Thing, frame: int) -> str:
    from PIL import ImageDraw

    draw = ImageDraw.Draw(image)  # type: ignore[arg-type]  # PIL is imported lazily, so its type has no name here
    x, y, r = thing.x + thing.dx * frame, thing.y + thing.dy * frame, thing.radius
    colour = _COLOURS[thing.name]
    if thing.name == "cone":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
        draw.line([(x - r / 2, y + r / 4), (x + r / 2, y + r / 4)], fill=(245, 245, 245), width=3)
    elif thing.name == "barrel":
        draw.rectangle([x - r * 0.7, y - r, x + r * 0.7, y + r], fill=colour)
        draw.line([(x - r * 0.7, y), (x + r * 0.7, y)], fill=(235, 200, 60), width=4)
        return _label(thing.name, x, y, 1.4 * r, 2 * r)
    elif thing.name == "sign":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=colour, outline=(245, 245, 245), width=3)
    else:
        draw.rectangle([x - r, y - r, x + r, y + r], fill=colour)
        draw.ellipse([x - r / 2, y - r / 2, x + r / 2, y + r / 2], fill=(250, 230, 90))
    return _label(thing.name, x, y, 2 * r, 2 * r)


def _label(name: str, x: float, y: float, width: float, height: float) -> str:
    values = (x / SIZE, y / SIZE, width / SIZE, height / SIZE)
    return f"{CLASSES.index(name)} " + " ".join(f"{v:.6f}" for v in values) + "\n"
