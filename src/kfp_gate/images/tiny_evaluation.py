"""A dataset of a few drawn images, walked from labels to verdict with an untrained model.

Inside an image this proves more than imports do: shared libraries are loaded, what is compiled on its first call is
compiled, and on a node with a GPU the kernels run there. What the model finds is of no interest; that every image comes
back, and that judging the stored evaluation again gives the same verdict, is.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory

from kfp_gate.errors import Broken

CLASSES = ("원뿔 (소형)", "50% bolt")
"""Names that a locale, a font or a tracker may trip over."""

IMAGES = 9
SIDE = 96
ARCHITECTURE = "yolo11n.yaml:depth=0.33,width=0.125"


def run() -> str:
    """Split, predict, match, judge, report, and judge again.

    Returns:
        One line: how many images, on which device, in how many seconds.

    Raises:
        KfpGateError: a step of the path refused or broke.
    """
    import torch

    from kfp_gate.data.manifest import read_manifest
    from kfp_gate.data.splitting import split_dataset
    from kfp_gate.evaluation.predict import PredictSettings
    from kfp_gate.gate.run import GateOutputs, judge, validate
    from kfp_gate.gate.settings import GateSettings
    from kfp_gate.training.base_model import resolve
    from kfp_gate.training.untrained import write_untrained

    start = time.monotonic()
    with TemporaryDirectory(prefix="kfp-gate-verify-") as room:
        folder = Path(room)
        _draw(folder / "dataset")
        split_dataset(str(folder / "dataset"), group_rule="none", shares=(0.34, 0.33, 0.33)).save(folder / "split")
        manifest = next((folder / "split").rglob("test.parquet"))
        weights = folder / "untrained.pt"
        write_untrained(resolve(ARCHITECTURE, folder), CLASSES, weights)
        settings = GateSettings(allow_unproven_separation=True, resamples=20)
        out = GateOutputs(folder / "evaluation", folder / "verdict.json", folder / "report.html")
        validate(weights, manifest, settings, out, predict=PredictSettings(image_size=SIDE, batch=2))
        judge(out.evaluation, settings, verdict=folder / "again.json")
        if (folder / "again.json").read_bytes() != out.verdict.read_bytes():
            raise Broken(
                "another verdict from the stored evaluation",
                expected="the verdict of the gate, byte for byte",
                where="tiny evaluation",
                next_step="compare the packages of this environment with the image's lock",
            )
        count = len(read_manifest(manifest))
    gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if gpu else "the CPU: no GPU is visible here"
    seconds = time.monotonic() - start
    return f"evaluated and judged {count} drawn images on {device} with torch {torch.__version__} in {seconds:.1f} s"


def _draw(folder: Path) -> None:
    """A YOLO folder: one bright rectangle an image on noise that differs, so that no two images are near-duplicates."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    names = "".join(f"  {index}: {name!r}\n" for index, name in enumerate(CLASSES))
    (folder / "data.yaml").write_text(f"path: .\ntrain: images\nnames:\n{names}", encoding="utf-8")
    for number in range(IMAGES):
        # Blocks of 12 pixels: a perceptual hash sees large areas, not pixels.
        blocks = random.integers(0, 160, (SIDE // 12, SIDE // 12, 3), dtype=np.uint8)
        pixels = blocks.repeat(12, axis=0).repeat(12, axis=1)
        x, y, w, h = (int(value) for value in random.integers((0, 0, 16, 16), (48, 48, 40, 40)))
        pixels[y : y + h, x : x + w] = 255
        Image.fromarray(pixels).save(folder / "images" / f"scene{number}.png")
        box = ((x + w / 2) / SIDE, (y + h / 2) / SIDE, w / SIDE, h / SIDE)
        line = " ".join([str(number % len(CLASSES)), *(f"{value:.6f}" for value in box)])
        (folder / "labels" / f"scene{number}.txt").write_text(f"{line}\n", encoding="utf-8")
