"""The components, ready to use in a pipeline of your own.

from kfp_gate.components import split_dataset, launch_training, validation_gate, register_model
"""

import inspect as _inspect  # underscored: completion would show it among the components

from kfp_gate.components.diagnose_training.component import diagnose_training
from kfp_gate.components.judge_evaluation.component import judge_evaluation
from kfp_gate.components.launch_training.component import launch_training
from kfp_gate.components.preflight.component import preflight
from kfp_gate.components.record_outcome.component import record_outcome
from kfp_gate.components.register_model.component import register_model
from kfp_gate.components.split_dataset.component import split_dataset
from kfp_gate.components.validation_gate.component import validation_gate

__all__ = [
    "diagnose_training",
    "judge_evaluation",
    "launch_training",
    "preflight",
    "record_outcome",
    "register_model",
    "split_dataset",
    "validation_gate",
]


def _show_inputs(name: str) -> None:
    """Let prompts and notebooks show what a component takes: kfp gives all of them `(*args, **kwargs)`."""
    component = globals()[name]
    inputs = component.component_spec.inputs or {}
    taken = [
        p.replace(kind=_inspect.Parameter.KEYWORD_ONLY)
        for p in _inspect.signature(component.python_func).parameters.values()
        if p.name in inputs and inputs[p.name].type != "PipelineTaskFinalStatus"
    ]
    component.__signature__ = _inspect.Signature(taken)
    component.__doc__ = component.python_func.__doc__


for _name in __all__:
    _show_inputs(_name)


def __dir__() -> list[str]:
    return list(__all__)
