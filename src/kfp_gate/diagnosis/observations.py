"""What a run's timelines say in numbers: per rank, over its steady steps, and per epoch. Judges nothing.

Steady steps are those after the warm-up, on images as they come and without a profiler (`steady`). Readings of the
sampler are those taken during them.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kfp_gate.diagnosis.quantities import Measured, Unknown, Value, known, mean
from kfp_gate.diagnosis.runs import Line, Run
from kfp_gate.diagnosis.steady import COMPUTE, RankSteps, attempts, is_steady, steady_steps, whole_epochs

OLD = "this timeline is of a version that did not record it"
TOO_FAR = 30.0
"""Seconds between two samples beyond which what lies between them is a gap."""


@dataclass(frozen=True)
class Part:
    """One part of preparation, per batch: wall seconds, CPU seconds and calls; None is unknown."""

    wall: float
    cpu: float | None
    calls: float | None

    @property
    def blocked(self) -> float | None:
        """Seconds in which it did not run."""
        return max(0.0, self.wall - self.cpu) if self.cpu is not None else None


@dataclass(frozen=True)
class Loading:
    """Preparation of a batch, summed over the processes that made it.

    Attributes:
        parts: by name, without what lies inside of another part.
        batches: that were measured.
        bytes: read from files per batch.
        ready: mean number of batches that waited when one was asked for; None without loader processes, or unknown.
        queued: seconds that these processes waited for a core for each that they had one; infinite if unknown.
    """

    parts: Mapping[str, Part]
    batches: int
    bytes: float | None
    ready: float | None
    queued: float = math.inf

    @property
    def wall(self) -> float:
        return sum(p.wall for p in self.parts.values())

    @property
    def cpu(self) -> float | None:
        found = [p.cpu for p in self.parts.values()]
        return None if None in found else sum(c for c in found if c is not None)

    @property
    def stretch(self) -> float:
        """Wall over CPU seconds of the parts that compute: above 1 they wait for a core.

        The median over the CPU seconds of the parts, and no more than the scheduler says that was waited for a core: a
        part may also wait for something else.
        """
        ratios = sorted(
            (p.wall / p.cpu, p.cpu) for n, p in self.parts.items() if p.cpu and n not in ("open", "read")
        )  # fmt: skip
        whole, so_far = sum(cpu for _, cpu in ratios), 0.0
        for ratio, cpu in ratios:
            so_far += cpu
            if so_far >= whole / 2:
                return max(1.0, min(ratio, 1 + self.queued))
        return 1.0


@dataclass(frozen=True)
class GpuReadings:
    """What NVML said during the steps: shares 0..1, MHz, watts.

    Attributes:
        util: share of time in which any kernel ran.
        slowed: share of samples with a reason that slows the device for heat or power, by reason.
        clock, clock_slowed: mean clock without and with such a reason.
        top_clock: the highest clock of the run.
    """

    name: str
    util: Measured
    power: Measured
    slowed: Mapping[str, float] | Unknown
    clock: Measured
    clock_slowed: Measured
    top_clock: Measured


@dataclass(frozen=True)
class RankSeen:
    """One rank. Seconds are per step; CPU is in cores; shares are 0..1.

    Attributes:
        step: seconds of a step, spread over the windows.
        phases: seconds a step by phase, host clock, with the spread over the windows.
        device: seconds a step by phase on the device's clock; None without one.
        loading: preparation of a batch.
        workers: loader processes.
        cpu, thread: of this process and of its busiest thread; loaders, loaders_top: of all loader processes and of the
            busiest of them.
        waiting: share of loader processes that waited for a disk (state D).
        queued: share of the time in which the main thread could run and got no core; loaders_queued: the same of the
            loader processes, the mean over them.
        blocked: share of the time in which loader processes waited for block devices.
        throttled: seconds a second that the container's processes were held back by the CPU quota.
        pressure: share of time in which some task waited, by resource (cpu, io, memory).
        faults: major page faults a second.
        bytes: moved to the device per step.
    """

    rank: int
    node: str
    cuda: bool
    steps: int
    step: Measured
    phases: Mapping[str, Value]
    device: Mapping[str, float] | None
    workers: int | None
    loading: Loading | Unknown
    cpu: Measured
    thread: Measured
    loaders: Measured
    loaders_top: Measured
    queued: Measured
    loaders_queued: Measured
    waiting: Measured
    blocked: Measured
    throttled: Measured
    pressure: Mapping[str, Measured]
    faults: Measured
    bytes: Measured
    gpu: GpuReadings | Unknown
    conditions: Line = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.step.value if isinstance(self.step, Value) else 0.0

    def phase(self, *names: str) -> float:
        """Seconds a step, host clock."""
        return sum(self.phases[n].value for n in names if n in self.phases)

    @property
    def computing(self) -> float:
        return self.phase(*COMPUTE, "optimizer")


@dataclass(frozen=True)
class EpochSeen:
    """A steady epoch of rank 0 in seconds: means over the epochs of the last attempt.

    `counted` is how many epochs ended: with 0, the epoch is its steps alone.
    """

    steps: int
    in_steps: float
    validation: float
    checkpoint: float
    between: float
    waited: Measured
    counted: int

    @property
    def total(self) -> float:
        return self.in_steps + self.validation + self.checkpoint + self.between


@dataclass(frozen=True)
class Observations:
    """All that is known. `ranks` are those with steady steps; `epoch` is None without any of rank 0."""

    run: Run
    ranks: tuple[RankSeen, ...]
    epoch: EpochSeen | None
    cuda: bool | None
    cores: float | None
    ranks_on_node: int
    profile: Line = field(default_factory=dict)
    probes: Mapping[str, Line] = field(default_factory=dict)

    @property
    def first(self) -> RankSeen | None:
        """The rank that stands for the run: 0, or the first that is known."""
        return self.ranks[0] if self.ranks else None

    def share(self, seconds_a_step: float) -> float:
        """Share of the run's time that so many seconds in each step are."""
        first = self.first
        if first is None or first.step_s <= 0 or self.epoch is None or self.epoch.total <= 0:
            return 0.0
        return min(1.0, max(0.0, seconds_a_step / first.step_s * self.epoch.in_steps / self.epoch.total))

    def share_of_epoch(self, seconds: float) -> float:
        """Share of the run's time that so many seconds in each epoch are."""
        if self.epoch is None or self.epoch.total <= 0:
            return 0.0
        return min(1.0, max(0.0, seconds / self.epoch.total))


