"""The figures of a diagnosis's page, as its template draws them: steps, lanes over time, loaders, the profile."""

from collections.abc import Mapping, Sequence
from typing import Any

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.findings import Diagnosis
from kfp_gate.diagnosis.pages.lanes import Lane, rank_lanes
from kfp_gate.diagnosis.pages.ribbon import DOINGS, marks, ribbon
from kfp_gate.diagnosis.pages.step_bars import LoaderPart, StepBar
from kfp_gate.diagnosis.pages.text import SHOWN_SHARE
from kfp_gate.diagnosis.pages.time_axis import TimeAxis
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.diagnosis.reading.shapes import number

PHASE_COLOURS = {
    "data": "s2",
    "transfer": "s4",
    "forward": "s1",
    "loss": "s5",
    "backward": "s3",
    "optimizer": "s6",
}
WORTH_A_ROW = 0.01
"""Share of the loaders' time below which a part or a function is only named."""

POINTS = 400
"""Points of a curve of the rank that is shown."""
POINTS_OF_OTHERS = 900
"""Points that the curves of one kind have together, of all ranks that are folded: the page must stay small."""


def steps(diagnosis: Diagnosis, bars: Sequence[StepBar]) -> dict[str, Any]:
    """A stacked bar for each rank, clock and input, and the table of phases."""
    widest = max((b.total for b in bars), default=0.0)
    inputs = {b.input for b in bars}
    several, clocks = len({b.rank for b in bars}) > 1, {b.clock for b in bars}
    rows = []
    # Ranks below each other can be compared.
    for b in sorted(bars, key=lambda b: (b.input != "usual", b.clock != "host", b.rank)):
        what = [f"rank {b.rank}"] if several else []
        what += [f"{b.input} input"] if len(inputs) > 1 else []
        what += [f"{b.clock} clock"] if len(clocks) > 1 else []
        rows.append(
            {
                "label": ", ".join(what) or "a step",
                "text": amounts.duration(b.total),
                "steps": b.steps,
                "pieces": [
                    {"phase": p, "width": 100 * s / widest, "text": f"{p} {amounts.duration(s)}", "colour": _colour(p)}
                    for p, s in b.seconds.items()
                ],
            }
        )
    counts = [b.steps for b in bars]
    seen = [
        p
        for p in (*PHASE_COLOURS, *sorted({p for b in bars for p in b.seconds} - PHASE_COLOURS.keys()))
        if any(b.seconds.get(p, 0.0) >= SHOWN_SHARE * b.total for b in bars)
    ]
    return {
        "rows": rows,
        "prepared": "prepared" in inputs,
        "device": "device" in clocks,
        # The table of phases is the key, if it has them all.
        "key": [(p, _colour(p)) for p in seen] if set(seen) - {p.name for p in diagnosis.phases} else [],
        "counted": " to ".join(f"{n:,}" for n in sorted({min(counts), max(counts)})) if counts else "",
        "phases": [
            {
                "name": p.name,
                "colour": _colour(p.name),
                "seconds": amounts.duration(p.seconds),
                "interval": amounts.interval(p.low, p.high),
                "share": amounts.share(p.share),
            }
            for p in diagnosis.phases
            if p.share >= SHOWN_SHARE
        ],
    }


def _colour(phase: str) -> str:
    return PHASE_COLOURS.get(phase, "soft")


def over_time(run: Run, axis: TimeAxis, first: int | None = None) -> dict[str, Any]:
    """Ribbons of all ranks, lanes of each, and marks, on one axis; the lanes of rank `first` are not folded."""
    shown = first if first is not None and first in run.ranks else min(run.ranks)
    others = [r for r in sorted(run.ranks) if r != shown]
    points = max(60, POINTS_OF_OTHERS // max(len(others), 1)) if others else POINTS
    events, more = marks(run, axis)
    pieces = {r: ribbon(run, r, axis) for r in sorted(run.ranks)}
    doings = {p.doing for found in pieces.values() for p in found}
    return {
        "ticks": axis.ticks(),
        "marks": events,
        "more_marks": more,
        "since": _clock(axis.zone_start),
        "ribbons": [{"rank": r, "pieces": found} for r, found in pieces.items()],
        "doings": [(k, v) for k, v in DOINGS.items() if k in doings],
        "length": amounts.duration(axis.end - axis.start),
        "cuts": [
            {"x": axis.at(g.start), "width": axis.at(g.end) - axis.at(g.start), "text": amounts.duration(g.seconds)}
            for g in axis.shortened
        ],
        "first": _rank(run, shown, axis, POINTS),
        "others": [_rank(run, r, axis, min(points, POINTS)) for r in others],
    }


def _clock(time: str) -> str:
    """A moment of a timeline for people: the day, the second, the zone."""
    day, _, rest = time.partition("T")
    return f"{day} {rest[:8]} {rest[8:].lstrip('.0123456789')}".strip()


def _rank(run: Run, rank: int, axis: TimeAxis, points: int) -> dict[str, Any]:
    found = rank_lanes(run, rank, axis, points)
    gpu = found.gpu
    if all(lane.unknown for lane in gpu) and len({lane.unknown for lane in gpu}) == 1:
        gpu = (Lane("GPU", unknown=gpu[0].unknown),)
    device = next((str(g["name"]) for g in run.lines("gpu", rank) if g.get("name")), "")
    node = next((str(line["node"]) for line in run.ranks[rank] if line.get("node")), "")
    return {
        "rank": rank,
        "node": node,
        "device": device,
        "lanes": [found.wait, *gpu, *found.host],
        "quiet": found.quiet,
    }


def loader(run: Run, parts: Sequence[LoaderPart]) -> dict[str, Any] | None:
    """The parts of the loaders' work; None if nothing is known of them."""
    if not parts:
        return None
    conditions = run.conditions
    workers = number(conditions.get("workers"))
    rows = [
        {
            "name": p.name.removeprefix("transform:"),
            "kind": "transform" if p.name.startswith("transform:") else "",
            "wall": amounts.duration(p.wall),
            "cpu": amounts.duration(p.cpu),
            "share": amounts.share(p.share),
            "bar": {
                "label": p.name,
                "text": amounts.share(p.share),
                "value": p.share,
                "state": "mark",
                "interval": None,
                "bound": None,
            },
        }
        for p in parts
        if p.share >= WORTH_A_ROW
    ]
    return {
        "rows": rows,
        "workers": None if workers is None else int(workers),
        "small": [p.name.removeprefix("transform:") for p in parts if p.share < WORTH_A_ROW],
    }


def profile(run: Run) -> dict[str, Any] | None:
    """The profiled window, if there was one."""
    for rank in sorted(run.ranks):
        for line in run.lines("profile", rank):
            return {
                "steps": _count(line.get("steps")),
                "step": amounts.duration(number(line.get("step_s"))),
                "around": amounts.duration(number(line.get("around_s"))),
                "nsys": line.get("nsys"),
                "trace": line.get("trace"),
                "ops": [
                    {
                        "name": str(o.get("name")),
                        "calls": _count(o.get("calls")),
                        "cpu": amounts.duration(number(o.get("cpu_s"))),
                        "device": amounts.duration(number(o.get("device_s"))),
                    }
                    for o in (line.get("ops") or ())[:12]
                    if isinstance(o, Mapping)
                ],
            }
    return None


def _count(value: Any) -> str:
    found = number(value)
    return amounts.UNKNOWN if found is None else f"{found:,.0f}"
