"""Whether a series of readings grows, since when and how fast: told apart from noise, jumps, teeth and plateaus.

The readings are cut into stretches that are level or a straight line (optimal partitioning with a penalty for each
stretch: Jackson et al. 2005, IEEE Signal Processing Letters 12, 105-108). Only a line that is the last stretch, or many
even steps, is growth: a single jump is two levels, a plateau ends level, and a line that does not leave the range of
what was there before is a tooth. Slope and interval are those of Theil and Sen (Sen 1968, JASA 63, 1379-1389), which no
single odd reading can move.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

FEWEST = 4
"""Readings after the warm-up that a judgement needs."""

WARMUP = 1
"""First epochs of a process that are left out: allocators, caches and loaders fill."""

MANY_STEPS = 5
"""Steps from which on a staircase is growth: as many buffers, each kept for good, are a leak by instalments."""

SMALLEST = 8 << 20
"""Bytes: what rises by less in all is no growth; allocators keep as much for themselves."""

SMALLEST_SHARE = 0.02
"""The same as a share of the level."""

CLOSE, FAR = 60, 60
"""Of a long series the last `CLOSE` readings are looked at, and `FAR` of those before."""

Z = 1.6448536269514722
"""Standard normal quantile of a two-sided 90% interval."""

STRICT = {2: 22.33, 3: 10.21, 4: 7.17, 5: 5.89, 6: 5.21}
"""Student's t at one-sided 0.1% by degrees of freedom: several series are looked at after each of many epochs."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Growth:
    """A growth that goes on.

    Attributes:
        since: the epoch with which the straight line begins.
        slope: units an epoch; low, high: a 90% interval.
        last: the epoch of the last reading; level: the line's value there.
        readings: how many the line stands on.
    """

    since: int
    slope: float
    low: float
    high: float
    last: int
    level: float
    readings: int

    def reaches(self, limit: float) -> int:
        """The first epoch after the last reading in which the line is at `limit` or above."""
        return self.last + max(1, math.ceil((limit - self.level) / self.slope))


def estimate(readings: Sequence[tuple[int, float | None]], *, smallest: float = SMALLEST) -> Growth | None:
    """The growth that a series ends in; None if it does not grow, or if there are too few readings to tell.

    Args:
        readings: (epoch, value) of one process; None is unknown and left out. Of an epoch that was done again the
            later reading counts.
        smallest: a rise below this in all is no growth.
    """
    x, raw = settled(readings)
    if len(x) < FEWEST or raw[-3:].max() - raw.min() < max(smallest, SMALLEST_SHARE * float(np.median(raw))):
        # Most series: nothing rose by what would matter.
        return None
    y = _without_odd_ones(x, raw)
    pieces = _pieces(x, y)
    for start in _beginnings(x, y, pieces):
        if _rises(x[start:], y[start:], smallest) and _is_new(raw, start) and not _slows_down(x, y, pieces):
            return _growth(x[start:], y[start:])
    begin = _staircase(x, y, pieces, smallest)
    return _growth(x[begin:], y[begin:]) if begin is not None else None


