"""Confidence intervals behind criteria: the image bootstrap of the records, paired against the champion."""

from collections.abc import Iterable
from statistics import NormalDist

import numpy as np

from kfp_gate.evaluation.bootstrap import Resamples, difference, resample
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.gate.criteria import Criteria
from kfp_gate.gate.settings import GateSettings
from kfp_gate.metric_names import LOWER_IS_BETTER, parse

Intervals = dict[str, tuple[float, float]]
"""Canonical metric name to (low, high)."""

TAIL = 5
"""Resamples that a percentile must have beyond it. Of fewer it is mostly chance, and the interval is widened to the
normal one of the same resamples: a family of 200 criteria asks for the 99.975% interval, and 1000 resamples end at
99.8%."""


def value_intervals(evaluation: Evaluation, criteria: Criteria, settings: GateSettings, level: float) -> Intervals:
    """Intervals of the values that `min` and `max` bounds are about. Empty without resampling."""
    names = _names(criteria, drops=False)
    if not names or not settings.resamples:
        return {}
    return _intervals(_resamples(evaluation, evaluation.unknown_classes, names, settings), level)


def drop_intervals(
    candidate: Evaluation, champion: Evaluation, unknown: tuple[str, ...], criteria: Criteria, settings: GateSettings,
    level: float,
) -> Intervals:  # fmt: skip
    """Intervals of how much worse the candidate is than the champion, on the same draws of images.

    Args:
        unknown: classes that one of the two does not know; left out of both.
    """
    names = _names(criteria, drops=True)
    if not names or not settings.resamples:
        return {}
    mine, theirs = (_resamples(e, unknown, names, settings) for e in (candidate, champion))
    found = {}
    for name, (low, high) in _intervals(difference(mine, theirs), level).items():
        found[name] = (low, high) if parse(name).metric in LOWER_IS_BETTER else (-high, -low)
    return found


def _names(criteria: Criteria, *, drops: bool) -> list[str]:
    return list(dict.fromkeys(c.metric for c in criteria.entries if (c.kind == "max_drop") == drops))


def _resamples(evaluation: Evaluation, unknown: Iterable[str], names: list[str], settings: GateSettings) -> Resamples:
    wanted = {s.partition("=")[0] for n in names if (s := parse(n).slice) is not None}
    return resample(
        evaluation.records, evaluation.classes, names, resamples=settings.resamples, seed=settings.seed,
        confidence=settings.confidence, unknown_classes=tuple(unknown),
        slices={column: values for column, values in evaluation.slices.items() if column in wanted},
    )  # fmt: skip


def _intervals(resamples: Resamples, level: float) -> Intervals:
    found = {}
    for place, name in enumerate(resamples.names):
        interval = resamples.interval(name, level)
        if interval is not None and len(resamples.samples) * (1 - level) / 2 < TAIL:
            point, spread = float(resamples.point[place]), float(np.nanstd(resamples.samples[:, place]))
            reach = NormalDist().inv_cdf(0.5 + level / 2) * spread
            interval = (min(interval[0], point - reach), max(interval[1], point + reach))
        if interval is not None:
            found[name] = interval
    return found
