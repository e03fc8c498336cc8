"""From records to evidence: the value, the count and the interval behind each criterion."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.metrics import Metrics, NotComputed, compute
from kfp_gate.gate.criteria import Criteria, Criterion
from kfp_gate.gate.deciding import Evidence
from kfp_gate.gate.slices import Slices
from kfp_gate.metric_names import LOWER_IS_BETTER, MetricName, parse

OF_IMAGES = frozenset({"undetected_image_rate", "false_alarm_rate"})
OF_DETECTIONS = frozenset({"precision", "mean_confidence", "abnormal_box_rate", "calibration_error"})

Interval = tuple[float, float]


@dataclass(frozen=True)
class Measured:
    """One model on the test set: its metrics as a whole and by slice.

    Attributes:
        records: of the whole test set.
        classes: of the test set, in index order.
        unknown: classes of the test set that the model cannot report.
        by_slice: metrics per slice; None is the whole set.
    """

    records: Records
    classes: tuple[str, ...]
    confidence: float
    by_slice: Mapping[str | None, Metrics]
    masks: Mapping[str, NDArray[np.bool_]] = field(default_factory=dict)  # (I,) bool by slice
    unknown: tuple[str, ...] = ()

    def within(self, part: str | None) -> Records:
        """The records of a slice."""
        return self.records if part is None else self.records.select(self.masks[part])

    def value(self, name: str) -> float | NotComputed:
        """A metric by its canonical name, slice included."""
        parsed = parse(name)
        return self.by_slice[parsed.slice].get(
            str(replace(parsed, slice=None)), NotComputed("this metric is not taken in this scope")
        )


def measure(
    records: Records,
    classes: Sequence[str],
    criteria: Criteria,
    slices: Slices,
    *,
    confidence: float,
    unknown: Sequence[str] = (),
    bands: bool = True,
) -> Measured:
    """Compute what the criteria ask for.

    Args:
        unknown: classes that are left out of every mean and pool: those that a model does not know.
        bands: also by size band, where the records know it.
    """
    bands = bands and records.band_true is not None
    masks = {part: slices.mask(part, records.images) for part in criteria.slices}
    by_slice: dict[str | None, Metrics] = {None: compute(records, classes, confidence=confidence, bands=bands,
                                                         unknown_classes=unknown)}  # fmt: skip
    for part, mask in masks.items():
        by_slice[part] = compute(
            records.select(mask), classes, confidence=confidence, bands=bands, unknown_classes=unknown
        )
    return Measured(records, tuple(classes), confidence, by_slice, masks, tuple(unknown))


def evidence_of(
    criterion: Criterion,
    candidate: Measured,
    *,
    interval: Interval | None = None,
    champion: Measured | None = None,
    drop_interval: Interval | None = None,
    no_champion: str = "",
    first: bool = False,
) -> Evidence:
    """The evidence for one criterion.

    Args:
        champion: measured on the same images, with the same classes left out; None: see `no_champion` and `first`.
    """
    parsed = parse(criterion.metric)
    value = candidate.value(criterion.metric)
    records = candidate.within(parsed.slice)
    sure = _sure(records, candidate, parsed)
    instances = _instances(records, candidate, parsed)
    theirs = champion.value(criterion.metric) if champion is not None else None
    if isinstance(theirs, NotComputed):
        no_champion, theirs = f"the champion's value is not computed: {theirs.reason}", None
    missing = isinstance(value, NotComputed)
    return Evidence(
        value=None if isinstance(value, NotComputed) else value,
        reason=value.reason if isinstance(value, NotComputed) else "",
        instances=instances,
        silent=missing and parsed.metric in OF_DETECTIONS and sure == 0 and instances > 0,
        interval=interval,
        champion=theirs,
        drop_interval=drop_interval,
        lower_is_better=parsed.metric in LOWER_IS_BETTER,
        no_champion=no_champion,
        first=first,
    )


def _sure(records: Records, measured: Measured, name: MetricName) -> int:
    """Detections at or above the confidence."""
    sure = records.scores >= np.float32(measured.confidence)
    if name.class_name is not None:
        sure &= records.classes == measured.classes.index(name.class_name)
    return int(sure.sum())


def _instances(records: Records, measured: Measured, name: MetricName) -> int:
    """Labelled objects in the metric's scope; for a rate of images, those images."""
    if name.metric not in OF_IMAGES:
        scope = str(MetricName("", name.class_name, name.size)).rstrip("/") or "all"
        return measured.by_slice[name.slice].instances.get(scope, 0)
    counting = ~records.crowd
    if name.class_name is not None:
        counting = counting & (records.truth_classes == measured.classes.index(name.class_name))
    size = len(records)
    holding = np.bincount(records.truth_images[counting], minlength=size) > 0
    if name.metric == "undetected_image_rate":
        return int(holding.sum())
    crowded = np.bincount(records.truth_images[records.crowd], minlength=size) > 0
    return int((~holding & ~crowded).sum())
