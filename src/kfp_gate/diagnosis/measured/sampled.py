"""What the sampler said during the steady steps: rates, shares, and the GPU's readings."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from kfp_gate.diagnosis.measured.observations import GpuReadings
from kfp_gate.diagnosis.measured.quantities import Measured, Unknown, Value, known, mean
from kfp_gate.diagnosis.measured.steady import is_steady
from kfp_gate.diagnosis.reading.runs import Line
from kfp_gate.observing.gpu_readings import SLOWING

POWER, SELDOM = "sw_power_cap", 0.1
"""The reason that full work alone may have, and the share of samples without it below which they are no measure."""

TOO_FAR = 30.0
"""Seconds between two samples beyond which what lies between them is a gap."""


def step_samples(lines: Sequence[Line], windows: Sequence[Line]) -> list[Line]:
    """Samples of the steps, without those of the warm-up, the prepared input and the profile window."""
    apart = sorted(_apart(lines))
    begins = [a for a, _ in apart]
    ends = list(accumulate((b for _, b in apart), max))
    begun = min((w["mono"] for w in windows if w.get("mono") is not None), default=None)
    length = sum((windows[0].get("seconds") or {}).values()) if windows else 0.0
    found = []
    for line in lines:
        if line["kind"] != "sample" or line.get("phase") != "train":
            continue
        mono = line.get("mono")
        if begun is not None and mono is not None and mono < begun - length:
            continue
        if mono is not None and (before := bisect_right(begins, mono)) and mono <= ends[before - 1]:
            continue
        found.append(line)
    return found


def _apart(lines: Sequence[Line]) -> list[tuple[float, float]]:
    return [
        (line["mono"] - sum(line["seconds"].values()), line["mono"])
        for line in lines
        if line["kind"] == "window" and line.get("mono") is not None and line.get("seconds") and not is_steady(line)
    ]


def _why(samples: Sequence[Line]) -> str:
    return "not readable on this machine" if samples else "no samples were taken during the steps"


def sampled(samples: Sequence[Line], key: str) -> Measured:
    return mean([s.get(key) for s in samples], _why(samples))


def of_loaders(samples: Sequence[Line], key: str) -> Measured:
    found = [s["loaders"] for s in samples if isinstance(s.get("loaders"), Mapping)]
    if found and not any(entry.get("count") for entry in found):
        return Unknown("there were no loader processes")
    return mean([entry.get(key) for entry in found if entry.get("count")], _why(samples))


def per_second(samples: Sequence[Line], key: str) -> Measured:
    rates = []
    for before, after in pairwise(samples):
        seconds = _between(before, after)
        if seconds is not None and after.get(key) is not None:
            rates.append(after[key] / seconds)
    return mean(rates, _why(samples))


def growth_per_second(samples: Sequence[Line], key: str) -> Measured:
    """The growth a second of a counter."""
    rates, weights = [], []
    for before, after in pairwise(samples):
        seconds = _between(before, after)
        if seconds is None or before.get(key) is None or after.get(key) is None or after[key] < before[key]:
            continue
        rates.append((after[key] - before[key]) / seconds)
        weights.append(seconds)
    return mean(rates, _why(samples), weights)


def _between(before: Line, after: Line) -> float | None:
    if before.get("mono") is None or after.get("mono") is None:
        return None
    seconds = float(after["mono"] - before["mono"])
    return seconds if 0 < seconds <= TOO_FAR else None


def queued_per_core(samples: Sequence[Line], workers: int | None) -> float:
    """Seconds that the preparing processes waited for a core for each second that they had one; infinite if unknown."""
    if workers:
        queued, cpu = known(of_loaders(samples, "queued")), known(of_loaders(samples, "cpu"))
        return queued * workers / cpu if queued is not None and cpu else math.inf
    queued, cpu = known(sampled(samples, "queued")), known(sampled(samples, "cpu_thread"))
    return queued / cpu if queued is not None and cpu else math.inf


def gpu_readings(lines: Sequence[Line], samples: Sequence[Line]) -> GpuReadings | Unknown:
    told = _unknown_readings(lines)
    device: Line = next((line for line in lines if line["kind"] == "gpu"), {})
    if not any(k.startswith("gpu_") for s in samples for k in s):
        return Unknown(told.get("gpu") or _why(samples))
    if "gpu" in told and all(s.get("gpu_util") is None and s.get("gpu_power_w") is None for s in samples):
        return Unknown(told["gpu"])

    def reading(key: str, among: Sequence[Line]) -> Measured:
        return mean([s.get(key) for s in among], told.get(key) or told.get("gpu") or _why(samples))

    judged = [s for s in samples if s.get("gpu_throttle") is not None]
    held = [s for s in judged if set(s["gpu_throttle"]) & set(SLOWING)]
    free = [s for s in judged if s not in held]
    slowed: Mapping[str, float] | Unknown = Unknown(told.get("gpu_throttle") or told.get("gpu") or _why(samples))
    if judged:
        slowed = {
            name: share for name in SLOWING
            if (share := sum(name in s["gpu_throttle"] for s in judged) / len(judged)) > 0
        }  # fmt: skip
    clocks = [s["gpu_sm_mhz"] for s in free if s.get("gpu_sm_mhz")]
    why = "it was slowed down in every sample" if held and not free else told.get("gpu_sm_mhz") or _why(samples)
    if len(free) < SELDOM * len(judged) and not any(set(s["gpu_throttle"]) & set(SLOWING) - {POWER} for s in held):
        # At full work a board may never leave its power limit; the clock of a moment of rest is not one it could keep.
        clocks, why = [], "it was at its power limit in nearly every sample"
    top: Measured = Value(max(clocks), len(clocks)) if clocks else Unknown(why)
    most = device.get("max_sm_mhz")
    board: Measured = Value(most) if most else Unknown("the highest clock of the board was not recorded")
    return GpuReadings(
        str(device.get("name") or ""), reading("gpu_util", samples), reading("gpu_power_w", samples), slowed,
        reading("gpu_sm_mhz", free), reading("gpu_sm_mhz", held), top, board,
    )  # fmt: skip


def _unknown_readings(lines: Sequence[Line]) -> dict[str, str]:
    """Reading to the reason why it is unknown; `gpu` stands for all."""
    told: dict[str, str] = {}
    for line in lines:
        if line["kind"] in ("gpu", "sample") and isinstance(line.get("unknown"), Mapping):
            told |= {k: v for k, v in line["unknown"].items() if isinstance(v, str)}
    return told
