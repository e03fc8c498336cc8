"""What one rank recorded, drawn on the run's time axis: readings as lanes, its doings as a ribbon, events as marks.

A lane names the stretches in which there was no reading, and says why if there never was one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.pages.curves import Curve, curve, round_size, round_up
from kfp_gate.diagnosis.pages.time_axis import TimeAxis, gaps, merge, moment
from kfp_gate.diagnosis.reading.runs import Line, Run
from kfp_gate.diagnosis.reading.shapes import number

Reading = Callable[[Line], float | None]


@dataclass(frozen=True)
class Lane:
    """One row of the time axis.

    Attributes:
        name: what was read.
        curves: those that have any reading.
        top: what its upper edge stands for.
        facts: mean and largest value of each curve, as text; one number where they are the same.
        unknown: why nothing is known; "" if something is.
        holes: (position, width) of stretches without a reading.
    """

    name: str
    curves: tuple[Curve, ...] = ()
    top: str = ""
    facts: tuple[str, ...] = ()
    unknown: str = ""
    holes: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class _Plan:
    name: str
    readings: Mapping[str, Reading]
    text: Callable[[float | None], str]
    top: float | None = None
    top_of: Reading | None = None
    keys: tuple[str, ...] = ()
    quiet: bool = False
    """Not worth a lane while it is zero throughout: named in one line instead."""


def _key(name: str) -> Reading:
    return lambda line: number(line.get(name))


def _loader(name: str) -> Reading:
    return lambda line: number((line.get("loaders") or {}).get(name)) if _has_loaders(line) else None


def _has_loaders(line: Line) -> bool:
    loaders = line.get("loaders")
    return isinstance(loaders, Mapping) and bool(number(loaders.get("count")))


def _throttle_reasons(line: Line) -> float | None:
    reasons = line.get("gpu_throttle")
    return None if not isinstance(reasons, list) else float(any("idle" not in str(r) for r in reasons))


def _read(line: Line) -> float | None:
    parts = [number(line.get("read")), number((line.get("loaders") or {}).get("read")) if _has_loaders(line) else None]
    known = [p for p in parts if p is not None]
    return sum(known) if known else None


def _held(value: float | None) -> str:
    return amounts.UNKNOWN if value is None else f"{value:.2f} s/s"


GPU_LANES = (
    _Plan("GPU use", {"some kernel ran": _key("gpu_util")}, amounts.share, top=1.0, keys=("gpu_util",)),
    _Plan("GPU memory", {"used": _key("gpu_memory_used"), "reserved by this rank": _key("cuda_reserved")},
          amounts.size, top_of=_key("gpu_memory_total"), keys=("gpu_memory", "gpu_memory_used")),
    _Plan("GPU slowed down", {"by power or heat": _throttle_reasons}, amounts.share, top=1.0,
          keys=("gpu_throttle",), quiet=True),
)  # fmt: skip
HOST_LANES = (
    _Plan("CPU of the main process", {"all threads": _key("cpu"), "busiest thread": _key("cpu_thread")}, amounts.cores),
    _Plan("CPU of the loaders", {"all": _loader("cpu"), "busiest": _loader("cpu_max")}, amounts.cores),
    _Plan("Loaders blocked in a read", {"share in state D": _loader("waiting")}, amounts.share, top=1.0),
    _Plan("Held back by the CPU quota", {"seconds a second": _key("_throttled")}, _held, keys=("throttled_s",),
          quiet=True),
    _Plan("Some task waits (pressure)", {"for CPU": _key("pressure_cpu"), "for storage": _key("pressure_io"),
          "for memory": _key("pressure_memory")}, amounts.share, top=1.0, keys=("pressure_cpu",)),
    _Plan("Read", {"from storage": _read, "from the network": _key("net_rx")}, amounts.rate, quiet=True),
    _Plan("Memory of the container", {"all": _key("cgroup"), "of processes": _key("anon"), "file cache": _key("file")},
          amounts.size, keys=("cgroup",)),
)  # fmt: skip

LOADER_LANES = HOST_LANES[1:3]


@dataclass(frozen=True)
class RankLanes:
    """All lanes of a rank; `quiet` names readings that were zero throughout and need none."""

    wait: Lane
    gpu: tuple[Lane, ...]
    host: tuple[Lane, ...]
    quiet: tuple[str, ...]


def rank_lanes(run: Run, rank: int, axis: TimeAxis, points: int = 400) -> RankLanes:
    """The lanes of one rank, with at most `points` points a curve and a little more where there are gaps."""
    lines = _with_throttling(run.lines("sample", rank))
    timed = [(at, line) for line in lines if (at := moment(line)) is not None]
    missing = _missing(axis, [at for at, _ in timed])
    samples = [(axis.at(at), line) for at, line in timed]
    reasons = _reasons(run, rank)
    groups: list[list[Lane]] = []
    quiet = []
    for plans in (GPU_LANES, HOST_LANES):
        groups.append([])
        for plan in plans:
            values = {label: [(x, read(line)) for x, line in samples] for label, read in plan.readings.items()}
            known = {label: v for label, v in values.items() if any(y is not None for _, y in v)}
            if not known:
                groups[-1].append(Lane(plan.name, unknown=_why(plan, reasons, [line for _, line in samples])))
            elif plan.quiet and not any(y for v in known.values() for _, y in v):
                quiet.append(plan.name)
            else:
                groups[-1].append(_lane(plan, known, missing, points, samples))
    return RankLanes(_data_wait(run, rank, axis, points, missing), tuple(groups[0]), tuple(groups[1]), tuple(quiet))


def _data_wait(run: Run, rank: int, axis: TimeAxis, points: int, missing: Sequence[tuple[float, float]]) -> Lane:
    """The share of each stretch of steps that went into waiting for the next batch.

    Holes are those of the samples: between two stretches of steps the rank may have done something else.
    """
    name = "Steps wait for data"
    spans = []
    for line in run.lines("window", rank):
        seconds, end = line.get("seconds"), moment(line)
        if not isinstance(seconds, Mapping) or end is None:
            continue
        whole = sum(number(s) or 0.0 for s in seconds.values())
        waited = number(seconds.get("data"))
        if whole > 0 and waited is not None:
            spans.append((axis.at(end - whole), axis.at(end), waited / whole))
    if not spans:
        return Lane(name, unknown="this timeline has no windows of steps")
    drawn: list[tuple[float, float] | None] = []
    for before, (a, b, value) in zip([None, *spans], spans, strict=False):
        if before is not None and a - before[1] > 2.0:
            drawn.append(None)
        # A stretch is drawn from its first to its last step, in a long run only its middle.
        drawn += [(a, value), (b, value)] if len(spans) <= points else [((a + b) / 2, value)]
    drawn_curve = curve("share of the steps", drawn, 1.0, points)
    holes = tuple((a, b - a) for a, b in missing)
    return Lane(name, (drawn_curve,), amounts.share(1.0), (_facts(drawn_curve, amounts.share, 1),), holes=holes)


def _lane(
    plan: _Plan, known: Mapping[str, Sequence[tuple[float, float | None]]],
    missing: Sequence[tuple[float, float]], points: int, samples: Sequence[tuple[float, Line]],
) -> Lane:  # fmt: skip
    top = plan.top
    if top is None and plan.top_of is not None:
        top = max((t for _, line in samples if (t := plan.top_of(line)) is not None), default=None)
    if top is None:
        largest = max(y for v in known.values() for _, y in v if y is not None)
        top = round_size(largest) if plan.text in (amounts.size, amounts.rate) else round_up(largest)
    holes = list(missing)
    curves = []
    for label, values in known.items():
        curves.append(curve(label, _broken(values, missing), top, points))
        if len(curves) == 1:
            holes += _nulls(values)
    facts = tuple(_facts(c, plan.text, len(curves)) for c in curves)
    widths = tuple((a, b - a) for a, b in merge(holes, 1.0))
    return Lane(plan.name, tuple(curves), plan.text(top).replace(".0 ", " "), facts, holes=widths)


def _broken(
    values: Sequence[tuple[float, float | None]], missing: Sequence[tuple[float, float]]
) -> list[tuple[float, float] | None]:
    """Points of a curve; None where the pen is lifted."""
    found: list[tuple[float, float] | None] = []
    gap = 0
    for x, value in values:
        while gap < len(missing) and missing[gap][1] <= x + 1e-6:
            found.append(None)
            gap += 1
        found.append(None if value is None else (x, value))
    return found


def _nulls(values: Sequence[tuple[float, float | None]]) -> Iterator[tuple[float, float]]:
    """Stretches of two and more samples in a row that had no such reading."""
    start: float | None = None
    count = 0
    before = values[0][0]
    for x, value in [*values, (values[-1][0], 0.0)]:
        if value is None:
            start = before if start is None else start
            count += 1
        elif start is not None:
            if count > 1:
                yield start, x
            start, count = None, 0
        before = x


def _missing(axis: TimeAxis, moments: Sequence[float]) -> list[tuple[float, float]]:
    """Stretches of the axis that no sample covers."""
    if not moments:
        return []
    ends = gaps([axis.start, *moments, axis.end]) if len(moments) > 1 else []
    return [(axis.at(g.start), axis.at(g.end)) for g in ends]


def _facts(curve: Curve, text: Callable[[float | None], str], curves: int) -> str:
    mean, peak = text(curve.mean), text(curve.peak)
    name = f"{curve.label} " if curves > 1 else ""
    return f"{name}{mean}" if mean == peak else f"{name}{mean}, most {peak}"


def _with_throttling(samples: Iterator[Line]) -> Iterator[Line]:
    """The samples with the seconds that the container was held back in each second, from a counter that only grows."""
    before: tuple[float, float] | None = None
    for line in samples:
        total, at = number(line.get("throttled_s")), moment(line)
        held = None
        if total is not None and at is not None:
            # An attempt on another pod counts from zero again.
            if before is not None and at > before[0] and total >= before[1]:
                held = (total - before[1]) / (at - before[0])
            before = (at, total)
        yield {**line, "_throttled": held}


def _reasons(run: Run, rank: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for kind in ("gpu", "sample"):
        for line in run.lines(kind, rank):
            unknown = line.get("unknown")
            if isinstance(unknown, Mapping):
                found |= {str(k): str(v) for k, v in unknown.items()}
    return found


def _why(plan: _Plan, reasons: Mapping[str, str], samples: Sequence[Line]) -> str:
    if not samples:
        return "this rank wrote no samples"
    for key in plan.keys:
        if key in reasons:
            return reasons[key]
    if plan in GPU_LANES:
        return reasons.get("gpu", "the driver did not tell, and the timeline does not say why")
    if plan in LOADER_LANES:
        counts = [number((s.get("loaders") or {}).get("count")) for s in samples]
        return "this rank has no loader processes" if 0 in counts else "the timeline does not say"
    return "this machine does not tell it"


def why_no_gpu_use(run: Run) -> str:
    """Why it is not known how busy the GPU of the first rank is."""
    first = min(run.ranks, default=0)
    return _why(GPU_LANES[0], _reasons(run, first), list(run.lines("sample", first)))
