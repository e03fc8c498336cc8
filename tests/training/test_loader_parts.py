"""The timed train loader against upstream's own: the same bits, and all of its time in parts.

Fails when upstream's structure changes, so that a part would silently be counted as another.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import LocalDataset, materialize
from kfp_gate.observing.loading import KEY, PARTS, batches_ready, unwrap

from .scene import make_scene

TRANSFORMS = {"Mosaic", "CopyPaste", "RandomPerspective", "MixUp", "CutMix", "Albumentations", "RandomHSV",
              "RandomFlip", "Format"}  # fmt: skip
READING = {"open", "read", "decode", "resize", "labels"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalDataset]:
    home = tmp_path_factory.mktemp("loader")
    scene = make_scene(home / "scene", train=10, val=4)
    before = dict(os.environ)
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import Ranks

    upstream.prepare(home / "config", Ranks())
    yield materialize({"train": read_manifest(scene.train)}, home / "data")
    os.environ.clear()
    os.environ.update(before)


def make_loader(data: LocalDataset, *, timed: bool, workers: int = 0, batch: int = 4, context: str = "") -> Any:
    import torch
    from ultralytics.cfg import get_cfg
    from ultralytics.data.build import build_dataloader, build_yolo_dataset
    from ultralytics.data.utils import check_det_dataset

    from kfp_gate.training.loader_parts import instrument
    from kfp_gate.training.stand_ins import LoaderStart

    hyp = {"imgsz": 64, "task": "detect", "mixup": 0.5, "cutmix": 0.3, "copy_paste": 0.2}
    yaml = check_det_dataset(str(data.data_yaml), autodownload=False)
    dataset = build_yolo_dataset(get_cfg(overrides=hyp), yaml["train"], batch, yaml, stride=32)
    torch.manual_seed(0)
    loader = build_dataloader(dataset, batch, workers, device="cpu")
    loader.worker_init_fn = LoaderStart(loader.worker_init_fn, None)
    if context:
        loader.multiprocessing_context = context
    if timed:
        instrument(loader)
    return loader


def seed() -> None:
    import torch

    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)


def test_the_same_batches_as_without(data: LocalDataset) -> None:
    import torch

    found = []
    for timed in (False, True):
        loader = make_loader(data, timed=timed)
        seed()
        batches = [dict(b) for b in loader] + [dict(b) for b in loader]
        found.append((batches, random.random(), float(np.random.random()), torch.rand(1)))
    (plain, *plain_draws), (timed_batches, *timed_draws) = found
    assert plain_draws == timed_draws and len(plain) == len(timed_batches) == 6
    for a, b in zip(plain, timed_batches, strict=True):
        assert b.pop(KEY).parts and list(a) == list(b)
        assert a["im_file"] == b["im_file"]
        for key in ("img", "cls", "bboxes", "batch_idx"):
            assert torch.equal(a[key], b[key]), key


def test_all_parts_are_told_apart(data: LocalDataset) -> None:
    loader = make_loader(data, timed=True)
    seed()
    # What is loaded outside of a batch, as a resume does, is of no batch.
    loader.dataset.load_image(0)
    sums: dict[str, list[float]] = {}
    read = 0
    for batch in loader:
        batch, made = unwrap(batch)
        assert made is not None and KEY not in batch
        read += made.bytes
        for name, values in made.parts.items():
            sums[name] = [a + b for a, b in zip(sums.get(name, [0.0, 0.0, 0]), values, strict=True)]
    assert set(sums) == READING | {"collate", "other"} | {f"transform:{t}" for t in TRANSFORMS}
    assert all(wall > 0 and cpu >= 0 and calls > 0 for wall, cpu, calls in sums.values())
    # Every file that was read was read once, in one piece, after one look and one open.
    images = sums["read"][2]
    assert images == sums["decode"][2] and sums["open"][2] == 2 * images
    assert sums["labels"][2] == sums["resize"][2] >= 10, "a mosaic asks for more images than the batch has"
    assert sums["collate"][2] == len(loader) and sums["other"][2] == 10
    sizes = [p.stat().st_size for p in data.images["train"]]
    assert min(sizes) * images <= read <= max(sizes) * images
    assert sums["transform:Mosaic"][2] >= 10
    assert PARTS.take() == {}


def test_transforms_stay_timed_when_mosaics_end(data: LocalDataset) -> None:
    from copy import copy

    from ultralytics.cfg import get_cfg

    loader = make_loader(data, timed=True)
    loader.dataset.close_mosaic(copy(get_cfg(overrides={"imgsz": 64, "task": "detect"})))
    _, made = unwrap(next(iter(loader)))
    assert made is not None and {"transform:RandomHSV", "transform:Format"} <= set(made.parts)
    assert made.parts["labels"][2] == 4, "no mosaic any more"


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.all_only)])
def test_loader_processes_send_their_parts_with_the_batch(data: LocalDataset, context: str) -> None:
    loader = make_loader(data, timed=True, workers=2, context=context)
    try:
        for batch in loader:
            ready = batches_ready(loader.iterator)
            assert ready is not None and 0 <= ready <= 2 * 4
            batch, made = unwrap(batch)
            assert made is not None and made.bytes > 0
            assert READING | {"collate", "transform:Mosaic"} <= set(made.parts)
            assert made.parts["collate"][2] == 1 and made.parts["other"][2] == len(batch["im_file"])
    finally:
        loader.close()
    assert batches_ready(iter([])) is None


def test_missing_and_empty_files_fail_as_upstream_says(data: LocalDataset, tmp_path: Path) -> None:
    loader = make_loader(data, timed=True)
    from ultralytics.data.base import imread

    assert imread(str(tmp_path / "gone.png")) is None
    (tmp_path / "empty.png").touch()
    assert imread(str(tmp_path / "empty.png")) is None
    loader.dataset.im_files[0] = str(tmp_path / "gone.png")
    with pytest.raises(FileNotFoundError):
        loader.dataset.load_image(0)
