"""How sure a metric is: image-level bootstrap on compact records.

Whole images are drawn with replacement, as objects of one image are not independent. A resample is a weight per
image, so nothing is matched or sorted again: average precision needs only the weighted number of detections shown at
each true positive. The draws depend on seed and image count alone: two models on the same images get the same draws,
and the difference of their samples is paired.

Legend: B resamples, I images, n detections of a class, h of them true positives.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.intervals import confidence_interval
from kfp_gate.evaluation.metrics import RECALL_POINTS, Ranked, rows_by_class, scoped
from kfp_gate.evaluation.sums import NO_SHARES, RATIOS, column_sums
from kfp_gate.metric_names import SIZE_BANDS, MetricName, parse

_BLOCK_BYTES = 8 << 20
_AP_BITS = {"map50": (0,), "map75": (5,), "map50_95": tuple(range(10))}

_SLACK = np.float32(1e-4)
_JUST_ABOVE = (np.arange(101) / 100 < RECALL_POINTS).astype(np.float32)

Floats = NDArray[np.float64]
Weights = NDArray[np.int32]


@dataclass(frozen=True)
class Resamples:
    """Values of some metrics on resampled images.

    `point` are the values on the images as they are, NaN where not computed; they agree with `metrics.compute` to
    about 1e-6. `samples` are NaN in resamples that hold no evidence.
    """

    names: tuple[str, ...]
    point: Floats  # (M,)
    samples: Floats  # (B, M)
    units: Floats  # (M,) images that hold evidence, the independent draws
    trials: Floats  # (M,) objects, detections or images that the value is a share of; 0: it is no share
    images: int
    seed: int
    paired: bool = False

    def of(self, name: str) -> Floats:
        """(B,) the samples of one metric."""
        return self.samples[:, self.names.index(name)]

    def interval(self, name: str, level: float = 0.95) -> tuple[float, float] | None:
        """A two-sided confidence interval; None if the metric was not computed. See `intervals`."""
        i = self.names.index(name)
        return confidence_interval(
            float(self.point[i]), self.samples[:, i], level=level, units=int(self.units[i]),
            trials=int(self.trials[i]), paired=self.paired,
        )  # fmt: skip


def resample(
    records: Records,
    classes: Sequence[str],
    names: Sequence[str],
    *,
    resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.25,
    unknown_classes: Sequence[str] = (),
    slices: Mapping[str, Sequence[str]] | None = None,
) -> Resamples:
    """Values of the named metrics on resampled images.

    Args:
        records: of all images; size bands need detail.
        names: canonical names, overall, per class, per band, per slice.
        slices: per column of the manifest one value per image.

    Raises:
        InvalidInput: an unknown name, or a size band of records without detail.
    """
    parsed = [parse(name, classes=classes, where="bootstrap") for name in names]
    if records.band_true is None and any(p.size for p in parsed):
        raise InvalidInput(
            "records without size bands", expected="records of a stored evaluation", where="bootstrap",
            next_step="evaluate with detail=True",
        )  # fmt: skip
    plan = _Plan(records, classes, parsed, confidence, unknown_classes, slices or {})
    # Weight 1 for every image gives the point values by the same steps.
    blocks = [plan.values(np.ones((1, len(records)), np.int32))]
    blocks += [plan.values(weights) for weights in image_weights(len(records), resamples, seed)]
    table = np.concatenate(blocks)
    return Resamples(tuple(names), table[0], table[1:], *plan.evidence(), len(records), seed)


def difference(candidate: Resamples, champion: Resamples) -> Resamples:
    """Candidate minus champion, paired by image.

    Raises:
        InvalidInput: the two were not resampled with the same images, seed, count and names.
    """
    key = [(r.images, r.seed, len(r.samples), r.names) for r in (candidate, champion)]
    if key[0] != key[1]:
        raise InvalidInput(
            f"resamples of {key[0][:3]} and {key[1][:3]} (images, seed, count)", expected="the same for both",
            where="paired bootstrap", next_step="resample both models with one seed, count and list of metrics",
        )  # fmt: skip
    return Resamples(
        candidate.names, candidate.point - champion.point, candidate.samples - champion.samples,
        np.minimum(candidate.units, champion.units), np.minimum(candidate.trials, champion.trials),
        candidate.images, candidate.seed, paired=True,
    )  # fmt: skip


def image_weights(images: int, resamples: int, seed: int) -> Iterator[Weights]:
    """(B', I) blocks of how often each image was drawn; B resamples in all, however they are cut into blocks."""
    rng = np.random.default_rng([seed, images])
    step = max(1, min(resamples, _BLOCK_BYTES // (4 * max(images, 1))))
    for start in range(0, resamples, step):
        rows = min(step, resamples - start)
        draws = rng.integers(0, images, (rows, images)) if images else np.zeros((rows, 0), np.int64)
        draws += np.arange(rows)[:, None] * images
        yield np.bincount(draws.reshape(-1), minlength=rows * images).reshape(rows, images).astype(np.int32)


class _Plan:
    """What to compute per block of weights, prepared once."""

    def __init__(
        self,
        records: Records,
        classes: Sequence[str],
        names: Sequence[MetricName],
        confidence: float,
        unknown: Sequence[str],
        slices: Mapping[str, Sequence[str]],
    ) -> None:
        self._names = names
        self._confidence = confidence
        self._classes = list(classes)
        self._known = [k for k, c in enumerate(classes) if c not in set(unknown)]
        self._records = records
        self._rows = rows_by_class(records, len(classes))
        self._image_of = records.detection_images.astype(np.int32)
        self._masks = {n.slice: _mask(n.slice, slices, len(records)) for n in names if n.slice is not None}
        ratios = [n for n in names if n.metric in RATIOS]
        self._ratio_place = {str(n): i for i, n in enumerate(ratios)}
        scopes = [
            (n.metric, None if n.class_name is None else self._classes.index(n.class_name), _band(n.size))
            for n in ratios
        ]
        self._sums = [
            column_sums(records, self._rows, self._known, metric, k, band, confidence) for metric, k, band in scopes
        ]

    def evidence(self) -> tuple[Floats, Floats]:
        """(M,) images that hold evidence for each metric, and the trials it is a share of."""
        units, trials = np.zeros(len(self._names)), np.zeros(len(self._names))
        for i, name in enumerate(self._names):
            k = None if name.class_name is None else self._classes.index(name.class_name)
            metric = name.metric if name.metric in RATIOS else "recall"
            place = self._ratio_place.get(str(name))
            sums = (
                self._sums[place]
                if place is not None
                else column_sums(self._records, self._rows, self._known, metric, k, _band(name.size), self._confidence)
            )
            if name.slice is not None:
                sums = sums * self._masks[name.slice][:, None]
            below = sums[:, :2].sum(axis=1) if metric == "precision" else sums[:, -1]
            units[i] = (below > 0).sum()
            trials[i] = 0 if metric in NO_SHARES else below.sum()
        return units, trials

    def values(self, weights: Weights) -> Floats:
        """(B, M) values under (B, I) weights."""
        cache: dict[tuple[str | None, int | None, int, str], Floats] = {}
        found = np.full((len(weights), len(self._names)), np.nan)
        for i, name in enumerate(self._names):
            drawn = weights if name.slice is None else weights * self._masks[name.slice]
            unknown = name.class_name is not None and self._classes.index(name.class_name) not in self._known
            if unknown:
                continue
            if name.metric in RATIOS:
                sums = self._sums[self._ratio_place[str(name)]]
                found[:, i] = RATIOS[name.metric]((drawn.astype(np.float32) @ sums).astype(np.float64))
                continue
            wanted = self._known if name.class_name is None else [self._classes.index(name.class_name)]
            table = np.full((len(weights), max(len(wanted), 1)), np.nan)
            for column, k in enumerate(wanted):
                key = (name.slice, _band(name.size), k, name.metric)
                if key not in cache:
                    cache[key] = self._average_precision(k, _band(name.size), name.metric, drawn)
                table[:, column] = cache[key]
            found[:, i] = _mean(table)
        return found

    def _average_precision(self, k: int, band: int | None, metric: str, weights: Weights) -> Floats:
        ranked = scoped(self._records, k, self._rows[k], band)
        if ranked.positives == 0:
            return np.full(len(weights), np.nan)
        counting = (self._records.truth_classes == k) & ~self._records.crowd
        if band is not None:
            counting &= self._records.truth_in_band(band)
        per_image = np.bincount(self._records.truth_images[counting], minlength=len(self._records))
        positives = (weights.astype(np.float32) @ per_image.astype(np.float32)).astype(np.int64)
        return average_precision_samples(ranked, self._image_of[ranked.rows], weights, positives, bits=_AP_BITS[metric])


def average_precision_samples(
    ranked: Ranked, images: NDArray[np.int32], weights: Weights, positives: NDArray[np.int64], *, bits: Sequence[int]
) -> Floats:
    """(B,) COCO's average precision of one class under image weights, mean over thresholds; NaN without objects.

    Only true positives decide it, as precision falls between them. So per threshold the work is in h, not n. Integer
    sums, because a running sum of floats waits four cycles for each addition.

    Args:
        ranked: (n,) detections, best first.
        images: (n,) image of each.
        weights: (B, I).
        positives: (B,) weighted number of objects.
        bits: thresholds, 0 for IoU 0.50 to 9 for 0.95.
    """
    found = np.zeros(len(weights))
    hits = np.flatnonzero(ranked.true & np.uint16(0x03FF))
    if len(hits):
        # Sums of the detections after the hit before, up to this one: runs of the cut array.
        images = images[: hits[-1] + 1].astype(np.int64)
        starts = np.r_[0, hits[:-1] + 1]
        chosen = [((ranked.true[hits] >> np.uint16(bit)) & 1).nonzero()[0] for bit in bits]
        ignored = ranked.ignored if ranked.ignored is not None and ranked.ignored.any() else None
        step = max(1, _BLOCK_BYTES // (4 * len(images)))
        for start in range(0, len(weights), step):
            block = slice(start, start + step)
            drawn = np.take(weights[block], images, axis=1)
            shown = np.cumsum(np.add.reduceat(drawn, starts, axis=1, dtype=np.int32), axis=1, dtype=np.int32)
            at_hit = np.take(weights[block], images[hits], axis=1)
            for bit, columns in zip(bits, chosen, strict=True):
                counted = shown
                if ignored is not None:
                    flags = ((ignored[: len(images)] >> np.uint16(bit)) & 1).astype(np.int32)
                    hidden = np.add.reduceat(drawn * flags, starts, axis=1, dtype=np.int32)
                    counted = shown - np.cumsum(hidden, axis=1, dtype=np.int32)
                found[block] += _area(
                    np.take(at_hit, columns, axis=1), np.take(counted, columns, axis=1), positives[block]
                )
    found /= 101 * len(bits)
    found[positives == 0] = np.nan
    return found


def _area(drawn: Weights, shown: Weights, positives: NDArray[np.int64]) -> Floats:
    """(B,) sum of the precision envelope over the 101 recall points.

    Each true positive takes the recall points between the recall before it and its own; the first takes 0 as well.
    """
    if drawn.shape[1] == 0:
        return np.zeros(len(drawn))
    true = np.cumsum(drawn, axis=1, dtype=np.int32).astype(np.float32)
    precision = true / np.maximum(shown, 1, dtype=np.float32, casting="unsafe")
    envelope = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    true *= (100 / np.maximum(positives, 1)).astype(np.float32)[:, None]
    true += _SLACK  # float32 must not round a recall just below its point
    reached = np.floor(true)
    # A recall exactly on a point that COCO's floats put a last digit higher does not reach it.
    on_point = np.flatnonzero(true - reached < 2 * _SLACK)
    if len(on_point):
        flat = reached.reshape(-1)
        flat[on_point] -= _JUST_ABOVE[flat[on_point].astype(np.int64)]
    # The sum of envelope * (reached - reached before), and the first recall point.
    area = np.einsum("ij,ij->i", envelope, reached) - np.einsum("ij,ij->i", envelope[:, 1:], reached[:, :-1])
    found: Floats = (area + envelope[:, 0]).astype(np.float64)
    return found


def _mean(table: Floats) -> Floats:
    """Row means over what is not NaN; NaN where nothing is."""
    count = np.isfinite(table).sum(axis=1)
    found: Floats = np.where(count > 0, np.nansum(table, axis=1) / np.maximum(count, 1), np.nan)
    return found


def _band(size: str | None) -> int | None:
    return None if size is None else SIZE_BANDS.index(size)


def _mask(label: str, slices: Mapping[str, Sequence[str]], images: int) -> Weights:
    for column, values in slices.items():
        value = label.removeprefix(f"{column}=")
        if label.startswith(f"{column}=") and value in set(values):
            return np.array([v == value for v in values], np.int32)
    raise InvalidInput(
        f"unknown slice {label!r}", expected=f"a value of {', '.join(map(repr, slices)) or 'a sliced column'}",
        where="bootstrap", next_step="evaluate with that column in `slices`",
    )  # fmt: skip