def observe(run: Run) -> Observations:
    """Measure a run."""
    ranks = tuple(r for rank in sorted(run.ranks) if (r := _rank(run, rank)) is not None)
    conditions = run.conditions
    first = ranks[0] if ranks else None
    cores = None
    if conditions.get("cpus"):
        cores = min(float(conditions["cpus"]), float(conditions.get("cpu_quota") or conditions["cpus"]))
    device = str(conditions.get("device") or run.record.get("device") or "")
    cuda = True if any(r.cuda for r in ranks) or device.startswith("cuda") else False if device else None
    if cuda is None and first is not None and isinstance(first.gpu, Unknown):
        cuda = False if "uses no GPU" in first.gpu.reason else None
    return Observations(
        run, ranks, _epoch(run, first), cuda, cores, _ranks_on_node(run),
        next(iter(reversed(list(run.lines("profile")))), {}),
        {str(line.get("part")): line for line in run.lines("probe")},
    )  # fmt: skip


def _ranks_on_node(run: Run) -> int:
    for line in reversed(list(run.lines("start"))):
        value = (line.get("ranks") or {}).get("local_world_size")
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 16:
            return value
    return 1


def _rank(run: Run, rank: int) -> RankSeen | None:
    steps = steady_steps(run, rank)
    if steps is None or not steps.steps:
        return None
    lines = next(
        (a for a in reversed(attempts(run.ranks[rank])) if any(line["kind"] in ("window", "phases") for line in a)),
        run.ranks[rank],
    )
    windows = [line for line in lines if line["kind"] == "window" and is_steady(line)]
    samples = _samples(lines, windows)
    weights = [float(s.steps) for s in steps.stretches]
    conditions = next(iter(reversed([line for line in lines if line["kind"] == "conditions"])), {})
    return RankSeen(
        rank=rank, node=steps.node, cuda=steps.cuda, steps=steps.steps,
        step=mean([s.total / s.steps for s in steps.stretches], "no steady steps", weights),
        phases={n: _phase(steps, n, weights) for n in steps.names()}, device=_device(steps), workers=steps.workers,
        loading=_loading(windows, steps, samples), conditions=conditions, gpu=_gpu(lines, samples),
        cpu=_sampled(samples, "cpu"), thread=_sampled(samples, "cpu_thread"),
        loaders=_of_loaders(samples, "cpu"), loaders_top=_of_loaders(samples, "cpu_max"),
        queued=_sampled(samples, "queued"), loaders_queued=_of_loaders(samples, "queued"),
        waiting=_of_loaders(samples, "waiting"), blocked=_of_loaders(samples, "blocked"),
        throttled=_rate(samples, "throttled_s"),
        pressure={k: _sampled(samples, f"pressure_{k}") for k in ("cpu", "io", "memory")},
        faults=_per_second(samples, "major_faults"),
        bytes=mean([w["bytes"] / w["steps"] for w in windows if w.get("bytes") and w.get("steps")], OLD),
    )  # fmt: skip


