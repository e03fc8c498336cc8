"""One time axis for everything that a run recorded: where it lies, where nobody looked, and its ticks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Any

from kfp_gate.diagnosis.amounts import duration
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.diagnosis.reading.shapes import number

WIDTH = 1000
"""Units of the axis, from its first to its last moment."""

STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000)
SHORTENED = 0.06
"""Share of the axis that a gap gets which would take more than `LONGEST` of it."""
LONGEST = 0.25


@dataclass(frozen=True)
class Gap:
    """Time without any observation, in seconds since 1970."""

    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class TimeAxis:
    """Maps moments to 0..`WIDTH`.

    Attributes:
        start, end: seconds since 1970.
        zone_start: the first moment as its line tells it, with the time zone.
        shortened: gaps that are drawn shorter than they were, so that the rest can be read.
    """

    start: float
    end: float
    zone_start: str
    shortened: tuple[Gap, ...] = ()

    @property
    def _cut_units(self) -> float:
        return WIDTH * SHORTENED * len(self.shortened)

    @property
    def _scale(self) -> float:
        shown = self.end - self.start - sum(g.seconds for g in self.shortened)
        return (WIDTH - self._cut_units) / max(shown, 1e-9)

    def at(self, moment: float) -> float:
        """Where a moment lies."""
        moment = min(max(moment, self.start), self.end)
        x = moment - self.start
        if not self.shortened:
            return x * WIDTH / (self.end - self.start)
        units = 0.0
        for gap in self.shortened:
            if moment >= gap.end:
                x -= gap.seconds
                units += WIDTH * SHORTENED
            elif moment > gap.start:
                inside = moment - gap.start
                x -= inside
                units += WIDTH * SHORTENED * inside / gap.seconds
        return x * self._scale + units

    def ticks(self, most: int = 8) -> list[tuple[float, str]]:
        """Positions with the time since the start, at round times outside of shortened gaps."""
        shown = self.end - self.start - sum(g.seconds for g in self.shortened)
        step = next((s for s in STEPS if shown / s <= most), STEPS[-1] * max(1, round(shown / STEPS[-1] / most)))
        found: list[tuple[float, str]] = []
        after = self.start
        for piece_end, next_start in [*((g.start, g.end) for g in self.shortened), (self.end, self.end)]:
            first = int((after - self.start) // step) + (1 if (after - self.start) % step else 0)
            last = int((piece_end - self.start) // step)
            for i in range(first, min(last, first + 2 * most) + 1):
                x = self.at(self.start + i * step)
                if not found or x - found[-1][0] > WIDTH / (2 * most):
                    found.append((x, _elapsed(i * step)))
            after = next_start
        return found


def moment(line: Mapping[str, Any]) -> float | None:
    """When a line was written, in seconds since 1970; None if it does not say."""
    try:
        return datetime.fromisoformat(str(line["time"])).timestamp()
    except (KeyError, ValueError, OverflowError):
        return None


def time_axis(run: Run) -> TimeAxis | None:
    """The axis from the first to the last line of any rank; None if no line has a time."""
    stamps: list[float] = []
    first: tuple[float, str] | None = None
    for lines in run.ranks.values():
        for line in lines:
            at = moment(line)
            if at is None:
                continue
            # A line tells of a stretch that ended when it was written.
            stamps += [at, at - min(number(line.get("seconds")) or 0.0, 86400.0)]
            if first is None or at < first[0]:
                first = (at, str(line["time"]))
    if first is None:
        return None
    stamps.sort()
    start, end = first[0], max(stamps[-1], first[0] + 1.0)
    long = [Gap(a, b) for a, b in pairwise(s for s in stamps if s >= start) if b - a > 60.0]
    return TimeAxis(start, end, first[1], _to_shorten(long, end - start))


def _to_shorten(gaps: Sequence[Gap], whole: float) -> tuple[Gap, ...]:
    """The gaps beside which the observed time could not be read."""
    found: list[Gap] = []
    for gap in sorted(gaps, key=lambda g: -g.seconds)[:5]:
        rest = whole - sum(g.seconds for g in found)
        if gap.seconds <= LONGEST * rest:
            break
        found.append(gap)
    return tuple(sorted(found, key=lambda g: g.start))


def gaps(moments: Sequence[float]) -> list[Gap]:
    """Where readings that should come regularly did not come: over three times as far apart as those around them.

    The sampler slows down in a long run, so what is usual is taken from the neighbours.
    """
    apart = [b - a for a, b in pairwise(moments)]
    found = []
    for i, seconds in enumerate(apart):
        if seconds <= 2.0:
            continue
        around = sorted([*apart[max(0, i - 5) : i], *apart[i + 1 : i + 6]])
        usual = max(around[len(around) // 2 - 1 : len(around) // 2 + 1], default=1.0)
        if seconds > 3 * usual + 1.0:
            found.append(Gap(moments[i], moments[i + 1]))
    return found


def merge(spans: Iterable[tuple[float, float]], nearer: float = 0.0) -> list[tuple[float, float]]:
    """Sorted spans with those joined that touch or lie nearer than so many units."""
    found: list[tuple[float, float]] = []
    for a, b in sorted(spans):
        if found and a - found[-1][1] <= nearer:
            found[-1] = (found[-1][0], max(found[-1][1], b))
        else:
            found.append((a, b))
    return found


def _elapsed(seconds: float) -> str:
    return "0" if seconds == 0 else duration(seconds)
