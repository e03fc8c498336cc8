"""Reads the numbers of `observations` out of a run's timelines."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from kfp_gate.diagnosis.measured.observations import EpochSeen, Loading, Observations, Part, RankSeen
from kfp_gate.diagnosis.measured.quantities import Measured, Unknown, Value, mean
from kfp_gate.diagnosis.measured.sampled import (
    gpu_readings,
    growth_per_second,
    of_loaders,
    per_second,
    queued_per_core,
    sampled,
    step_samples,
)
from kfp_gate.diagnosis.measured.steady import RankSteps, attempts, is_steady, steady_steps, whole_epochs
from kfp_gate.diagnosis.reading.runs import Line, Run

MANY_EPOCHS = 6
"""Epochs from which their mean is taken."""

OLD = "this timeline does not hold it"


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
    samples = step_samples(lines, windows)
    weights = [float(s.steps) for s in steps.stretches]
    conditions = next(iter(reversed([line for line in lines if line["kind"] == "conditions"])), {})
    return RankSeen(
        rank=rank, node=steps.node, cuda=steps.cuda, steps=steps.steps,
        step=mean([s.total / s.steps for s in steps.stretches], "no steady steps", weights),
        phases={n: _phase(steps, n, weights) for n in steps.names()}, device=_device(steps), workers=steps.workers,
        loading=_loading(windows, steps, samples), conditions=conditions, gpu=gpu_readings(lines, samples),
        cpu=sampled(samples, "cpu"), thread=sampled(samples, "cpu_thread"),
        loaders=of_loaders(samples, "cpu"), loaders_top=of_loaders(samples, "cpu_max"),
        queued=sampled(samples, "queued"), loaders_queued=of_loaders(samples, "queued"),
        waiting=of_loaders(samples, "waiting"), blocked=of_loaders(samples, "blocked"),
        throttled=growth_per_second(samples, "throttled_s"),
        pressure={k: sampled(samples, f"pressure_{k}") for k in ("cpu", "io", "memory")},
        faults=per_second(samples, "major_faults"),
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
        queued_per_core(samples, steps.workers), *_reads(windows),
    )  # fmt: skip


def _reads(windows: Sequence[Line]) -> tuple[float | None, float | None]:
    """Seconds of reading a file in the first epoch, and in the later ones."""
    wall, files = {True: 0.0, False: 0.0}, {True: 0.0, False: 0.0}
    first = min((w["epoch"] for w in windows if w.get("epoch") is not None), default=None)
    for window in windows:
        read = ((window.get("loader") or {}).get("parts") or {}).get("read")
        if read and read[2] and window.get("epoch") is not None:
            wall[window["epoch"] == first] += read[0]
            files[window["epoch"] == first] += read[2]
    if not files[True] or not files[False]:
        return None, None
    return wall[True] / files[True], wall[False] / files[False]


def _per_batch(values: Sequence[float | None], batches: float) -> float | None:
    """The sum over a batch; None if any of it is unknown."""
    found = [v for v in values if v is not None]
    return sum(found) / batches if len(found) == len(values) else None


def _epoch(run: Run, first: RankSeen | None) -> EpochSeen | None:
    if first is None:
        return None
    whole = whole_epochs(run)
    counted = len(whole.validation)

    # Without a number of steps an epoch is one step, beside which nothing is known.
    steps = whole.steps or 1
    waited: Measured = Unknown(OLD if counted else "no epoch has ended")
    writing = typical(whole.checkpoint.tolist())
    if len(whole.waited):
        waits = whole.waited.tolist()
        # The first checkpoint has no upload before it.
        seconds = typical(waits[1:] or waits)
        waited = Value(seconds, len(waits), min(waits), max(waits))
        if len(waits) == counted:
            own = [max(0.0, c - w) for c, w in zip(whole.checkpoint.tolist(), waits, strict=True)]
            writing = typical(own) + seconds
    elif total := (run.record.get("checkpoints") or {}) if isinstance(run.record.get("checkpoints"), Mapping) else {}:
        value = total.get("waited_s")
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 and counted:
            waited = Value(float(value) / counted, counted)
    return EpochSeen(
        steps, steps * first.step_s, typical(whole.validation.tolist()), writing, typical(whole.between.tolist()),
        waited, counted,
    )  # fmt: skip


def typical(epochs: Sequence[float]) -> float:
    """Seconds of what happens once an epoch: the mean, but of few epochs what at least half of them took.

    A stall in one of three epochs is no rule yet; one in every fifth of many is part of what an epoch costs.
    """
    if not epochs:
        return 0.0
    return sorted(epochs)[(len(epochs) - 1) // 2] if len(epochs) < MANY_EPOCHS else fmean(epochs)
