"""Measured numbers: a value with its count and spread, or unknown with the reason. Never a zero for unknown."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """A mean over `n` readings; `low` and `high` hold the middle 90% of them."""

    value: float
    n: int = 1
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class Unknown:
    """Not known, and why."""

    reason: str


Measured = Value | Unknown


def mean(readings: Iterable[float | None], reason: str, weights: Sequence[float] | None = None) -> Measured:
    """The mean of the readings that are known; unknown if none is.

    Args:
        readings: None is a reading that failed.
        reason: said if there is no reading.
        weights: of each reading; None: all the same.
    """
    pairs = [
        (value, weights[i] if weights is not None else 1.0) for i, value in enumerate(readings) if value is not None
    ]
    total = sum(w for _, w in pairs)
    if not pairs or total <= 0:
        return Unknown(reason)
    ordered = sorted(v for v, _ in pairs)
    return Value(sum(v * w for v, w in pairs) / total, len(pairs), quantile(ordered, 0.05), quantile(ordered, 0.95))


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which this share of the sorted readings lies, between neighbours in proportion."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def known(measured: Measured) -> float | None:
    """The value; None for unknown."""
    return measured.value if isinstance(measured, Value) else None


def reason(measured: Measured) -> str:
    """Why it is unknown; "" if it is known."""
    return measured.reason if isinstance(measured, Unknown) else ""
