"""With what a model was made and with what it was evaluated: packages that move the numbers, and image locks.

Both are kept beside the evaluation, so that a later judgement, in whatever image, says the same.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kfp_gate.evaluation.model_folder import ModelCard

LOCK_VARIABLE = "KFP_GATE_IMAGE_LOCK"
"""Digest of an image's lock, set by the image itself."""

STACK: Mapping[str, tuple[str, ...]] = {
    "torch": ("torch",), "torchvision": ("torchvision",), "ultralytics": ("ultralytics",), "numpy": ("numpy",),
    "opencv": ("opencv-python", "opencv-python-headless"), "pillow": ("pillow",),
}  # fmt: skip
"""What an evaluation's numbers depend on: a name to the distributions that may provide it."""


@dataclass(frozen=True)
class Origin:
    """What is known besides the records of an evaluation; empty where nothing is.

    Attributes:
        versions: package to version, as the model card tells of the training.
        model_lock: lock of the image in which the model was made.
        gate_lock: lock of the image in which it was evaluated.
    """

    versions: Mapping[str, str] = field(default_factory=dict)
    model_lock: str = ""
    gate_lock: str = ""


def origin_of(card: ModelCard, environ: Mapping[str, str] | None = None) -> Origin:
    """The origin of an evaluation that is made now."""
    env = os.environ if environ is None else environ
    wanted = {name for names in STACK.values() for name in names}
    versions = {name: str(version) for name, version in sorted(card.versions.items()) if name in wanted}
    return Origin(versions, card.image_lock, env.get(LOCK_VARIABLE, ""))


def origin_from(stored: Mapping[str, Any] | None) -> Origin:
    """An origin as `dataclasses.asdict` gave it; an evaluation of an older gate has none.

    Raises:
        KeyError, TypeError, AttributeError: it is not one.
    """
    if stored is None:
        return Origin()
    versions = {str(name): str(version) for name, version in stored["versions"].items()}
    return Origin(versions, str(stored["model_lock"]), str(stored["gate_lock"]))


def difference(origin: Origin, evaluated: Mapping[str, str]) -> str:
    """One sentence on the packages that differ between training and evaluation; "" if none does.

    Args:
        origin: of the model.
        evaluated: package to version, as the evaluation tells them.

    A package that only one side names says nothing: an ONNX evaluation needs no torch.
    """
    parts = []
    for name, distributions in STACK.items():
        made = {origin.versions[d] for d in distributions if d in origin.versions}
        now = {evaluated[d] for d in distributions if d in evaluated}
        if made and now and made != now:
            parts.append(f"{name} {', '.join(sorted(made))} and {', '.join(sorted(now))}")
    if not parts:
        return ""
    text = f"The model was made with other versions than it was evaluated with: {'; '.join(parts)}."
    if origin.model_lock or origin.gate_lock:
        text += f" Image locks: {origin.model_lock or 'unknown'} and {origin.gate_lock or 'unknown'}."
    return f"{text} Values near a bound may fall on its other side."
