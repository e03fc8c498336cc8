"""The parameters that a compiled pipeline declares, and values checked against them before anything starts.

kfp's own command line guesses types from the text (`true`, `123`, a malformed dict) and turns what it cannot
read into a string, silently. Here the declared type decides.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from kfp_gate.errors import InvalidInput, Problem


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; `kind` is KFP's: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, LIST or STRUCT."""

    name: str
    kind: str
    required: bool
    default: Any = None


_EXAMPLES = {
    "STRING": "text",
    "NUMBER_INTEGER": "a whole number such as 20",
    "NUMBER_DOUBLE": "a finite number such as 0.5",
    "BOOLEAN": "true or false",
    "LIST": 'JSON such as ["map50_95"]',
    "STRUCT": 'JSON such as {"cone": {"map50": {"min": 0.8}}}',
}


def declared(text: str) -> dict[str, Parameter]:
    """The parameters of a compiled pipeline, from its YAML text (the first document is the pipeline)."""
    spec = next(iter(yaml.safe_load_all(text)))
    inputs = spec.get("root", {}).get("inputDefinitions", {}).get("parameters", {})
    return {
        name: Parameter(name, p["parameterType"], not p.get("isOptional", False), p.get("defaultValue"))
        for name, p in inputs.items()
    }


def check(parameters: Mapping[str, Parameter], given: Mapping[str, Any]) -> dict[str, Any]:
    """Values in their declared types.

    Args:
        parameters: what the pipeline declares.
        given: values by name; text is converted to the declared type.

    Raises:
        InvalidInput: unknown names (with close matches), missing required ones, values of another type; all
            of them at once.
    """
    problems, checked = [], {}
    for name, value in given.items():
        if name not in parameters:
            close = get_close_matches(name, parameters, n=2)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            problems.append(Problem(name, f"the pipeline has no such parameter{hint}"))
            continue
        try:
            checked[name] = _convert(value, parameters[name].kind)
        except ValueError:
            problems.append(Problem(name, f"{value!r} is not {_EXAMPLES[parameters[name].kind]}"))
    problems += [Problem(p.name, "is required") for p in parameters.values() if p.required and p.name not in given]
    if problems:
        raise InvalidInput(
            f"{len(problems)} parameter{'s' if len(problems) > 1 else ''} that the pipeline cannot take",
            expected="names and types that the compiled pipeline declares",
            where="pipeline parameters",
            next_step="correct the values listed above; `kfp-gate parameters` lists all with their defaults",
            problems=problems,
        )
    return checked


def _convert(value: Any, kind: str) -> Any:
    if kind == "STRING":
        if not isinstance(value, str):
            raise ValueError
        return value
    if isinstance(value, str):
        value = json.loads(value.lower() if kind == "BOOLEAN" else value)
    if kind == "NUMBER_INTEGER" and isinstance(value, float) and value.is_integer():
        value = int(value)  # YAML and protobuf write whole defaults as 16.0
    wanted: dict[str, type | tuple[type, ...]] = {
        "NUMBER_INTEGER": int, "NUMBER_DOUBLE": (int, float), "BOOLEAN": bool, "LIST": list, "STRUCT": dict,
    }  # fmt: skip
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
        raise ValueError
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError
    if kind == "NUMBER_DOUBLE" and isinstance(value, (int, float)):
        return float(value)
    return value
