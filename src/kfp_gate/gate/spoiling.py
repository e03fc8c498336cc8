"""Spoilt copies of predictions: what no gate may let through.

A gate that passes one of these asks nothing that matters. Two copies: nothing was detected; every detection is wrong,
which is also what a model scores that finds the objects and confuses their classes.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kfp_gate.evaluation.columns import TRUE, Records

SPOILT = {
    "silent": "a model that detects nothing",
    "wrong": "a model whose detections are all wrong",
}
"""Name of each copy, and what it stands for."""


def spoil(records: Records, how: str) -> Records:
    """A spoilt copy of records; `how` is a key of `SPOILT`."""
    if how == "silent":
        return without(records, np.ones(len(records.scores), bool))
    # Not ignored either: where every detection is wrong, none is excused by a crowd.
    return replace(
        records,
        bits=(records.bits & np.uint16(~TRUE & 0xFFFF)).astype(np.uint16),
        band_true=None if records.band_true is None else np.zeros_like(records.band_true),
        ignored=None if records.ignored is None else np.zeros_like(records.ignored),
    )


def without(records: Records, gone: NDArray[np.bool_]) -> Records:
    """Records from which some detections, `gone` (D,), are removed."""
    counts = np.bincount(records.detection_images[~gone], minlength=len(records)).astype(np.int32)
    names = ("scores", "classes", "bits", "ignored", "band_true", "band_ignored", "boxes", "overlaps")
    kept = {n: v[~gone] for n in names if (v := getattr(records, n)) is not None}
    return replace(records, detection_counts=counts, **kept)
