"""The parameters that a compiled pipeline declares, and values checked against them before anything starts.

kfp's own command line guesses types from the text (`true`, `123`, a malformed dict) and turns what it cannot
read into a string, silently. Here the declared type decides.
"""

import json
import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import yaml

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.submitting.guessing import difference, meant


@dataclass(frozen=True)
class Parameter:
    """One declared parameter; `kind` is KFP's: STRING, NUMBER_INTEGER, NUMBER_DOUBLE, BOOLEAN, LIST or STRUCT."""

    name: str
    kind: str
    required: bool
    default: Any = None
    description: str = ""


# The C loader is the safe one too, and reads a pipeline ten times faster; wheels have it, some builds do not.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_EXAMPLES = {
    "STRING": "text",
    "NUMBER_INTEGER": "a whole number such as 20",
    "NUMBER_DOUBLE": "a finite number such as 0.5",
    "BOOLEAN": "true or false",
    "LIST": 'JSON such as ["map50_95"]',
    "STRUCT": 'JSON such as {"cone": {"map50": {"min": 0.8}}}',
}


_WORDS = {
    "STRING": "text",
    "NUMBER_INTEGER": "whole number",
    "NUMBER_DOUBLE": "number",
    "BOOLEAN": "true or false",
    "LIST": "list",
    "STRUCT": "dict",
}


def pipeline_spec(text: str, where: str = "the pipeline's YAML") -> dict[str, Any]:
    """The pipeline in `text`, the YAML that the compiler wrote; its second document is about the platform.

    Raises:
        InvalidInput: it is not YAML, or not a compiled pipeline.
    """
    try:
        spec = next(iter(yaml.load_all(text, _Loader)), None)  # either is a safe loader
        found = f"YAML of another kind: {type(spec).__name__}" if spec else "no content"
    except (yaml.YAMLError, ValueError) as error:
        spec, found = None, f"no YAML: {str(error).splitlines()[0]}"
    if isinstance(spec, dict):
        missing = [key for key in ("pipelineInfo", "root", "components", "deploymentSpec") if key not in spec]
        if not missing:
            return spec
        found = f"YAML without {' and '.join(missing)}"
    raise InvalidInput(
        found, expected="a pipeline as `kfp-gate compile` or `kfp dsl compile` writes it", where=where,
        next_step="give the compiled YAML, for instance compiled/gate.yaml",
    )  # fmt: skip


def declared(text: str, where: str = "the pipeline's YAML") -> dict[str, Parameter]:
    """The parameters of a compiled pipeline, from its YAML text.

    Raises:
        InvalidInput: see `pipeline_spec`.
    """
    return declared_in(pipeline_spec(text, where))


def declared_in(spec: Mapping[str, Any]) -> dict[str, Parameter]:
    """The parameters of a compiled pipeline."""
    inputs = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    return {name: _parameter(name, p) for name, p in inputs.items()}


def _parameter(name: str, said: Mapping[str, Any]) -> Parameter:
    kind = said["parameterType"]
    required = not said.get("isOptional", False) and "defaultValue" not in said
    return Parameter(
        name, kind, required, _whole(said.get("defaultValue"), kind), " ".join(said.get("description", "").split())
    )


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
            problems.append(Problem(name, _not_of_its_kind(name, value, parameters[name].kind)))
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


def table(parameters: Iterable[Parameter], width: int = 100) -> str:
    """One paragraph for each parameter, required ones first, wrapped at `width` columns.

    >>> print(table([Parameter("epochs", "NUMBER_INTEGER", False, 100, "Passes over the training images.")]))
    epochs  whole number, default 100
        Passes over the training images.
    """
    paragraphs = []
    for p in sorted(parameters, key=lambda p: not p.required):
        default = "required" if p.required else f"default {json.dumps(p.default, ensure_ascii=False)}"
        text = textwrap.fill(p.description, width, initial_indent="    ", subsequent_indent="    ")
        paragraphs.append(f"{p.name}  {_WORDS[p.kind]}, {default}" + (f"\n{text}" if text else ""))
    return "\n".join(paragraphs)


def _not_of_its_kind(name: str, value: Any, kind: str) -> str:
    found = f"{value!r} is not {_EXAMPLES[kind]}"
    if not isinstance(value, str):
        return found
    better = meant(value, kind) if kind in ("LIST", "STRUCT") else ""
    if better:
        found += f"; was '{name}={better}' meant, with the single quotes for the shell?"
    elif kind in ("LIST", "STRUCT"):
        found += f"; {_where_json_breaks(value, kind)}"
    other = difference(name, value, kind)
    return f"{found} ({other})" if other else found


def _where_json_breaks(text: str, kind: str) -> str:
    try:
        return f"this is JSON, but {type(json.loads(text)).__name__} and not {'list' if kind == 'LIST' else 'dict'}"
    except ValueError as error:
        place = getattr(error, "pos", 0)
        return (
            f"{getattr(error, 'msg', error)} at character {place + 1}, near {text[max(place - 10, 0) : place + 10]!r}"
        )


def _convert(value: Any, kind: str) -> Any:
    if kind == "STRING":
        if not isinstance(value, str):
            raise ValueError
        return value
    if isinstance(value, str):
        value = json.loads(value.lower() if kind == "BOOLEAN" else value)
    value = _whole(value, kind)
    wanted: dict[str, type | tuple[type, ...]] = {
        "NUMBER_INTEGER": int, "NUMBER_DOUBLE": (int, float), "BOOLEAN": bool, "LIST": list, "STRUCT": dict,
    }  # fmt: skip
    if not isinstance(value, wanted[kind]) or (isinstance(value, bool) and kind != "BOOLEAN"):
        raise ValueError
    if not _finite(value):
        raise ValueError
    if kind == "NUMBER_DOUBLE" and isinstance(value, (int, float)):
        return float(value)
    return value


def _whole(value: Any, kind: str) -> Any:
    """YAML and protobuf write whole defaults as 16.0."""
    return int(value) if kind == "NUMBER_INTEGER" and isinstance(value, float) and value.is_integer() else value


def _finite(value: Any) -> bool:
    """Python's JSON reads NaN and Infinity, at any depth; protobuf's does not."""
    if isinstance(value, dict):
        return all(map(_finite, value.values()))
    if isinstance(value, list):
        return all(map(_finite, value))
    return not isinstance(value, float) or math.isfinite(value)
