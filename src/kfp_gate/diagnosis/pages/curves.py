"""Curves of readings as SVG paths, `HEIGHT` units high.

Long ones are drawn with a bounded number of points: their mean, and a band from the smallest to the largest reading, so
that a spike of one sample can still be seen.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kfp_gate.diagnosis.pages.time_axis import WIDTH

HEIGHT = 100


@dataclass(frozen=True)
class Curve:
    """One reading over time: the path of its line, and of its band where several samples share a point."""

    label: str
    line: str
    band: str
    mean: float
    peak: float


def curve(label: str, points: Sequence[tuple[float, float] | None], top: float, most: int) -> Curve:
    """Draw readings.

    Args:
        label: what they are.
        points: (position on the time axis, value); None lifts the pen. At least one is not None.
        top: the value at the upper edge.
        most: with more than twice as many readings, a curve gets about so many points.
    """
    known = [p for p in points if p is not None]
    values = [y for _, y in known]
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    runs = [r for r in runs if r]
    if len(known) <= 2 * most:
        line, band = "".join(_path(r, top) for r in runs), ""
    else:
        line, band = "", ""
        for run in runs:
            mean, low, high = _thinned(run, WIDTH / most)
            line += _path(mean, top)
            band += f"{_path(high, top)}L{_path(low[::-1], top)[1:]}Z"
    return Curve(label, line, band, sum(values) / len(values), max(values))


def _thinned(points: Sequence[tuple[float, float]], width: float) -> tuple[list[tuple[float, float]], ...]:
    """Mean, smallest and largest value in each `width` of the axis."""
    mean, low, high = [], [], []
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        bins.setdefault(int(x / width), []).append((x, y))
    for inside in bins.values():
        middle = sum(x for x, _ in inside) / len(inside)
        ys = [y for _, y in inside]
        mean.append((middle, sum(ys) / len(ys)))
        low.append((middle, min(ys)))
        high.append((middle, max(ys)))
    return mean, low, high


def _path(points: Sequence[tuple[float, float]], top: float) -> str:
    scaled = [(f"{x:.1f}".removesuffix(".0"), f"{HEIGHT * (1 - min(max(y / top, 0.0), 1.0)):.0f}") for x, y in points]
    if len(scaled) == 1:
        return f"M{scaled[0][0]} {scaled[0][1]}h.5"
    return "M" + "L".join(f"{x} {y}" for x, y in scaled)


def round_size(value: float) -> float:
    """As `round_up`, in bytes."""
    unit = 1.0
    while unit * 1024 <= value:
        unit *= 1024
    return unit * round_up(value / unit)


def round_up(value: float, steps: Sequence[float] = (1, 1.5, 2, 3, 4, 6, 8, 10)) -> float:
    """A round number at or above a value, for the upper edge of an axis.

    >>> round_up(0.31), round_up(7.0), round_up(0.0)
    (0.4, 8.0, 1.0)
    """
    if value <= 0:
        return 1.0
    unit = 1.0
    while unit > value:
        unit /= 10
    while unit * 10 <= value:
        unit *= 10
    return next(step * unit for step in steps if value <= step * unit * (1 + 1e-9))
