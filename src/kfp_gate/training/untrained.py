"""The base model with a head for the data set's classes, before any training: what the gate's path is tried with.

It predicts nonsense, and it has the architecture, the file format and the class names that the trained one will have.
"""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.predict import Detector, offline
from kfp_gate.training.weights import LICENSE


def write_untrained(start: Path, classes: Sequence[str], target: Path) -> None:
    """Write a checkpoint as training will, with weights of no value.

    Args:
        start: a `.pt` or `.yaml` file, as `base_model.resolve` finds it.
        classes: of the data set, by index.
        target: a `.pt` file.

    Raises:
        InvalidInput: the architecture or the checkpoint cannot be built.
    """
    offline()
    import torch
    from ultralytics.nn.tasks import DetectionModel, torch_safe_load, yaml_model_load

    if start.suffix == ".pt":
        Detector.load(start)  # says what is wrong with a file that is no detector
    try:
        if start.suffix == ".pt":
            checkpoint, _ = torch_safe_load(str(start), safe_only=True)
            architecture = deepcopy((checkpoint.get("ema") or checkpoint["model"]).yaml)
        else:
            architecture = yaml_model_load(start)
        module = DetectionModel(architecture, ch=3, nc=len(classes), verbose=False)
    except Exception as error:  # upstream raises whatever its parser runs into
        raise InvalidInput(
            f"base model {start.name!r} cannot be built ({type(error).__name__}: {str(error).splitlines()[:1]})",
            expected="a detection architecture that this release of ultralytics knows", where="base_model",
            next_step="check the file, or choose an installed architecture such as yolo11n.yaml",
        ) from error  # fmt: skip
    module.names = dict(enumerate(classes))
    module.args = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": -1, "model": module.half().eval(), "ema": None, "train_args": {}, "license": LICENSE}, target)