def settled(readings: Sequence[tuple[int, float | None]]) -> tuple[Floats, Floats]:
    """Epochs and values that a judgement uses: in order, without warm-up, repetitions and what is unknown."""
    if not readings:
        return np.empty(0), np.empty(0)
    first = min(epoch for epoch, _ in readings)
    known = {e: v for e, v in readings if v is not None and math.isfinite(v) and e >= first + WARMUP}
    epochs = sorted(known)
    older, recent = epochs[:-CLOSE], epochs[-CLOSE:]
    kept = [*older[:: -(-len(older) // FAR) or 1], *recent]
    return np.array(kept, float), np.array([known[e] for e in kept], float)


def _growth(x: Floats, y: Floats) -> Growth | None:
    slope, low, high = theil_sen(x, y)
    if low <= 0:
        return None
    level = float(np.median(y - slope * x) + slope * x[-1])
    return Growth(int(x[0]), slope, low, high, int(x[-1]), level, len(x))


def theil_sen(x: Floats, y: Floats) -> tuple[float, float, float]:
    """The median of all pairs' slopes, and Sen's 90% interval from Kendall's variance."""
    i, j = np.triu_indices(len(x), 1)
    slopes = np.sort((y[j] - y[i]) / (x[j] - x[i]))
    n, count = len(x), len(slopes)
    reach = Z * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    lower = max(math.floor((count - reach) / 2), 0)
    upper = min(math.ceil((count + reach) / 2), count - 1)
    return float(np.median(slopes)), float(slopes[lower]), float(slopes[upper])


def _beginnings(x: Floats, y: Floats, pieces: list[tuple[int, bool]]) -> Iterator[int]:
    """Where a line that the series ends in may begin: the last stretch, or the one before it if noise cut them."""
    start, line = pieces[-1]
    if line:
        yield start
    if len(pieces) < 2 or not pieces[-2][1]:
        return
    before = pieces[-2][0]
    alone = len(y) - start == 1
    if alone or (line and 0.5 < _slope(x[start:], y[start:]) / _slope(x[before:start], y[before:start]) < 2):
        yield before


def _rises(x: Floats, y: Floats, smallest: float) -> bool:
    """Whether a stretch is a steady rise that chance does not explain."""
    n = len(x)
    if n < FEWEST:
        return False
    centred, slope = x - x.mean(), _slope(x, y)
    rise = slope * (x[-1] - x[0])
    if rise < max(smallest, SMALLEST_SHARE * float(np.median(y))):
        return False
    left = y - y.mean() - slope * centred
    noise = max(math.sqrt(float(left @ left) / (n - 2)), rise / 1000)
    if slope * math.sqrt(float(centred @ centred)) / noise < _strict(n - 2):
        return False
    steps = np.diff(y)
    if steps.max() > 0.6 * steps[steps > 0].sum():
        return False
    # One that slows down is on its way to a plateau.
    return n < 6 or _slope(x[n // 2 :], y[n // 2 :]) > 0.4 * _slope(x[: (n + 1) // 2], y[: (n + 1) // 2])


def _slope(x: Floats, y: Floats) -> float:
    centred = x - x.mean()
    return float(centred @ y / (centred @ centred))


def _slows_down(x: Floats, y: Floats, pieces: list[tuple[int, bool]]) -> bool:
    """Whether a faster rise came right before, not long ago: a plateau is near, or time will tell."""
    if len(pieces) < 2 or not (pieces[-2][1] and pieces[-1][1]):
        return False
    (before, _), (start, _) = pieces[-2:]
    fast, now = _slope(x[before:start], y[before:start]), _slope(x[start:], y[start:])
    return now < 0.6 * fast and x[-1] - x[start] < 2 * (x[start] - x[before])


def _is_new(y: Floats, start: int) -> bool:
    """Whether the last stretch goes beyond all that was there before: a tooth of a saw does not."""
    if start == 0:
        return True
    before = y[:start]
    return bool(np.median(y[-2:]) > before.max() + 0.1 * (before.max() - before.min()))


def _staircase(x: Floats, y: Floats, pieces: list[tuple[int, bool]], smallest: float) -> int | None:
    """Where a rise over many even steps or teeth begins; None if there is none."""
    levels = [float(np.median(y[a:b])) for (a, _), b in zip(pieces, [p[0] for p in pieces[1:]] + [len(y)], strict=True)]
    lengths = np.diff([p[0] for p in pieces] + [len(y)])
    ups = sum(b > a for a, b in pairwise(levels))
    if ups < MANY_STEPS:
        return None
    # It has stopped if it now stands still for longer than ever in between.
    if not pieces[-1][1] and lengths[-1] >= 3 and lengths[-1] > 1.5 * max(lengths[1:-1], default=0):
        return None
    parts = np.array_split(np.arange(len(y)), 4)
    if len(parts[-1]) < 3:
        return None
    middles = np.array([np.median(y[p]) for p in parts])
    rises = np.diff(middles)
    even = bool(rises.min() > 0.4 * rises.mean())
    grown = middles[-1] - middles[0] >= max(smallest, SMALLEST_SHARE * float(np.median(y)))
    return 0 if even and grown and _rises_by_rank(x, y) else None


def _rises_by_rank(x: Floats, y: Floats) -> bool:
    """Mann and Kendall's test at 0.1%."""
    n = len(x)
    i, j = np.triu_indices(n, 1)
    score = float(np.sign(y[j] - y[i]).sum())
    return score > 3.09 * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)


def _pieces(x: Floats, y: Floats) -> list[tuple[int, bool]]:
    """The stretches: where each begins, and whether it is a line (at least `FEWEST` readings) or level."""
    n = len(x)
    variance = _noise(x, y) ** 2
    level_cost = 3 * math.log(n) + 4
    line_cost = level_cost + math.log(n) + 2
    z = y - y.mean()
    columns = {"x": x, "y": z, "xx": x * x, "yy": z * z, "xy": x * z}
    sums = {k: np.concatenate([[0.0], np.cumsum(v)]) for k, v in columns.items()}
    best = np.full(n + 1, np.inf)
    best[0] = -level_cost
    choice: list[tuple[int, bool]] = [(0, False)] * (n + 1)
    for end in range(1, n + 1):
        starts = np.arange(end)
        m = end - starts
        sx, sy, sxx, syy, sxy = (sums[k][end] - sums[k][starts] for k in ("x", "y", "xx", "yy", "xy"))
        around = np.maximum(syy - sy * sy / m, 0)
        spread = sxx - sx * sx / m
        slant = sxy - sx * sy / m
        with np.errstate(divide="ignore", invalid="ignore"):
            line = np.where(m >= FEWEST, np.maximum(around - slant * slant / spread, 0), np.inf)
        costs = np.stack([around / variance + level_cost, line / variance + line_cost]) + best[starts]
        kind, start = np.unravel_index(int(np.argmin(costs)), costs.shape)
        best[end] = costs[kind, start]
        choice[end] = (int(start), bool(kind))
    found, end = [], n
    while end:
        found.append(choice[end])
        end = choice[end][0]
    return found[::-1]


def _without_odd_ones(x: Floats, y: Floats) -> Floats:
    """A single reading far above or below both its neighbours lies on their line: it is no stretch of its own."""
    if len(y) < 3:
        return y
    left, _ = _off_neighbours(x, y)
    middle = np.median(np.stack([y[:-2], y[1:-1], y[2:]]), axis=0)
    clean = y.copy()
    # Beside an odd one on a slope the middle is the next but one: near, as an odd one never is.
    odd = np.abs(y[1:-1] - middle) > np.maximum(6 * _noise(x, y), np.abs(left) / 2)
    clean[1:-1] = np.where(odd, y[1:-1] - left, y[1:-1])
    return clean


def _off_neighbours(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """How far each inner reading is off its neighbours' line, and by what noise of one reading multiplies in that."""
    weight = (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    left: Floats = y[1:-1] - (y[:-2] * (1 - weight) + y[2:] * weight)
    scale: Floats = np.sqrt(1 + weight**2 + (1 - weight) ** 2)
    return left, scale


def _noise(x: Floats, y: Floats) -> float:
    """The readings' standard deviation about whatever they follow: from each one's distance to its neighbours' line.

    By the lower quartile, so that steps at every third reading are no noise.
    """
    floor = max(1 << 19, 0.001 * float(np.abs(y).max()))
    if len(y) < 3:
        return floor
    left, scale = _off_neighbours(x, y)
    return max(float(np.quantile(np.abs(left / scale), 0.25)) / 0.3186, floor)


def _strict(freedom: int) -> float:
    if freedom in STRICT:
        return STRICT[freedom]
    z = 3.0902
    # Cornish and Fisher's expansion of Student's t.
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