def _phase(steps: RankSteps, name: str, weights: Sequence[float]) -> Value:
    found = mean([s.seconds.get(name, 0.0) / s.steps for s in steps.stretches], "", weights)
    return found if isinstance(found, Value) else Value(0.0)


def _device(steps: RankSteps) -> dict[str, float] | None:
    """Seconds a step by phase. Windows hold what was resolved while they were open, so shares are taken over all."""
    sums: dict[str, float] = {}
    for stretch in steps.stretches:
        for name, value in (stretch.device or {}).items():
            sums[name] = sums.get(name, 0.0) + value
    whole = sum(sums.values())
    covered = sum(s.total for s in steps.stretches if s.device)
    count = sum(s.steps for s in steps.stretches if s.device)
    if whole <= 0 or not count:
        return None
    return {name: value / whole * covered / count for name, value in sums.items()}


def _loading(windows: Sequence[Line], steps: RankSteps, samples: Sequence[Line]) -> Loading | Unknown:
    batches, size, ready, weight = 0.0, 0.0, 0.0, 0.0
    sums: dict[str, list[tuple[float, float | None, float | None]]] = {}
    sized = True
    for window in windows:
        loader = window.get("loader")
        if not isinstance(loader, Mapping) or not loader.get("batches") or not loader.get("parts"):
            continue
        made = float(loader["batches"])
        batches += made
        for name, (wall, cpu, calls) in loader["parts"].items():
            sums.setdefault(name, []).append((wall, cpu, calls))
        sized = sized and loader.get("bytes") is not None
        size += loader.get("bytes") or 0.0
        if loader.get("ready") is not None:
            ready += float(loader["ready"]) * made
            weight += made
    if not batches:
        return Unknown("the parts of loading were not recorded" if windows else OLD)
    parts = {
        name: Part(
            sum(wall for wall, _, _ in rows) / batches, _per_batch([cpu for _, cpu, _ in rows], batches),
            _per_batch([calls for _, _, calls in rows], batches),
        )
        for name, rows in sums.items()
    }  # fmt: skip
    return Loading(
        parts, int(batches), size / batches if sized else None, ready / weight if weight and steps.workers else None,
        _queued(samples, steps.workers),
    )  # fmt: skip


def _queued(samples: Sequence[Line], workers: int | None) -> float:
    """Seconds that the preparing processes waited for a core for each second that they had one; infinite if unknown."""
    if workers:
        queued, cpu = known(_of_loaders(samples, "queued")), known(_of_loaders(samples, "cpu"))
        return queued * workers / cpu if queued is not None and cpu else math.inf
    queued, cpu = known(_sampled(samples, "queued")), known(_sampled(samples, "cpu_thread"))
    return queued / cpu if queued is not None and cpu else math.inf


