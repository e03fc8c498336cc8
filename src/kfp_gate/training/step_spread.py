"""How long a step takes, and how sure that is.

Loader processes work side by side and hand over their batches in bursts: several steps in a row that wait for
nothing, then a long one. The median of single steps would be that of the steps between two bursts, so steps are
averaged over groups in which every loader process had its turn, and the median is that of the groups.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

Z_90 = 1.645
"""Quantile of the normal distribution that leaves 5% on each side."""

FEWEST_GROUPS = 3


@dataclass(frozen=True)
class StepSpread:
    """Seconds a step.

    Attributes:
        median: over groups of steps.
        low, high: a 90% interval of that median, by order statistics (the binomial bounds of a median's rank in its
            normal approximation); with few groups all that there is.
        groups: number of groups.
    """

    median: float
    low: float
    high: float
    groups: int


def spread_of(seconds: Sequence[float], *, group: int = 1) -> StepSpread | None:
    """The spread of some steps in a row; None without any.

    Args:
        seconds: of each step.
        group: steps to a group; fewer where there would not be three groups. Steps that fill no group are left out.

    >>> spread_of([0.5, 0.5, 2.0] * 5, group=3)
    StepSpread(median=1.0, low=1.0, high=1.0, groups=5)
    """
    if not seconds:
        return None
    size = max(1, min(group, len(seconds) // FEWEST_GROUPS))
    means = sorted(fmean(seconds[i : i + size]) for i in range(0, len(seconds) - size + 1, size))
    count, half = len(means), Z_90 * math.sqrt(len(means)) / 2
    low, high = max(0, math.floor(count / 2 - half) - 1), min(count - 1, math.ceil(count / 2 + half))
    return StepSpread(median(means), means[low], means[high], count)
