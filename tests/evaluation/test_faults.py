"""What goes wrong in an evaluation stops it with a message that names the thing; nothing is dropped in silence."""

import dataclasses
import shutil
from pathlib import Path

import pytest

from kfp_gate.errors import Broken, InvalidInput, KfpGateError
from kfp_gate.evaluation.batches import Halving
from kfp_gate.evaluation.evaluate import evaluate
from kfp_gate.evaluation.predict import Detector, PredictSettings

from .conftest import CLASSES, SIZE, Scene, make_manifest, save_checkpoint, tiny_module, write_images

SETTINGS = PredictSettings(image_size=SIZE, device="cpu")


def run(scene: Scene, images: list[Path] | None = None, manifest=None, settings: PredictSettings = SETTINGS, **options):
    detector = Detector.load(scene.weights)
    return evaluate(detector, manifest or scene.manifest, images or scene.images, settings, **options)


def copied(scene: Scene, folder: Path) -> list[Path]:
    return [Path(shutil.copy(p, folder / p.name)) for p in scene.images]


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("model.pt", None, "no such file"),
        ("model.pt", b"", "does not load"),
        ("model.pt", b"not a checkpoint", "does not load"),
        ("model.pt", "truncated", "does not load"),
        ("model.pt", "pickle", "does not load"),
        ("model.pt", "state dict", "does not load"),
        ("model.pt", "segment", "SegmentationModel"),
        ("model.onnx", b"not onnx", "onnxruntime refuses"),
        ("model.bin", b"x", "kind '.bin'"),
    ],
)
def test_unreadable_model(name: str, content, part: str, tmp_path: Path, scene: Scene) -> None:
    path = tmp_path / name
    if content == "truncated":
        path.write_bytes(scene.weights.read_bytes()[:5000])
    elif content == "state dict":
        import torch

        torch.save({"model": tiny_module().state_dict()}, path)
    elif content == "segment":
        from ultralytics.nn.tasks import SegmentationModel

        save_checkpoint(SegmentationModel("yolo11n-seg.yaml", nc=2, verbose=False), path)
    elif content == "pickle":
        import torch

        torch.save({"ema": None, "model": Hostile(tmp_path / "was here")}, path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        Detector.load(path)
    assert part in caught.value.found
    assert caught.value.where == str(path)
    assert not (tmp_path / "was here").exists(), "a checkpoint must not run code"


class Hostile:
    """A pickle that touches a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("damage", ["vanished", "empty", "text", "truncated", "changed"])
def test_image_that_is_not_what_the_manifest_lists(damage: str, scene: Scene, tmp_path: Path) -> None:
    images = copied(scene, tmp_path)
    bad = images[13]
    if damage == "vanished":
        bad.unlink()
    elif damage == "changed":
        shutil.copy(images[14], bad)
    else:
        bad.write_bytes({"empty": b"", "text": b"no image", "truncated": bad.read_bytes()[:40]}[damage])
    with pytest.raises(Broken) as caught:
        run(scene, images)
    assert caught.value.where == str(bad)


def test_unreadable_image_without_digest(tmp_path: Path, scene: Scene) -> None:
    """Training's validation gives no digests; an unreadable image stops it all the same."""
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"no image")
    with pytest.raises(Broken, match="no image"):
        list(Detector.load(scene.weights).predict([scene.images[0], bad], SETTINGS))


def test_manifest_of_another_size(scene: Scene) -> None:
    table = scene.manifest.table
    place = table.column_names.index("width")
    import pyarrow as pa

    wider = table.set_column(
        place, table.schema.field("width"), pa.array([w + 1 for w in table["width"].to_pylist()], table["width"].type)
    )
    with pytest.raises(Broken, match="pixels"):
        run(scene, manifest=dataclasses.replace(scene.manifest, table=wider))


def test_empty_test_set(scene: Scene) -> None:
    empty = dataclasses.replace(scene.manifest, table=scene.manifest.table.slice(0, 0))
    with pytest.raises(InvalidInput, match="without images"):
        evaluate(Detector.load(scene.weights), empty, [], SETTINGS)


def test_paths_that_do_not_fit_the_manifest(scene: Scene) -> None:
    with pytest.raises(Broken, match="20 image files"):
        run(scene, scene.images[:-1])


