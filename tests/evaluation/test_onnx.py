"""An exported model is judged like its checkpoint."""

from pathlib import Path

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.evaluate import evaluate
from kfp_gate.evaluation.predict import Detector, PredictSettings

from .conftest import CLASSES, SIZE, Scene, tiny_module

SETTINGS = PredictSettings(image_size=SIZE, device="cpu")


def export(path: Path, *, batch: int | None = None) -> Path:
    """The graph and metadata that upstream's exporter writes, made with plain torch and onnx."""
    import torch

    module = tiny_module().half().float().fuse(verbose=False).eval()
    module.model[-1].export = True
    module.model[-1].format = "onnx"
    example = torch.zeros(batch or 1, 3, SIZE, SIZE)
    dynamic = None if batch else {"images": {0: "batch"}, "output0": {0: "batch"}}
    with torch.no_grad():
        module(example)
        torch.onnx.export(
            module, (example,), str(path), input_names=["images"], output_names=["output0"], dynamic_axes=dynamic,
            dynamo=False, opset_version=17,
        )  # fmt: skip
    return relabelled(path, path, {"names": str(dict(enumerate(CLASSES))), "task": "detect"})


@pytest.mark.parametrize("batch", [None, 4])
def test_agrees_with_the_checkpoint(batch: int | None, scene: Scene, tmp_path: Path) -> None:
    detector = Detector.load(export(tmp_path / "model.onnx", batch=batch))
    assert detector.classes == CLASSES
    theirs = evaluate(Detector.load(scene.weights), scene.manifest, scene.images, SETTINGS, confidence=0.05)
    ours = evaluate(detector, scene.manifest, scene.images, SETTINGS, confidence=0.05)
    assert len(ours.records) == len(scene.images)
    assert abs(len(ours.records.scores) - len(theirs.records.scores)) <= 0.02 * len(theirs.records.scores)
    for name, value in theirs.metrics.numbers().items():
        assert ours.metrics[name] == pytest.approx(value, abs=0.02), name
    # Another runtime, so equal to rounding, not to the bit; but the same for every run.
    again = evaluate(detector, scene.manifest, scene.images, SETTINGS, confidence=0.05)
    np.testing.assert_array_equal(again.records.scores, ours.records.scores)


def relabelled(path: Path, target: Path, metadata: dict[str, str]) -> Path:
    """The same graph under other metadata."""
    import onnx

    model = onnx.load(str(path))
    del model.metadata_props[:]
    for key, value in metadata.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    onnx.save(model, str(target))
    return target


def test_refusals(scene: Scene, tmp_path: Path) -> None:
    fixed = export(tmp_path / "model.onnx", batch=1)
    with pytest.raises(InvalidInput, match="image_size=128"):
        list(Detector.load(fixed).predict(scene.images[:1], PredictSettings(image_size=128, device="cpu")))
    with pytest.raises(InvalidInput, match="no class names"):
        Detector.load(relabelled(fixed, tmp_path / "bare.onnx", {}))
    with pytest.raises(InvalidInput, match="'segment'"):
        Detector.load(relabelled(fixed, tmp_path / "other.onnx", {"names": "{0: 'a'}", "task": "segment"}))
