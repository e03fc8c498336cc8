"""Predictions of a detector, one per image, for training and gate alike.

The weights are evaluated as they are stored: in half precision, computed in single precision (or half by choice). So an
epoch's value in training equals the gate's. Upstream's predictor and validator are not used: their loaders drop
unreadable images and batch by aspect ratio, and their suppression has a silent time limit.
"""

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.batches import Halving, in_order
from kfp_gate.evaluation.letterbox import Placement, letterbox, read_image
from kfp_gate.evaluation.onnx_model import OnnxModel
from kfp_gate.evaluation.suppression import suppress
from kfp_gate.evaluation.torch_model import TorchModel
from kfp_gate.observing.parts import PartTimer, Untimed


@dataclass(frozen=True)
class PredictSettings:
    """All that decides a prediction besides weights and image; recorded with every evaluation.

    Attributes:
        image_size: side of the square, a multiple of 32.
        batch: images per pass on a GPU. On a CPU images are computed one by one and it has no effect.
        confidence_floor: detections below it do not exist; low, as average precision needs the tail.
        nms_iou: overlap above which the worse of two boxes of a class is suppressed.
        max_detections: per image, all classes.
        half: compute in float16, on a GPU only.
        device: "auto" (the GPU if there is one), "cpu", "cuda" or "cuda:1".
        nms_seconds: what suppression of one image may take before the evaluation fails; changes no value.
    """

    image_size: int = 640
    batch: int = 16
    confidence_floor: float = 0.001
    nms_iou: float = 0.7
    max_detections: int = 300
    half: bool = False
    device: str = "auto"
    nms_seconds: float = 60.0

    def __post_init__(self) -> None:
        def whole(value: Any) -> bool:
            return real(value) and float(value).is_integer()

        def real(value: Any) -> bool:
            return isinstance(value, Real) and not isinstance(value, bool)

        # Each check is written so that NaN fails it.
        rules: dict[str, tuple[Callable[[Any], bool], str]] = {
            "image_size": (lambda v: whole(v) and v >= 32 and v % 32 == 0, "a multiple of 32"),
            "batch": (lambda v: whole(v) and v >= 1, "a whole number, at least 1"),
            "confidence_floor": (lambda v: real(v) and 0.0 <= v < 1.0, "from 0 to below 1"),
            "nms_iou": (lambda v: real(v) and 0.0 < v <= 1.0, "above 0, at most 1"),
            "max_detections": (lambda v: whole(v) and v >= 1, "a whole number, at least 1"),
            "half": (lambda v: isinstance(v, bool), "True or False"),
            "device": (lambda v: isinstance(v, str), "'auto', 'cpu', 'cuda' or 'cuda:N'"),
            "nms_seconds": (lambda v: real(v) and v >= 0, "seconds, at least 0"),
        }
        for name, (holds, expected) in rules.items():
            value = getattr(self, name)
            if not holds(value):
                raise InvalidInput(
                    f"{name}={value!r}", expected=expected, where="prediction settings", next_step=f"change {name}",
                )  # fmt: skip
        for name in ("image_size", "batch", "max_detections"):
            # Whole numbers that went through JSON may come as 16.0.
            object.__setattr__(self, name, int(getattr(self, name)))


@dataclass(frozen=True)
class Detections:
    """What a detector found in one image, best first.

    Boxes are x1 y1 x2 y2 in pixels of the original image, and may reach beyond it.
    """

    boxes: NDArray[np.float64]  # (n, 4)
    scores: NDArray[np.float32]  # (n,)
    classes: NDArray[np.int32]  # (n,) indices into the detector's classes
    width: int
    height: int


