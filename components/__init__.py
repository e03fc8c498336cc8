"""The components, ready to use in a pipeline of your own.

from kfp_gate.components import split_dataset, launch_training, validation_gate, register_model
"""

from kfp_gate.components.launch_training.component import launch_training
from kfp_gate.components.preflight.component import preflight
from kfp_gate.components.record_outcome.component import record_outcome
from kfp_gate.components.register_model.component import register_model
from kfp_gate.components.split_dataset.component import split_dataset
from kfp_gate.components.validation_gate.component import validation_gate

__all__ = ["launch_training", "preflight", "record_outcome", "register_model", "split_dataset", "validation_gate"]


def __dir__() -> list[str]:
    return list(__all__)
