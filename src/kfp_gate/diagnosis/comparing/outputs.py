"""Whether a change left what comes out of a training as it was.

Three steps, each of which is said. (1) Bit for bit: all values and losses of the epochs that both runs have are the
same numbers. (2) Else by noise: a series is compared with the variation between its own neighbouring epochs, told from
its trend by second differences (for independent noise of variance s their mean square is 6 s). The mean difference over
the last third of the common epochs must stay below `REACH` deviations of a single epoch's difference; the epochs are
not taken as independent of each other, since a run that drew better stays better. (3) With fewer than `FEWEST` common
epochs there is no noise to compare with, and the answer is "unknown".

What this cannot tell: whether a difference beyond that noise is also beyond what another seed would give. A single pair
of runs does not know; repeated runs of the same side do.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kfp_gate.diagnosis.measured.steady import Floats
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.metric_names import METRICS

EQUAL, WITHIN_NOISE, DIFFER, UNKNOWN = "equal", "within_noise", "differ", "unknown"
STATES = (EQUAL, WITHIN_NOISE, DIFFER, UNKNOWN)

FEWEST = 5
"""Common epochs that noise can be taken from: three second differences."""

REACH = 3.0

_EXACT = ("train_data", "val_data", "classes", "epochs", "batch", "ranks", "workers", "precision", "image_size",
          "device", "seed", "base_model")  # fmt: skip
"""If these are equal, the device is a CPU and the versions are the same, the same numbers are to be expected. The
learning rate falls over the epochs that are planned."""


@dataclass(frozen=True)
class Series:
    """One metric or loss over the common epochs.

    Attributes:
        difference: after minus before, mean over the last third of the common epochs; None: computed in one run only.
        noise: deviation of a single epoch's difference; None: cannot be told.
        state: one of `STATES`.
    """

    name: str
    difference: float | None
    noise: float | None
    state: str


@dataclass(frozen=True)
class Outputs:
    """`judged` is how, in a sentence; `epochs` how many both runs have."""

    state: str
    judged: str
    epochs: int
    series: tuple[Series, ...] = ()


def compare_outputs(before: Run, after: Run, differing: Sequence[str]) -> Outputs:
    """Compare the values of the epochs that both runs have.

    Args:
        differing: names of the conditions that differ, see `comparable`.
    """
    first, second = _epochs(before), _epochs(after)
    common = sorted(first.keys() & second.keys())
    if not common:
        return Outputs(UNKNOWN, "no epoch with values is known of both runs", 0)
    expected = _same_numbers_expected(before, differing)
    # A name that a run never has was not asked of it, or not yet known to its version.
    names = sorted({n for e in common for n in first[e]} & {n for e in common for n in second[e]})
    span = f"{len(common)} common epoch{'s' * (len(common) != 1)}"
    if all(first[e].get(n) == second[e].get(n) for e in common for n in names):
        numbers = [v for e in common for n, v in first[e].items() if v is not None]
        if not numbers:
            return Outputs(UNKNOWN, f"no value was computed in the {span}", len(common))
        hollow = "" if any(numbers) else ": all of them 0, which says little"
        return Outputs(
            EQUAL, f"bit for bit: {len(names)} values and losses of {span} are the same numbers{hollow}", len(common)
        )
    judged = _judged_names(before, after, names)
    series = tuple(_series(n, [first[e].get(n) for e in common], [second[e].get(n) for e in common]) for n in judged)
    states = {s.state for s in series}
    state = next((s for s in (DIFFER, UNKNOWN, WITHIN_NOISE) if s in states), UNKNOWN if not series else EQUAL)
    surprise = ". The same numbers were to be expected, so the change reached the training itself" if expected else ""
    if state == DIFFER:
        beyond = ", ".join(s.name for s in series if s.state == DIFFER)
        return Outputs(
            state, f"{beyond}: further apart in {span} than neighbouring epochs of one run are, or known of one run "
            f"only; whether further than two seeds would be, one pair of runs cannot tell{surprise}",
            len(common), series,
        )  # fmt: skip
    if state == UNKNOWN:
        return Outputs(
            state, f"the numbers are not the same, and the noise cannot be known from {span} (at least {FEWEST})"
            f"{surprise}", len(common), series,
        )  # fmt: skip
    return Outputs(
        WITHIN_NOISE, f"not the same numbers, but no further apart in {span} than neighbouring epochs of one run "
        f"are{surprise}", len(common), series,
    )  # fmt: skip


def _same_numbers_expected(run: Run, differing: Sequence[str]) -> bool:
    if any(n in _EXACT or n.startswith(("overrides.", "version.")) for n in differing):
        return False
    device = run.conditions.get("device") or run.record.get("device") or ""
    return str(device).startswith("cpu")


def _epochs(run: Run) -> dict[int, dict[str, float | None]]:
    """Epoch to its values and losses; an epoch that was done again counts as it was last."""
    found = {}
    for line in run.lines("epoch"):
        epoch = line.get("epoch")
        if isinstance(epoch, int) and not isinstance(epoch, bool):
            found[epoch] = {**_numbers(line.get("values"), ""), **_numbers(line.get("losses"), "train/")}
    return found


def _numbers(values: Any, prefix: str) -> dict[str, float | None]:
    if not isinstance(values, Mapping):
        return {}
    return {
        prefix + str(k): float(v) if isinstance(v, int | float) and not isinstance(v, bool) else None
        for k, v in values.items()
    }


def _judged_names(before: Run, after: Run, names: Sequence[str]) -> list[str]:
    """Overall metrics, monitors and losses: a class of few objects jumps from epoch to epoch."""
    monitors = {str(m) for run in (before, after) for m in run.conditions.get("monitors") or ()}
    return [n for n in names if n in METRICS or n in monitors or n.startswith("train/")]


def _series(name: str, before: Sequence[float | None], after: Sequence[float | None]) -> Series:
    pairs = [(a, b) for a, b in zip(before, after, strict=True) if a is not None and b is not None]
    if any((a is None) != (b is None) for a, b in zip(before, after, strict=True)):
        return Series(name, None, None, DIFFER)
    if not pairs:
        return Series(name, 0.0, None, EQUAL)
    first, second = np.array(pairs, dtype=float).T
    third = max(1, len(pairs) // 3)
    difference = float((second - first)[-third:].mean())
    if bool((first == second).all()):
        return Series(name, 0.0, None, EQUAL)
    if len(pairs) < FEWEST:
        return Series(name, difference, None, UNKNOWN)
    noise = float(np.sqrt(_variance(first) + _variance(second)))
    return Series(name, difference, noise, WITHIN_NOISE if abs(difference) <= REACH * noise else DIFFER)


def _variance(series: Floats) -> float:
    """Of the noise of one epoch, without the trend."""
    return float(np.mean(np.diff(series, 2) ** 2) / 6)
