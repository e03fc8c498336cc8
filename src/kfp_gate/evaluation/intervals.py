"""Confidence intervals from bootstrap samples that hold on small sets too.

Three steps. (1) The percentile interval, bias-corrected (Efron and Tibshirani 1993, 14.3, without acceleration):
average precision is biased upwards on few objects. (2) Expanded for few images (Hesterberg 2015, "What Teachers Should
Know About the Bootstrap", 4.1.1): with t quantiles, and for the missing n / (n - 1). (3) Where the samples cannot
vary, as nearly all trials went one way, the interval of a binomial share (Wilson 1927): 5 of 5 objects found does not
prove a recall of 1.
"""

from math import pi, sqrt, tan
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

FEW = 10
"""Fewer successes or failures than this, and the bootstrap alone is not trusted."""

TAIL = 5
"""Resamples that must lie beyond a percentile. With fewer it is mostly chance."""

_NORMAL = NormalDist()


def confidence_interval(
    point: float, samples: NDArray[np.float64], *, level: float, units: int, trials: int, paired: bool = False
) -> tuple[float, float] | None:
    """A two-sided interval for a value from 0 to 1, or for the difference of two (`paired`).

    Args:
        point: the value on the images as they are.
        samples: (B,) the values on resampled images; NaN without evidence.
        level: for instance 0.95.
        units: images that hold evidence. Below 2 nothing is known, and the interval is everything.
        trials: what the value is a share of; 0 if it is no share.

    Returns:
        (low, high), or None if there is no point value or no sample.
    """
    finite = samples[np.isfinite(samples)]
    if not np.isfinite(point) or not len(finite):
        return None
    floor = -1.0 if paired else 0.0
    if units < 2:
        return floor, 1.0
    z = _NORMAL.inv_cdf((1 + level) / 2)
    reach = t_quantile(z, units - 1) * sqrt(units / (units - 1))
    below = float((finite < point).mean() + (finite == point).mean() / 2)
    bias = _NORMAL.inv_cdf(min(max(below, 0.5 / len(finite)), 1 - 0.5 / len(finite)))
    # A bias of more than one deviation is noise of few samples, not bias.
    bias = min(max(bias, -1.0), 1.0)
    tails = [_NORMAL.cdf(2 * bias - reach), _NORMAL.cdf(2 * bias + reach)]
    low, high = (float(v) for v in np.quantile(finite, tails))
    if min(tails[0], 1 - tails[1]) * len(finite) < TAIL:
        # Beyond the resamples' reach, as for a family of 200 criteria: the normal interval, where it is wider.
        spread = reach * float(finite.std())
        low, high = min(low, point - spread), max(high, point + spread)
    if trials and paired:
        # No pair that differs, among n, leaves a share of pairs that differ below z^2 / (n + z^2).
        unseen = z * z / (trials + z * z)
        low, high = min(low, point - unseen), max(high, point + unseen)
    elif trials and min(point, 1 - point) * trials < FEW:
        share = wilson(point, trials, z)
        low, high = min(low, share[0]), max(high, share[1])
    return max(floor, min(low, point)), min(1.0, max(high, point))


def wilson(share: float, trials: int, z: float) -> tuple[float, float]:
    """The Wilson score interval of a share of independent trials."""
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    return centre - half, centre + half


def t_quantile(z: float, freedom: int) -> float:
    """Student's quantile from the normal one (Abramowitz and Stegun 26.7.5); one degree of freedom: exact."""
    if freedom == 1:
        return tan(pi * (_NORMAL.cdf(z) - 0.5))
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / float(freedom) ** (i + 1) for i, term in enumerate(terms))
