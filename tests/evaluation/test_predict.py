"""Predictions do not depend on how they are computed: batch, shards, threads, checkpoint or module."""

from pathlib import Path

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.batches import Halving
from kfp_gate.evaluation.letterbox import letterbox, read_image
from kfp_gate.evaluation.predict import Detections, Detector, PredictSettings

from .conftest import CLASSES, SIZE, Scene, save_checkpoint, tiny_module

SETTINGS = PredictSettings(image_size=SIZE, device="cpu")


def same(a: list[Detections], b: list[Detections]) -> None:
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        for name in ("boxes", "scores", "classes"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
        assert (x.width, x.height) == (y.width, y.height)


@pytest.fixture(scope="module")
def whole(scene: Scene) -> list[Detections]:
    return list(Detector.load(scene.weights).predict(scene.images, SETTINGS))


def test_every_image_has_detections_inside_float32(whole: list[Detections], scene: Scene) -> None:
    assert len(whole) == len(scene.images)
    assert all(0 < len(d.scores) <= 300 for d in whole)
    for d in whole:
        assert (np.diff(d.scores) <= 0).all()
        assert (d.scores > SETTINGS.confidence_floor).all()
        assert (d.boxes == d.boxes.astype(np.float32)).all()
        assert d.classes.max() < len(CLASSES)


def test_batch_threads_and_shards_change_no_bit(scene: Scene, whole: list[Detections]) -> None:
    import torch

    detector = Detector.load(scene.weights)
    for batch in (1, 7, 32):
        same(whole, list(detector.predict(scene.images, PredictSettings(image_size=SIZE, batch=batch, device="cpu"))))
    shards = [list(detector.predict(scene.images[r::3], SETTINGS)) for r in range(3)]
    same(whole, [shards[i % 3][i // 3] for i in range(len(whole))])
    torch.set_num_threads(3)
    try:
        same(whole, list(detector.predict(scene.images, SETTINGS)))
        assert torch.get_num_threads() == 3, "the caller's thread count is left alone"
    finally:
        torch.set_num_threads(1)


def test_module_in_training_equals_its_checkpoint(scene: Scene, whole: list[Detections]) -> None:
    import torch

    module = tiny_module().train()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    same(whole, list(Detector.from_module(module, CLASSES).predict(scene.images, SETTINGS)))
    assert module.training
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items()), "the module is not changed"


def test_image_size_can_change_between_calls(scene: Scene, whole: list[Detections]) -> None:
    detector = Detector.load(scene.weights)
    list(detector.predict(scene.images[:2], PredictSettings(image_size=64, device="cpu")))
    same(whole, list(detector.predict(scene.images, SETTINGS)))


@pytest.mark.parametrize("name", ["yolov10n.yaml", "yolo26n.yaml"])
def test_heads_that_suppress_by_themselves(name: str, tmp_path: Path, scene: Scene) -> None:
    weights = save_checkpoint(tiny_module(name), tmp_path / "model.pt")
    detector = Detector.load(weights)
    found = list(detector.predict(scene.images[:3], PredictSettings(image_size=SIZE, max_detections=17, device="cpu")))
    assert all(0 < len(d.scores) <= 17 and (np.diff(d.scores) <= 0).all() for d in found)
    same(found, list(Detector.from_module(tiny_module(name), CLASSES).predict(
        scene.images[:3], PredictSettings(image_size=SIZE, max_detections=17, device="cpu"))))  # fmt: skip


def test_close_to_upstream(scene: Scene, whole: list[Detections]) -> None:
    """Upstream's own suppression on the same square gives the same boxes, but for float32 offsets."""
    import torch
    from ultralytics.utils.nms import non_max_suppression

    module = tiny_module().half().float().fuse(verbose=False)
    for path, ours in list(zip(scene.images, whole, strict=True))[:5]:
        square, place = letterbox(read_image(path), SIZE)
        with torch.inference_mode():
            out = module(torch.from_numpy(square)[None].float() / 255)[0]
            theirs = non_max_suppression(out, 0.001, 0.7, multi_label=True, max_det=300, nc=len(CLASSES))[0].numpy()
        assert abs(len(theirs) - len(ours.scores)) <= 3
        boxes = place.to_image(theirs[:, :4].astype(np.float64))
        gap = np.abs(boxes[:20, None] - ours.boxes[None, :40]).max(-1).min(1)
        assert (gap < 0.1).all()


def test_letterbox_keeps_places() -> None:
    image = np.zeros((50, 200, 3), np.uint8)
    image[20:30, 100:120] = 255
    square, place = letterbox(image, 96)
    assert square.shape == (3, 96, 96) and square[0, 0, 0] == 114
    rows, columns = np.nonzero(square[0] > 200)
    box = place.to_image(np.array([[columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]], np.float64))
    np.testing.assert_allclose(box, [[100, 20, 120, 30]], atol=2.5)


def test_memory_error_halves_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    import torch

    seen = []

    def forward(images: torch.Tensor) -> torch.Tensor:
        if len(images) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        seen.append(len(images))
        return images * 2

    run = Halving(forward, 16)
    images = torch.arange(11.0)
    assert torch.equal(run(images), images * 2)
    assert seen == [2, 2, 2, 2, 2, 1]
    assert "batches of 2 images" in caplog.text


@pytest.mark.parametrize(
    ("change", "part"),
    [({"image_size": 100}, "image_size"), ({"batch": 0}, "batch"), ({"confidence_floor": float("nan")}, "confidence"),
     ({"nms_iou": 0.0}, "nms_iou"), ({"max_detections": 0}, "max_detections"), ({"image_size": "64"}, "image_size"),
     ({"batch": None}, "batch"), ({"batch": 2.5}, "batch"), ({"half": "no"}, "half"), ({"device": 0}, "device"),
     ({"nms_seconds": float("nan")}, "nms_seconds")],
)  # fmt: skip
def test_settings_are_checked(change: dict, part: str) -> None:
    with pytest.raises(InvalidInput, match=part):
        PredictSettings(**change)


def test_whole_numbers_that_went_through_json_are_whole_again() -> None:
    assert repr(PredictSettings(image_size=64.0, batch=16.0)) == repr(PredictSettings(image_size=64, batch=16))


@pytest.mark.parametrize("change", [{"device": "cuda:9"}, {"device": "tpu"}, {"half": True, "device": "cpu"}])
def test_device_is_checked(change: dict, scene: Scene) -> None:
    with pytest.raises(InvalidInput):
        list(Detector.load(scene.weights).predict(scene.images[:1], PredictSettings(image_size=SIZE, **change)))
