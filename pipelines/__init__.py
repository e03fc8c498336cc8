"""The pipelines: compositions of the components, one file each. Nothing here computes."""

from kfp_gate.pipelines.diagnose import diagnose, make_diagnose
from kfp_gate.pipelines.gate import gate, make_gate
from kfp_gate.pipelines.gate_existing_model import gate_existing_model, make_gate_existing_model
from kfp_gate.pipelines.rejudge import make_rejudge, rejudge
from kfp_gate.pipelines.settings import CompileOptions

MAKERS = {
    "gate": make_gate,
    "gate_existing_model": make_gate_existing_model,
    "rejudge": make_rejudge,
    "diagnose": make_diagnose,
}
"""Name of the compiled file to the function that makes the pipeline for given compile options."""

__all__ = [
    "MAKERS",
    "CompileOptions",
    "diagnose",
    "gate",
    "gate_existing_model",
    "make_diagnose",
    "make_gate",
    "make_gate_existing_model",
    "make_rejudge",
    "rejudge",
]
