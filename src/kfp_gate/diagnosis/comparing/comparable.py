"""Whether two runs may be compared: what they ran under, and every difference that nobody has acknowledged.

A difference between two runs has one cause for sure only if nothing else differs. So each condition that decides how
long a step takes, or what comes out of it, must be the same or be acknowledged by its name. What is unknown of one run
alone counts as a difference; what is unknown of both is taken as equal, and said.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.errors import InvalidInput, Problem

UNKNOWN, NOT_SET = "unknown", "not set"

DEFAULTS: dict[str, Any] = {"cpu_quota": None, "gpu_name": None, "memory_limit": None, "prefetch": None}
"""Conditions whose null says "none" as well as "unknown"."""

REQUIRED = (
    "train_data", "val_data", "classes", "train_images", "val_images", "epochs", "batch", "ranks", "workers",
    "prefetch", "pin_memory", "precision", "image_size", "device", "gpu_name", "cpus", "cpu_quota", "memory_limit",
    "monitors", "stop_on", "patience", "min_delta", "min_epochs", "seed", "base_model",
)  # fmt: skip

_BESIDE = frozenset(
    {"sanity_batches", "upload_bound_s", "heartbeat_bound_s", "peer_timeout_s", "collective_timeout_s", "probe_steps",
     "profile_steps"}
)  # fmt: skip
"""Settings that change neither a usual step nor what is trained."""

_SHOWN = 60
"""Characters of a value in a message."""


@dataclass(frozen=True)
class Difference:
    """A condition that is not the same in both runs. Values are JSON, `UNKNOWN` or `NOT_SET` where a run is silent."""

    name: str
    before: Any
    after: Any


def conditions_of(run: Run) -> dict[str, Any]:
    """Name to value of what a run ran under; what is unknown is left out.

    Taken from the timeline, and from the training record where a timeline is older than its `conditions` line.
    Settings of the upstream trainer are `overrides.<name>`, versions of packages `version.<name>`.
    """
    record, said = run.record, dict(run.conditions)
    settings = _mapping(said.get("settings")) or _mapping(record.get("settings"))
    digests = _mapping(said.get("manifests")) or _mapping(record.get("manifests"))
    found: dict[str, Any] = {
        "train_data": digests.get("train"), "val_data": digests.get("val"), "ranks": record.get("ranks"),
        "device": record.get("device"),
    }  # fmt: skip
    if isinstance(record.get("classes"), list | tuple):
        found["classes"] = len(record["classes"])
    for name, value in settings.items():
        if name == "overrides":
            found |= {f"overrides.{k}": v for k, v in _mapping(value).items()}
        elif name not in _BESIDE and not (name in ("workers", "device", "precision") and value in (-1, "auto")):
            found[name] = value
    found |= {name: said[name] for name in REQUIRED if said.get(name) is not None}
    versions = next((_mapping(line.get("versions")) for line in reversed(list(run.lines("start")))), {})
    found |= {f"version.{k}": v for k, v in (versions or _mapping(record.get("versions"))).items()}
    return {k: _plain(v) for k, v in found.items() if v is not None}


def differences(before: Run, after: Run) -> tuple[Difference, ...]:
    """Every condition that is not the same, in a stable order."""
    first, second = conditions_of(before), conditions_of(after)
    names = [*REQUIRED, *sorted({*first, *second} - set(REQUIRED))]
    if 0 in (first.get("workers"), second.get("workers")):
        # Without loader processes nothing is made ahead: that is no condition of its own.
        names.remove("prefetch")
    pairs = [Difference(n, first.get(n, _absent(n)), second.get(n, _absent(n))) for n in names]
    return tuple(d for d in pairs if d.before != d.after)


def shared_conditions(before: Run, after: Run) -> dict[str, Any]:
    """Name to value of what is known to be the same."""
    second = conditions_of(after)
    return {k: v for k, v in conditions_of(before).items() if k in second and second[k] == v}


def unknown_of_both(before: Run, after: Run) -> tuple[str, ...]:
    """Conditions that neither run tells, apart from those whose null says "none"."""
    first, second = conditions_of(before), conditions_of(after)
    return tuple(n for n in REQUIRED if n not in first and n not in second and n not in DEFAULTS)


def check_comparable(before: Run, after: Run, acknowledged: Sequence[str] = ()) -> tuple[Difference, ...]:
    """The differences, all of them acknowledged.

    Args:
        acknowledged: names of conditions that may differ. One that does not differ does no harm.

    Raises:
        InvalidInput: differences that are not acknowledged, and names that are no condition: all at once.
    """
    found = differences(before, after)
    known = {*REQUIRED, *conditions_of(before), *conditions_of(after)}
    problems = [
        Problem(d.name, f"{show(d.before)} before, {show(d.after)} after")
        for d in found
        if d.name not in acknowledged
    ]  # fmt: skip
    open_names = [p.where for p in problems]
    for name in dict.fromkeys(acknowledged):
        if name not in known:
            close = get_close_matches(name, [*open_names, *sorted(known)], n=1)
            problems.append(
                Problem("acknowledged", f"{name!r} is no condition" + (f"; {close[0]!r}?" if close else ""))
            )
    if problems:
        options = " ".join(f"--acknowledge {n}" for n in open_names)
        raise InvalidInput(
            f"two runs that differ in {len(open_names)} unacknowledged condition{'s' * (len(open_names) != 1)}"
            if open_names else "acknowledged names that are no conditions",
            expected="two runs under the same conditions but for those acknowledged by name",
            where=f"{before.where!r} (before) and {after.where!r} (after)",
            next_step=f"repeat one run under the other's conditions, or, if these differences are meant: {options}"
            if open_names else "leave these names out, or correct them",
            problems=problems,
        )  # fmt: skip
    return found


def show(value: Any) -> str:
    """A condition's value in a message; a digest or a long list is cut."""
    text = value if value in (UNKNOWN, NOT_SET) else json.dumps(value, ensure_ascii=False)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _absent(name: str) -> Any:
    """What it means that a run does not say."""
    return NOT_SET if name.startswith("overrides.") else DEFAULTS.get(name, UNKNOWN)


def _mapping(value: Any) -> Mapping[str, Any]:
    return {str(k): v for k, v in value.items()} if isinstance(value, Mapping) else {}


def _plain(value: Any) -> Any:
    """As JSON reads it: a tuple is a list, 16.0 is 16."""
    value = json.loads(json.dumps(value, default=str))
    return int(value) if isinstance(value, float) and value.is_integer() else value
