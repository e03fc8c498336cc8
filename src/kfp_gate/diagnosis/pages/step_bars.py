"""Where a steady step of each rank spends its time, and where the loaders spend theirs."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kfp_gate.diagnosis.measured.steady import STEP_ORDER, RankSteps, seconds_of, steady_steps
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.diagnosis.reading.shapes import number

_Stretch = tuple[int, Mapping[str, float], Mapping[str, float] | None]
"""Steps, and their seconds by phase on the host's and the device's clock."""

SMALLEST = 0.005
"""Share of the profiled time below which a function is left out."""

SHORTEST = 1e-9
"""Seconds of a step below which its times say nothing."""

_Steady = Mapping[int, RankSteps | None]


@dataclass(frozen=True)
class StepBar:
    """A step as a stacked bar.

    Attributes:
        rank: whose.
        clock: "host", or "device": what the device's own events say of the same steps.
        input: "usual" or "prepared".
        seconds: of one step by phase, in the order in which they follow each other.
        steps: how many steps this is the mean of.
    """

    rank: int
    clock: str
    input: str
    seconds: Mapping[str, float]
    steps: int

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class LoaderPart:
    """One part of what loaders do for a batch: seconds that pass in it, and seconds in which a core works for it.

    Summed over the loaders; None where the timeline does not tell.
    """

    name: str
    wall: float
    cpu: float | None
    share: float


@dataclass(frozen=True)
class HotFunction:
    """A function in the loaders, as a profile saw it; share of the loaders' profiled time that it took itself."""

    name: str
    part: str
    calls: int
    own_s: float
    share: float


@dataclass(frozen=True)
class StepFacts:
    """What the steady steps of all ranks say.

    Attributes:
        bars: one for each rank, clock and kind of input. Profiled steps do not count.
        images_per_second: images that all ranks together put through a steady step, for each second; None: unknown.
        parts: what the loaders do for one batch, the largest first; empty if the timeline does not tell.
    """

    bars: tuple[StepBar, ...]
    images_per_second: float | None
    parts: tuple[LoaderPart, ...]


def step_facts(run: Run) -> StepFacts:
    """The steady steps of a run, in numbers that can be drawn."""
    steady = {rank: steady_steps(run, rank) for rank in sorted(run.ranks)}
    return StepFacts(tuple(_step_bars(run, steady)), _speed(steady), tuple(_loader_parts(steady)))


def _step_bars(run: Run, steady: _Steady) -> list[StepBar]:
    found: list[StepBar] = []
    for rank, usual in steady.items():
        stretches = [(s.steps, s.seconds, s.device) for s in usual.stretches] if usual is not None else []
        found += _bars(rank, "usual", stretches)
        found += _bars(rank, "prepared", list(_prepared(run, rank)))
    return found


def _bars(rank: int, kind: str, stretches: Sequence[_Stretch]) -> Iterator[StepBar]:
    host = [(count, seconds) for count, seconds, _ in stretches]
    # A stretch whose events were not resolved yet says nothing of the device.
    device = [(count, seconds) for count, _, seconds in stretches if seconds]
    for clock, told in (("host", host), ("device", device)):
        steps = sum(count for count, _ in told)
        bar = StepBar(rank, clock, kind, _each([s for _, s in told], steps), steps) if steps else None
        if bar is not None and bar.total >= SHORTEST:
            yield bar


def _prepared(run: Run, rank: int) -> Iterator[_Stretch]:
    """The steps of a rank on batches that were held in memory."""
    for line in run.last_attempt(rank):
        if line.get("kind") == "window" and line.get("input") == "prepared" and not line.get("warmup"):
            seconds, steps = seconds_of(line.get("seconds")), number(line.get("steps"))
            if seconds is not None and steps:
                yield int(steps), seconds, seconds_of(line.get("device"))


def _speed(steady: _Steady) -> float | None:
    total = 0.0
    for usual in steady.values():
        if usual is None or any(s.images is None for s in usual.stretches):
            return None
        seconds = sum(s.total for s in usual.stretches)
        if seconds < SHORTEST:
            return None
        total += sum(s.images or 0 for s in usual.stretches) / seconds
    return total or None


def _loader_parts(steady: _Steady) -> list[LoaderPart]:
    walls: dict[str, float] = {}
    cpus: dict[str, float] = {}
    batches = 0
    for usual in steady.values():
        for stretch in usual.stretches if usual is not None else ():
            batches += stretch.batches
            for name, (wall, cpu) in (stretch.parts or {}).items():
                walls[name] = walls.get(name, 0.0) + wall
                cpus[name] = cpus.get(name, 0.0) + cpu
    whole = sum(walls.values())
    if not batches or not whole:
        return []
    parts = [
        LoaderPart(name, wall / batches, None if math.isnan(cpus[name]) else cpus[name] / batches, wall / whole)
        for name, wall in walls.items()
    ]
    return sorted(parts, key=lambda p: -p.share)


def hot_functions(run: Run, most: int = 12) -> list[HotFunction]:
    """The functions in which the loaders spent most of the profiled window; empty without a profile."""
    found: list[HotFunction] = []
    for rank in sorted(run.ranks):
        for profile in run.lines("profile", rank):
            rows = [f for f in profile.get("functions") or () if isinstance(f, Mapping)]
            whole = sum(number(f.get("own_s")) or 0.0 for f in rows)
            for row in rows:
                own = number(row.get("own_s"))
                if own is not None and whole:
                    name, part = str(row.get("function", "?")), str(row.get("part") or "")
                    found.append(HotFunction(name, part, int(number(row.get("calls")) or 0), own, own / whole))
        if found:
            break  # one rank's profile: they do the same work
    return [f for f in sorted(found, key=lambda f: -f.own_s) if f.share >= SMALLEST][:most]


def _each(seconds: Sequence[Mapping[str, float]], steps: int) -> dict[str, float]:
    sums: dict[str, float] = {}
    for phases in seconds:
        for phase, value in phases.items():
            sums[phase] = sums.get(phase, 0.0) + value
    order = [*STEP_ORDER, *sorted(sums.keys() - set(STEP_ORDER))]
    return {p: sums[p] / steps for p in order if sums.get(p, 0.0) > 0}
