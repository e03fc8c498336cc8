"""Values that cannot work, as far as that can be said from the parameters alone: before the data is seen.

The components check the same and more where they run; here a slip costs a second and no pod.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.metric_names import METRICS

ARGUMENT_BYTES = 100_000
"""Room for one step's parameters: Linux takes 128 KiB for one argument, and the backend passes them as one."""


def check_values(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Refuse what cannot work.

    Args:
        given: parameters that will be sent, in their declared types.
        values: the same, and the defaults of all others. A name that the pipeline does not have is not asked for.

    Raises:
        InvalidInput: a secret in `given`, more than a step can be handed, numbers and words out of their range, or
            problems in thresholds and waivers; all of the first kind that is found.
    """
    _refuse_secrets(given)
    _refuse_size(given)
    _check_together(values)
    _check_thresholds(values)


def _refuse_secrets(arguments: Mapping[str, Any]) -> None:
    problems = [
        Problem(name, "holds a user name or password before the @")
        for name, value in arguments.items()
        if isinstance(value, str) and re.search(r"://[^/@\s]+@", value)
    ]
    if problems:
        raise InvalidInput(
            "a secret as a parameter", expected="addresses without credentials", where="pipeline parameters",
            next_step="put credentials into the Secret that the pipeline reads (see the README): everybody can read "
            "parameters in the UI and in the logs of the steps",
            problems=problems,
        )  # fmt: skip


def _refuse_size(arguments: Mapping[str, Any]) -> None:
    sizes = {name: len(json.dumps(value, ensure_ascii=False).encode()) for name, value in arguments.items()}
    if sum(sizes.values()) > ARGUMENT_BYTES:
        largest = max(sizes, key=lambda name: sizes[name])
        raise InvalidInput(
            f"parameters of {sum(sizes.values()):,} bytes, of which {largest} has {sizes[largest]:,}",
            expected=f"at most {ARGUMENT_BYTES:,} bytes: a step gets them as one argument of its command",
            where="pipeline parameters", next_step='say what holds for most classes once, under "*"',
        )  # fmt: skip


def _check_together(values: Mapping[str, Any]) -> None:
    """What the library knows of values, as far as it can be said without the data."""
    problems = []

    def number(name: str, low: float, what: str) -> None:
        if name in values and values[name] < low:
            problems.append(Problem(name, f"{values[name]!r} is not {what}"))

    for name in ("epochs", "batch", "nodes", "processes_per_node"):
        number(name, 1, "at least 1")
    for name in ("seed", "patience", "gpus_per_node"):
        number(name, 0, "at least 0")
    if values.get("image_size", 32) < 32 or values.get("image_size", 32) % 32:
        problems.append(Problem("image_size", f"{values['image_size']!r} is not a multiple of 32"))
    for name, choices in _CHOICES.items():
        if values.get(name, choices[0]) not in choices:
            problems.append(Problem(name, f"{values[name]!r} is not one of {', '.join(choices)}"))
    shares = [values[name] for name in ("train_share", "val_share", "test_share") if name in values]
    if len(shares) == 3 and (min(shares) < 0 or abs(sum(shares) - 1) > 1e-6):
        problems.append(
            Problem("train_share, val_share, test_share", f"{shares} do not add up to 1, each 0 or more")
        )  # fmt: skip
    if problems:
        raise InvalidInput(
            f"{len(problems)} parameter{'s' * (len(problems) > 1)} with values that cannot work",
            expected="values as `kfp-gate parameters` describes them", where="pipeline parameters",
            next_step="correct the values listed above; nothing was sent", problems=problems,
        )  # fmt: skip


_CHOICES = {
    "dataset_format": ("auto", "yolo", "coco", "voc"),
    "backend": ("trainjob", "pytorchjob", "processes"),
    "decide": ("point", "confident"),
    "on_insufficient": ("block", "allow"),
}


def _check_thresholds(values: Mapping[str, Any]) -> None:
    """Metrics, bounds and waivers; whether the classes exist is known only where the data is."""
    if "class_thresholds" not in values:
        return
    from kfp_gate.gate.settings import gate_settings

    own = ("class_thresholds", "min_instances", "waivers", "decide", "on_insufficient")
    # By the metric and not by the prefix: `min_instances` and `min_test_instances` are no bounds.
    bounds = [name for name in values if name.startswith(("min_", "max_")) and name[4:] in METRICS]
    classes = {match[1] for key in values["class_thresholds"] if (match := _CLASS_KEY.match(str(key)))}
    gate_settings(**{name: values[name] for name in {*own, *bounds} if name in values}).check(sorted(classes))


_CLASS_KEY = re.compile(r"^(?:slice/.+?/class/)?((?!\*$|overall$|size/|slice/).+)$")