class Detector:
    """A detection model that predicts files.

    Make one with `load` or `from_module`.
    """

    def __init__(self, model: "TorchModel | OnnxModel", source: str) -> None:
        self._model = model
        self.source = source
        self.classes = model.classes

    @classmethod
    def load(cls, weights: Path) -> "Detector":
        """Read a `.pt` checkpoint of Ultralytics, or an ONNX file exported by it.

        Raises:
            InvalidInput: no such file, another format, a model that does not detect, or a checkpoint that names
                classes beyond the allow-list.
        """
        weights = Path(weights)
        if not weights.is_file():
            raise _unreadable(weights, "no such file")
        if weights.suffix == ".onnx":
            return cls(OnnxModel(weights), str(weights))
        if weights.suffix != ".pt":
            raise _unreadable(weights, f"a file of kind {weights.suffix!r}")
        return cls(TorchModel(_load_checkpoint(weights)), str(weights))

    @classmethod
    def from_module(cls, module: Any, classes: Sequence[str]) -> "Detector":
        """A detector from a module in training, which is copied and not changed, rounded to half as a checkpoint is."""
        rounded = copy.deepcopy(module).half().float()
        return cls(TorchModel(rounded, tuple(classes)), "module in training")

    def predict(
        self, paths: Sequence[Path], settings: PredictSettings, *, digests: Sequence[str] | None = None,
        parts: PartTimer | None = None,
    ) -> Iterator[Detections]:  # fmt: skip
        """Detections of every image, in order; memory does not grow with their number.

        Args:
            digests: the sha256 of each file, checked while reading.
            parts: is told what takes how long: `weights`, `load`, `transfer`, `forward` and `suppress`, in whichever
                thread works on it.

        Raises:
            InvalidInput: a device that is not there, or half precision on a CPU.
            Broken: an image that cannot be read, outputs that are not finite, suppression that takes too long, memory
                that does not suffice for one image.
        """
        import torch

        device = _device(settings)
        sums = list(digests) if digests is not None else [""] * len(paths)
        items = list(zip(map(Path, paths), sums, strict=True))
        threads = max(1, min(torch.get_num_threads(), len(items)))
        single = device == "cpu"
        during = (parts or Untimed()).during
        with during("weights"):
            forward = self._model.forward(device, settings.image_size, settings.half, settings.max_detections)

        def load(item: tuple[Path, str]) -> tuple[Path, NDArray[np.uint8], Placement]:
            path, digest = item
            with during("load"):
                return path, *letterbox(read_image(path, digest), settings.image_size)

        def finish(output: Any, path: Path, place: Placement) -> Detections:
            boxes, scores, classes = suppress(
                output, ranked=self._model.ranked, confidence_floor=settings.confidence_floor,
                nms_iou=settings.nms_iou, max_detections=settings.max_detections, seconds=settings.nms_seconds,
                where=str(path),
            )  # fmt: skip
            if len(classes) and not (classes.min() >= 0 and classes.max() < len(self.classes)):
                raise Broken(
                    f"class indices up to {classes.max()} from a model of {len(self.classes)} classes",
                    expected="indices of its own classes", where=str(path), next_step="check the model's class names",
                )  # fmt: skip
            return Detections(place.to_image(boxes), scores, classes, place.width, place.height)

        def whole(item: tuple[Path, str]) -> Detections:
            path, square, place = load(item)
            with torch.inference_mode():
                with during("forward"):
                    output = _run(forward, torch.from_numpy(square)[None], path)[0]
                with during("suppress"):
                    return finish(output, path, place)

        if items:
            # The head lays out its anchors at the first pass; not in several threads at once.
            with torch.inference_mode(), during("forward"):
                size = settings.image_size
                _run(forward, torch.zeros((1, 3, size, size), dtype=torch.uint8, device=device), items[0][0])
        if single:
            before = torch.get_num_threads()
            try:
                # In a thread this call sets that thread, and the default of threads not yet started ...
                yield from in_order(whole, items, threads=threads, initializer=lambda: torch.set_num_threads(1))
            finally:
                # ... which is set back here, for the training that goes on.
                torch.set_num_threads(before)
            return
        halving = Halving(forward, settings.batch)
        loaded = in_order(load, items, threads=max(1, min(8, os.cpu_count() or 1)), initializer=lambda: None)
        for chunk in _chunks(loaded, settings.batch):
            with torch.inference_mode(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
                with during("transfer"):
                    images = torch.from_numpy(np.stack([square for _, square, _ in chunk])).to(device)
                with during("forward"):
                    outputs = _run(halving, images, chunk[0][0])
                    if parts is not None:
                        # Suppression asks for the outputs at once, and would be charged with computing them.
                        torch.cuda.synchronize(device)
                with during("suppress"):
                    results = [finish(o, path, place) for o, (path, _, place) in zip(outputs, chunk, strict=True)]
            yield from results


def _load_checkpoint(weights: Path) -> Any:
    """The module of a checkpoint, in single precision.

    Restricted loading: a checkpoint is a pickle, and an unrestricted one could run code of whoever made it.
    """
    offline()
    from ultralytics.nn.tasks import torch_safe_load

    try:
        checkpoint, _ = torch_safe_load(str(weights), safe_only=True)
        module = checkpoint.get("ema") or checkpoint["model"]
        module = module.float()
        task = getattr(module, "task", None) or type(module).__name__
    except (
        Exception
    ) as error:  # upstream raises TypeError, KeyError, RuntimeError, EOFError, pickle and zip errors here
        raise _unreadable(
            weights, f"a file that does not load as a checkpoint ({type(error).__name__}: {_first_line(error)})"
        ) from error
    head = type(module.model[-1]).__name__
    if task not in ("detect", "DetectionModel", "YOLOv10DetectionModel") or not hasattr(module.model[-1], "nc"):
        raise _unreadable(weights, f"a model for the task {task!r}")
    if head not in ("Detect", "v10Detect"):
        raise _unreadable(weights, f"a model with the head {head!r}")
    return module


def offline() -> None:
    """Keep ultralytics from the network and from installing packages; must run before its first import."""
    os.environ.setdefault("YOLO_OFFLINE", "1")
    os.environ.setdefault("YOLO_AUTOINSTALL", "0")


def _run(forward: Callable[[Any], Any], images: Any, path: Path) -> Any:
    try:
        return forward(images)
    except RuntimeError as error:
        raise Broken(
            f"the model failed: {_first_line(error)}", expected="an output per image", where=str(path),
            next_step="check image_size, and that the machine has memory for it",
        ) from error  # fmt: skip


def _device(settings: PredictSettings) -> str:
    import torch

    name = settings.device
    if name == "auto":
        name = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
    problem = ""
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            problem = f"device {name!r}"
        elif device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            problem = f"device {name!r} on a machine with {torch.cuda.device_count()} GPUs"
        elif settings.half and device.type == "cpu":
            problem = "half=True on a CPU"
    except RuntimeError:
        problem = f"device {name!r}"
    if problem:
        raise InvalidInput(
            problem, expected="'auto', 'cpu', or 'cuda:N' of a GPU that is there; half on a GPU only",
            where="prediction settings", next_step="change device or half, or ask for a GPU",
        )  # fmt: skip
    return str(device)


def _chunks(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for item in items:
        chunk.append(item)
        if len(chunk) == size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), "")


def _unreadable(weights: Path, found: str) -> InvalidInput:
    return InvalidInput(
        found, expected="a detection checkpoint of Ultralytics (.pt) or its ONNX export (.onnx)", where=str(weights),
        next_step="give the weights file that training wrote",
    )  # fmt: skip
