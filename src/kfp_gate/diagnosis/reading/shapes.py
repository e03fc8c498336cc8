"""What the keys of a timeline line hold: anything else in their place is null, which is unknown."""

import math
from collections.abc import Callable
from datetime import datetime
from sys import intern
from typing import Any

LARGEST_NUMBER = 1e18

Check = Callable[[Any], Any]


def clean(line: dict[str, Any]) -> dict[str, Any]:
    """A line whose known keys hold what they should, or None."""
    kind = line["kind"]
    checks = {**EVERY, **KINDS.get(kind, {})}
    only_numbers = kind in NUMBERS_ONLY
    cleaned: dict[str, Any] = {}
    for name, value in line.items():
        # Hundreds of thousands of lines have the same keys: kept once, they take half the memory.
        key = intern(name)
        if value is None:
            cleaned[key] = None
        elif key in checks:
            cleaned[key] = checks[key](value)
        else:
            cleaned[key] = number(value) if only_numbers else value
    return cleaned


# What a value may be ------------------------------------------------------------------------------------------------


def signed(value: Any) -> float | None:
    """A finite number; JSON as Python reads it also has NaN, Infinity and integers of any length."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
        return None
    return value if math.isfinite(value) else None


def number(value: Any) -> float | None:
    """As `signed`, not below zero: seconds, bytes, counts."""
    found = signed(value)
    return found if found is not None and found >= 0 else None


def whole(value: Any) -> int | None:
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def moment(value: Any) -> str | None:
    """A time with its zone; without one it could be any hour of the day."""
    if not isinstance(value, str):
        return None
    try:
        return value if datetime.fromisoformat(value).tzinfo is not None else None
    except ValueError:
        return None


def by_name(check: Check) -> Check:
    """A mapping from names to what `check` lets through; the others are left out."""

    def checked(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        return {intern(k): c for k, v in value.items() if isinstance(k, str) and (c := check(v)) is not None}

    return checked


def all_by_name(check: Check) -> Check:
    """As `by_name`, but None if any value is unknown: times that are summed are all there or are not known."""
    each = by_name(check)

    def checked(value: Any) -> Any:
        found = each(value)
        return found if found is not None and len(found) == len(value) else None

    return checked


def list_of(check: Check) -> Check:
    def checked(value: Any) -> Any:
        return [c for v in value if (c := check(v)) is not None] if isinstance(value, list) else None

    return checked


def row_of(*checks: Check) -> Check:
    """A list with exactly these, all known."""

    def checked(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(checks):
            return None
        row = [check(v) for check, v in zip(checks, value, strict=True)]
        return None if None in row else row

    return checked


def shape(**checks: Check) -> Check:
    """A mapping of which some keys are known."""

    def checked(value: Any) -> Any:
        if not isinstance(value, dict):
            return None
        return {intern(k): checks[k](v) if k in checks and v is not None else v for k, v in value.items()}

    return checked


def part(value: Any) -> Any:
    """Wall seconds, CPU seconds and calls of a part of the loading; the last two may be unknown."""
    if not isinstance(value, list) or not value or number(value[0]) is None:
        return None
    rest = [number(v) for v in value[1:3]]
    return [number(value[0]), *rest, *[None] * (2 - len(rest))]


def anything_named(value: Any) -> Any:
    return value if isinstance(value, dict) else None


EVERY: dict[str, Check] = {
    "kind": text, "time": moment, "mono": number, "run": text, "rank": whole, "node": text, "gpu": text, "phase": text,
    "epoch": whole,
}  # fmt: skip
"""Keys of any line."""

_LOADER = shape(batches=number, parts=all_by_name(part), bytes=number, ready=number)
_LOADERS = shape(**dict.fromkeys(("count", "cpu", "cpu_max", "waiting", "looks", "read", "queued", "blocked"), number))

KINDS: dict[str, dict[str, Check]] = {
    "start": {"pid": whole, "versions": by_name(text), "ranks": anything_named},
    "conditions": {
        **dict.fromkeys(
            ("classes", "train_images", "val_images", "steps_per_epoch", "epochs", "batch", "rank_batch", "ranks",
             "workers", "workers_most", "prefetch", "image_size", "cpus", "cpu_quota", "memory_limit", "patience",
             "min_epochs", "seed", "sample_every_s"), number,
        ),
        **dict.fromkeys(("precision", "device", "gpu_name", "stop_on", "base_model"), text),
        "min_delta": signed, "pin_memory": flag, "manifests": by_name(text), "monitors": list_of(text),
        "settings": anything_named,
    },
    "window": {
        "batches": row_of(whole, whole), "steps": number, "images": number, "warmup": flag, "input": text,
        "profiled": flag, "seconds": all_by_name(number), "device": all_by_name(number),
        "each": list_of(row_of(number, number)), "bytes": number, "loader": _LOADER,
    },
    "phases": {"seconds": all_by_name(number), "steps": number, "device": all_by_name(number)},
    "epoch": {"values": by_name(signed), "losses": by_name(signed)},
    "validation": {"seconds": number, "images": number, "parts": by_name(number), "threads": number},
    "checkpoint": {"ok": flag, "seconds": number, "waited_s": number, "error": text},
    "upload": {"ok": flag, "seconds": number, "bytes": number},
    "sample": {
        "loaders": _LOADERS, "unknown": by_name(text), "gpu_throttle": list_of(text), "lines_lost": number,
    },
    "memory": {"by_phase": by_name(by_name(signed)), "at_start": by_name(number)},
    "gpu": {"max_sm_mhz": number, "uuid": text, "name": text, "driver": text, "unknown": by_name(text)},
    "recover": {"reason": text}, "stop": {"reason": text}, "failure": {"failure": text, "message": text},
    "end": {"exit_code": number},
    "resume": {"notes": list_of(text)},
    "growth": {"what": text, "phase": text, "since": whole, "slope": signed, "limit": number, "limit_epoch": whole,
               "text": text},
    "probe": {"part": text, "steps": number, "step_s": number, "low": number, "high": number},
    "profile": {
        "steps": number, "step_s": number, "around_s": number, "cost": signed,
        "ops": list_of(shape(name=text, calls=number, cpu_s=number, device_s=number)), "kernels": number,
        "device_busy_s": number, "transforms": by_name(number),
        "functions": list_of(shape(function=text, part=text, calls=number, own_s=number, total_s=number)),
        "trace": text, "nsys": text, "apart_s": number,
    },
}  # fmt: skip
"""Kind to the keys that are known in it."""

NUMBERS_ONLY = ("sample", "memory")
"""Kinds in which every other key is a number."""