def _per_batch(values: Sequence[float | None], batches: float) -> float | None:
    """The sum over a batch; None if any of it is unknown."""
    found = [v for v in values if v is not None]
    return sum(found) / batches if len(found) == len(values) else None


def _samples(lines: Sequence[Line], windows: Sequence[Line]) -> list[Line]:
    """Samples of the steps, without those of the warm-up, the prepared input and the profile window."""
    apart = _apart(lines)
    begun = min((w["mono"] for w in windows if w.get("mono") is not None), default=None)
    length = sum((windows[0].get("seconds") or {}).values()) if windows else 0.0
    found = []
    for line in lines:
        if line["kind"] != "sample" or line.get("phase") != "train":
            continue
        mono = line.get("mono")
        if begun is not None and mono is not None and mono < begun - length:
            continue
        if mono is not None and any(a <= mono <= b for a, b in apart):
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


def _sampled(samples: Sequence[Line], key: str) -> Measured:
    return mean([s.get(key) for s in samples], _why(samples))


def _of_loaders(samples: Sequence[Line], key: str) -> Measured:
    found = [s["loaders"] for s in samples if isinstance(s.get("loaders"), Mapping)]
    if found and not any(entry.get("count") for entry in found):
        return Unknown("there were no loader processes")
    return mean([entry.get(key) for entry in found if entry.get("count")], _why(samples))


def _per_second(samples: Sequence[Line], key: str) -> Measured:
    rates = []
    for before, after in pairwise(samples):
        seconds = _between(before, after)
        if seconds is not None and after.get(key) is not None:
            rates.append(after[key] / seconds)
    return mean(rates, _why(samples))


def _rate(samples: Sequence[Line], key: str) -> Measured:
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


def _gpu(lines: Sequence[Line], samples: Sequence[Line]) -> GpuReadings | Unknown:
    from kfp_gate.observing.gpus import SLOWING

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
    clocks = [s["gpu_sm_mhz"] for line in (lines,) for s in line if s["kind"] == "sample" and s.get("gpu_sm_mhz")]
    top: Measured = Value(max(clocks), len(clocks)) if clocks else Unknown(told.get("gpu_sm_mhz") or _why(samples))
    return GpuReadings(
        str(device.get("name") or ""), reading("gpu_util", samples), reading("gpu_power_w", samples), slowed,
        reading("gpu_sm_mhz", free), reading("gpu_sm_mhz", held), top,
    )  # fmt: skip


def _unknown_readings(lines: Sequence[Line]) -> dict[str, str]:
    """Reading to the reason why it is unknown; `gpu` stands for all."""
    told: dict[str, str] = {}
    for line in lines:
        if line["kind"] in ("gpu", "sample") and isinstance(line.get("unknown"), Mapping):
            told |= {k: v for k, v in line["unknown"].items() if isinstance(v, str)}
    return told


def _epoch(run: Run, first: RankSeen | None) -> EpochSeen | None:
    if first is None:
        return None
    whole = whole_epochs(run)
    counted = len(whole.validation)

    def each(values: Any) -> float:
        return float(values.mean()) if len(values) else 0.0

    # Without a number of steps an epoch is one step, beside which nothing is known.
    steps = whole.steps or 1
    waited: Measured = Unknown(OLD if counted else "no epoch has ended")
    if len(whole.waited):
        waited = mean(whole.waited.tolist(), "")
    elif total := (run.record.get("checkpoints") or {}) if isinstance(run.record.get("checkpoints"), Mapping) else {}:
        value = total.get("waited_s")
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and counted:
            waited = Value(float(value) / counted, counted)
    return EpochSeen(
        steps, steps * first.step_s, each(whole.validation), each(whole.checkpoint), each(whole.between), waited,
        counted,
    )  # fmt: skip
