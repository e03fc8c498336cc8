"""How kfp's own command line reads `name=value`, to say where it would send something else than was meant.

`kfp run create` knows no types: it tries JSON, then true and false in any case, then numbers, and takes what is left
as a string (kfp 2.17, `kfp/cli/utils/parsing.py`). So `dataset=123` is sent as a number, which the server refuses, and
a dict with a slip of the pen is sent as a string without a word.
"""

import ast
import json
import math
from typing import Any

KINDS = {
    "STRING": "a string",
    "NUMBER_INTEGER": "a whole number",
    "NUMBER_DOUBLE": "a number",
    "BOOLEAN": "true or false",
    "LIST": "a list",
    "STRUCT": "a dict",
}
"""KFP's parameter types, in words."""


def as_kfp_reads(text: str) -> Any:
    """The value that `kfp run create` sends for `text`.

    >>> as_kfp_reads("123"), as_kfp_reads("True"), as_kfp_reads("{cone: 0.8}")
    (123, True, '{cone: 0.8}')
    """
    try:
        return json.loads(text)
    except ValueError:
        pass
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def is_of(kind: str, value: Any) -> bool:
    """Whether the server takes `value` for a parameter of `kind`. JSON knows no whole numbers: 5.0 is one."""
    if kind in ("NUMBER_INTEGER", "NUMBER_DOUBLE"):
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return number and (kind == "NUMBER_DOUBLE" or float(value).is_integer())
    wanted: type = {"STRING": str, "BOOLEAN": bool, "LIST": list, "STRUCT": dict}[kind]
    return isinstance(value, wanted)


def difference(name: str, text: str, kind: str) -> str:
    """What `kfp run create` would make of `name=text`; empty when it would send what is meant here.

    >>> print(difference("dataset", "123", "STRING"))
    `kfp run create` would send dataset=123 as a number and the server would refuse it; write 'dataset="123"' there
    """
    guess = as_kfp_reads(text)
    if is_of(kind, guess) and (kind != "STRING" or guess == text):
        return ""
    if kind == "STRING":
        quoted = json.dumps(text, ensure_ascii=False)
        sent = "null" if guess is None else KINDS[kind_of(guess)]
        end = "without its quotes" if isinstance(guess, str) else f"as {sent} and the server would refuse it"
        return f"`kfp run create` would send {name}={text} {end}; write '{name}={quoted}' there"
    if isinstance(guess, str):
        return "`kfp run create` would send it as a string, without a word"
    if isinstance(guess, float) and not math.isfinite(guess):
        return f"`kfp run create` would send {guess}, which is no JSON"
    return ""


def kind_of(value: Any) -> str:
    """The kind that `value` (not None) has on the wire."""
    order = ("BOOLEAN", "STRING", "LIST", "STRUCT")
    return next((kind for kind in order if is_of(kind, value)), "NUMBER_DOUBLE")


def meant(text: str, kind: str) -> str:
    """JSON that `text` was probably meant to be: Python's spelling, or quotes that a shell took away; else empty.

    >>> meant("{'cone': {'map50': 0.8}}", "STRUCT")
    '{"cone": {"map50": 0.8}}'
    >>> meant("{cone: {map50: 0.8}}", "STRUCT")
    '{"cone": {"map50": 0.8}}'
    >>> meant("[map50, recall]", "LIST")
    '["map50", "recall"]'
    >>> meant("map50, recall", "LIST")
    '["map50", "recall"]'
    """
    import yaml

    for read in (ast.literal_eval, yaml.safe_load):
        try:
            value = read(text)
            if kind == "LIST" and isinstance(value, str):
                value = [part.strip() for part in value.split(",")]
            found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError, yaml.YAMLError):
            continue
        # `{cone 0.8}` is YAML for {"cone 0.8": null}: nobody means a null.
        if is_of(kind, value) and "null" not in found:
            return found
    return ""
