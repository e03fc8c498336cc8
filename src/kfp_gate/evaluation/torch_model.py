"""PyTorch modules of Ultralytics, run for inference."""

from collections.abc import Callable
from typing import Any

from kfp_gate.errors import InvalidInput


class TorchModel:
    """An Ultralytics detection module, fused, in evaluation mode."""

    def __init__(self, module: Any, classes: tuple[str, ...] | None = None) -> None:
        names = module.names if isinstance(module.names, dict) else dict(enumerate(module.names))
        self.classes = classes if classes is not None else tuple(str(names[i]) for i in range(len(names)))
        head = module.model[-1]
        if int(head.nc) != len(self.classes):
            raise InvalidInput(
                f"{len(self.classes)} class names for a model with {head.nc} classes", expected="one name per class",
                where="model", next_step="give the class names of the data set the model was trained on",
            )  # fmt: skip
        self.ranked = bool(getattr(head, "end2end", False))
        module.eval()
        # A criterion left by training holds the trainer's tensors.
        module.criterion = None
        module.requires_grad_(False)
        self._module = module.fuse(verbose=False)

    def forward(self, device: str, image_size: int, half: bool, max_detections: int) -> Callable[[Any], Any]:
        """The model on a device as a function of (B, 3, S, S) uint8 tensors."""
        import torch

        kind = torch.float16 if half else torch.float32
        # Channels last: a tenth less time for a single image on a CPU.
        layout = torch.channels_last if device == "cpu" else torch.contiguous_format
        module = self._module.to(device=device, dtype=kind, memory_format=layout)
        head = module.model[-1]
        # A head that suppresses by itself has its own limit; anchors of an earlier size must not stay.
        head.max_det, head.shape = max_detections, None

        def run(images: Any) -> Any:
            output = module((images.to(kind) / 255).contiguous(memory_format=layout))
            return (output[0] if isinstance(output, list | tuple) else output).float()

        return run