def test_outputs_that_are_not_finite(scene: Scene, tmp_path: Path) -> None:
    import torch

    for value in (float("nan"), float("inf")):
        module = tiny_module()
        with torch.no_grad():
            module.model[-1].cv2[0][-1].bias[0] = value
        weights = save_checkpoint(module, tmp_path / "model.pt")
        with pytest.raises(Broken, match="not finite") as caught:
            evaluate(Detector.load(weights), scene.manifest, scene.images, SETTINGS)
        assert caught.value.where == str(scene.images[0])


def test_suppression_that_ran_out_of_time(scene: Scene) -> None:
    with pytest.raises(Broken, match="suppression of") as caught:
        run(scene, settings=dataclasses.replace(SETTINGS, nms_seconds=0.0))
    assert caught.value.where == str(scene.images[0])


def test_one_image_does_not_fit(scene: Scene) -> None:
    import torch

    def forward(images: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    with pytest.raises(Broken, match="one image") as caught:
        Halving(forward, 8)(torch.zeros(5, 3, 32, 32))
    assert "image_size" in caught.value.next_step


def test_model_that_fails(scene: Scene) -> None:
    """A module whose layers do not fit each other."""
    import torch

    module = tiny_module()
    odd = torch.nn.Conv2d(7, 7, 1)
    odd.f, odd.i = module.model[3].f, module.model[3].i
    module.model[3] = odd
    with pytest.raises(Broken, match="the model failed"):
        list(Detector.from_module(module, CLASSES).predict(scene.images[:1], SETTINGS))


def test_unknown_slice(scene: Scene) -> None:
    with pytest.raises(InvalidInput, match="weather"):
        run(scene, slices=("weather",))


def test_weak_model_is_no_fault(scene: Scene, tmp_path: Path) -> None:
    """A model that finds nothing is judged like any other: with values and reasons."""
    module = tiny_module()
    for branch in module.model[-1].cv3:
        branch[-1].bias.data.fill_(-50.0)
    weights = save_checkpoint(module, tmp_path / "model.pt")
    found = evaluate(Detector.load(weights), scene.manifest, scene.images, SETTINGS)
    assert len(found.records.scores) == 0
    assert found.metrics["map50"] == found.metrics["recall"] == 0.0
    assert found.metrics["undetected_image_rate"] == 1.0


def test_first_failure_stops_the_work(tmp_path: Path, scene: Scene) -> None:
    """The rest of a long list is not predicted after a failure, and threads end."""
    import threading
    import time

    images = write_images(tmp_path / "many", 300)
    images[5].unlink()
    before = threading.active_count()
    detector = Detector.load(scene.weights)
    begin = time.monotonic()
    with pytest.raises(Broken):
        list(detector.predict(images, SETTINGS))
    assert threading.active_count() <= before
    assert time.monotonic() - begin < 60


@pytest.mark.parametrize("message", ["missing image", "other classes", "unreadable model"])
def test_messages_say_what_where_and_what_next(message: str, scene: Scene, tmp_path: Path) -> None:
    """Byte for byte, but for paths."""
    try:
        if message == "missing image":
            run(scene, [*scene.images[:-1], tmp_path / "gone.png"])
        elif message == "other classes":
            run(scene, manifest=make_manifest(scene.images, (*CLASSES[:3], "cone")))
        else:
            (tmp_path / "model.pt").write_bytes(b"hello")
            Detector.load(tmp_path / "model.pt")
    except KfpGateError as error:
        text = str(error).replace(str(tmp_path), "DIR")
    assert text == MESSAGES[message]


MESSAGES = {
    "missing image": """\
found:     no readable file (No such file or directory)
expected:  the image that the manifest lists
where:     DIR/gone.png
next step: restore the file, or split the data set again if it changed on purpose""",
    "other classes": """\
found:     a model with other classes: it lacks ['cone'] and adds ['a/b']
expected:  the classes of the data set: ['circle', '원뿔 (소형)', '50%', 'cone']
where:     model
next step: judge the model on a data set with its classes, or train it on this one""",
    "unreadable model": """\
found:     a file that does not load as a checkpoint (KeyError: 101)
expected:  a detection checkpoint of Ultralytics (.pt) or its ONNX export (.onnx)
where:     DIR/model.pt
next step: give the weights file that training wrote""",
}
