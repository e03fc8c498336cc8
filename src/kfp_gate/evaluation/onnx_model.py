"""ONNX models, run by onnxruntime."""

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kfp_gate.errors import Broken, InvalidInput


class OnnxModel:
    """A detection model exported by Ultralytics, which writes class names and task into the file's metadata.

    Args:
        path: the .onnx file.

    Raises:
        InvalidInput: onnxruntime is not installed, the file is no ONNX model, or it lacks class names.
    """

    def __init__(self, path: Path) -> None:
        try:
            import onnxruntime  # type: ignore[import-untyped]  # it ships no types
        except ImportError:
            raise InvalidInput(
                "an ONNX model without onnxruntime installed", expected="onnxruntime", where=str(path),
                next_step="install the extra kfp-gate[onnx], or give the .pt weights",
            ) from None  # fmt: skip
        self._path = path
        self._session = self._open(onnxruntime, ["CPUExecutionProvider"])
        meta = self._session.get_modelmeta().custom_metadata_map
        try:
            names = ast.literal_eval(meta["names"])
            self.classes = tuple(str(names[i]) for i in range(len(names)))
        except (KeyError, ValueError, SyntaxError, TypeError):
            raise self._refused("no class names in the metadata") from None
        if meta.get("task", "detect") != "detect":
            raise self._refused(f"a model for the task {meta['task']!r}")
        self.ranked = meta.get("end2end", "False") == "True" or _shape(self._session.get_outputs()[0])[-1] == 6
        self._input = self._session.get_inputs()[0]

    def _check(self, image_size: int, half: bool) -> None:
        """Refuse settings that the file was not exported for."""
        sides = [s for s in _shape(self._input)[2:] if isinstance(s, int)]
        if any(s != image_size for s in sides):
            raise InvalidInput(
                f"image_size={image_size}", expected=f"{sides[0]}, for which the model was exported",
                where=str(self._path), next_step="use that size, or export the model with dynamic=True",
            )  # fmt: skip
        if half and self._input.type != "tensor(float16)":
            raise InvalidInput(
                "half=True for an ONNX file in single precision", expected="half=False", where=str(self._path),
                next_step="precision is fixed at export: export with half=True, or leave half off",
            )  # fmt: skip

    def forward(self, device: str, image_size: int, half: bool, max_detections: int) -> Callable[[Any], Any]:
        """The model on a device as a function of (B, 3, S, S) uint8 tensors.

        The limit of a head that suppresses by itself was fixed at export; the caller cuts to a lower one.

        Raises:
            InvalidInput: an image size that the file was not exported for, a GPU without onnxruntime-gpu, or `half`
                for a file in single precision.
        """
        import numpy as np
        import onnxruntime
        import torch

        self._check(image_size, half)

        kind = np.float16 if self._input.type == "tensor(float16)" else np.float32
        rows = _shape(self._input)[0]
        providers: list[Any] = ["CPUExecutionProvider"]
        if device.startswith("cuda"):
            if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
                raise InvalidInput(
                    f"device {device!r} for an ONNX model", expected="onnxruntime-gpu", where=str(self._path),
                    next_step="install onnxruntime-gpu in this image, or use device='cpu'",
                )  # fmt: skip
            providers = [("CUDAExecutionProvider", {"device_id": int(device.partition(":")[2] or 0)}), *providers]
        session = self._open(onnxruntime, providers)

        def run(images: Any) -> Any:
            data = images.cpu().numpy().astype(kind) / kind(255)
            # A file with a fixed batch takes exactly that many: pad, then cut.
            step = rows if isinstance(rows, int) else len(data)
            parts = []
            for start in range(0, len(data), step):
                part = data[start : start + step]
                full = np.concatenate([part, np.zeros((step - len(part), *part.shape[1:]), kind)])
                try:
                    parts.append(session.run(None, {self._input.name: full})[0][: len(part)])
                except Exception as error:
                    raise Broken(
                        f"the ONNX runtime failed: {error}", expected="an output per image", where=str(self._path),
                        next_step="run the model alone with onnxruntime; export it again if it fails there too",
                    ) from error  # fmt: skip
            return torch.from_numpy(np.concatenate(parts).astype(np.float32))

        return run

    def _open(self, onnxruntime: Any, providers: list[Any]) -> Any:
        options = onnxruntime.SessionOptions()
        # One core per session run: images are computed side by side.
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        try:
            return onnxruntime.InferenceSession(self._path.read_bytes(), options, providers=providers)
        except Exception as error:  # onnxruntime's own classes have no common base but RuntimeError and Exception
            raise self._refused(f"a file that onnxruntime refuses ({str(error).splitlines()[0]})") from error

    def _refused(self, found: str) -> InvalidInput:
        return InvalidInput(
            found, expected="a detection model exported with `yolo export format=onnx`", where=str(self._path),
            next_step="export the model again, or give the .pt weights",
        )  # fmt: skip


def _shape(value: Any) -> list[Any]:
    return list(value.shape)
