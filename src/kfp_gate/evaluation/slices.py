"""Metrics of a part of the images: those with one value in a column of the manifest."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.metrics import Metrics, Value, compute
from kfp_gate.metric_names import parse


def compute_slices(
    whole: Metrics,
    records: Records,
    classes: Sequence[str],
    slices: Mapping[str, Sequence[str]],
    *,
    confidence: float,
    unknown_classes: Sequence[str] = (),
) -> Metrics:
    """`whole` with `slice/<column>=<value>/...` added for every value of every column; the same metrics, overall and
    per class, on the images with that value."""
    values: dict[str, Value] = dict(whole)
    instances = dict(whole.instances)
    for column, per_image in slices.items():
        for value in sorted(set(per_image)):
            label = f"{column}={value}"
            part = records.select(np.array([v == value for v in per_image], bool))
            found = compute(part, classes, confidence=confidence, unknown_classes=unknown_classes)
            values |= {str(replace(parse(name), slice=label)): v for name, v in found.items()}
            prefix = str(replace(parse("map50"), slice=label)).removesuffix("/map50")
            instances |= {prefix if n == "all" else f"{prefix}/{n}": c for n, c in found.instances.items()}
    return replace(whole, values_by_name=values, instances=instances)
