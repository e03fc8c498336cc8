"""Resampling weights are the same as resampling images, and the intervals hold what they promise."""

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation import bootstrap
from kfp_gate.evaluation.bootstrap import difference, image_weights, resample
from kfp_gate.evaluation.intervals import confidence_interval, t_quantile, wilson
from kfp_gate.evaluation.metrics import NotComputed, compute
from kfp_gate.evaluation.slices import compute_slices
from kfp_gate.metric_names import METRICS, SIZE_BANDS, MetricName

from .coco import generate, records_of
from .simulated import simulate

CLASSES = ("a", "b", "c", "empty")
NAMES = [
    *METRICS,
    *(str(MetricName(m, class_name=c)) for c in CLASSES for m in METRICS),
    *(str(MetricName(m, "a", s)) for s in SIZE_BANDS for m in ("map50", "recall", "precision")),
    *(str(MetricName(m, size=s)) for s in SIZE_BANDS for m in ("map50", "recall", "precision")),
    *(f"slice/light=day/{m}" for m in METRICS),
    "slice/light=night/class/b/map50_95",
]  # fmt: skip


@pytest.mark.parametrize("crowds", [0.0, 0.25])
def test_a_weight_is_a_repeated_image(crowds: float) -> None:
    pictures = generate(np.random.default_rng(2), images=25, detections=40, crowds=crowds)
    light = ["day" if i % 3 else "night" for i in range(25)]
    found = resample(records_of(pictures, 4), CLASSES, NAMES, resamples=4, confidence=0.3, slices={"light": light})
    weights = np.concatenate(list(image_weights(25, 4, 0)))
    for row, weight in enumerate(weights):
        drawn = np.repeat(np.arange(25), weight)
        again = records_of([pictures[i] for i in drawn], 4)
        whole = compute(again, CLASSES, confidence=0.3, bands=True)
        slices = {"light": [light[i] for i in drawn]}
        expected = compute_slices(whole, again, CLASSES, slices, confidence=0.3)
        for column, name in enumerate(NAMES):
            value, sample = expected[name], found.samples[row, column]
            if isinstance(value, NotComputed):
                assert np.isnan(sample), name
            else:
                assert sample == pytest.approx(value, abs=2e-6), name


def test_point_values_are_those_of_metrics() -> None:
    records = records_of(generate(np.random.default_rng(4), images=40), 4)
    found = resample(records, CLASSES, NAMES[:55], resamples=1)
    expected = compute(records, CLASSES)
    for name, point in zip(found.names, found.point, strict=True):
        value = expected[name]
        assert np.isnan(point) if isinstance(value, NotComputed) else point == pytest.approx(value, abs=2e-6)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    records = simulate(np.random.default_rng(1), 50)
    names = ["map50", "map50_95", "recall", "calibration_error"]
    whole = resample(records, ["a"], names, resamples=60, seed=3)
    monkeypatch.setattr(bootstrap, "_BLOCK_BYTES", 4 * 50 * 7)
    cut = resample(records, ["a"], names, resamples=60, seed=3)
    np.testing.assert_allclose(whole.samples, cut.samples, atol=1e-7)
    assert not np.allclose(whole.samples, resample(records, ["a"], names, resamples=60, seed=4).samples)


def test_pairing_by_image_removes_what_both_share() -> None:
    rng = np.random.default_rng(0)
    champion = simulate(rng, 200)
    # The candidate loses the true positives of one detection in fifty, and is the champion otherwise.
    import dataclasses

    bits = champion.bits.copy()
    bits[::50] = 0
    candidate = dataclasses.replace(champion, bits=bits)
    a = resample(candidate, ["a"], ["recall"], resamples=500)
    b = resample(champion, ["a"], ["recall"], resamples=500)
    paired = difference(a, b)
    assert paired.point[0] == pytest.approx(a.point[0] - b.point[0])
    assert paired.samples.std() < 0.35 * np.sqrt(a.samples.var() + b.samples.var())
    low, high = paired.interval("recall")
    assert low < paired.point[0] < high < 0
    with pytest.raises(InvalidInput, match="paired"):
        difference(a, resample(champion, ["a"], ["recall"], resamples=500, seed=9))


def test_a_class_without_objects_has_no_interval() -> None:
    records = records_of(generate(np.random.default_rng(4), images=20), 4)
    found = resample(records, CLASSES, ["class/empty/map50", "class/a/map50"], resamples=50)
    assert found.interval("class/empty/map50") is None
    assert found.interval("class/a/map50") is not None


def test_perfect_on_five_objects_proves_little() -> None:
    samples = np.ones(1000)
    low, high = confidence_interval(1.0, samples, level=0.95, units=5, trials=5)
    assert low == pytest.approx(0.5655, abs=1e-3) and high == 1.0
    assert confidence_interval(1.0, samples, level=0.95, units=1, trials=5) == (0.0, 1.0)
    low, high = confidence_interval(0.0, np.zeros(1000), level=0.95, units=5, trials=5, paired=True)
    assert low < -0.4 and high > 0.4


def test_quantiles_agree_with_tables() -> None:
    for freedom, value in [(1, 12.706), (4, 2.776), (9, 2.262), (30, 2.042), (1000, 1.962)]:
        assert t_quantile(1.959964, freedom) == pytest.approx(value, rel=2e-3)
    assert wilson(0.8, 50, 1.959964) == pytest.approx((0.6696, 0.8876), abs=1e-4)


def test_unknown_names_are_refused() -> None:
    records = simulate(np.random.default_rng(1), 5)
    for name in ("map", "size/small/map50", "slice/x=1/map50"):
        with pytest.raises(InvalidInput):
            resample(records, ["a"], [name])


@pytest.mark.all_only
@pytest.mark.parametrize("images", [15, 60, 200])
@pytest.mark.parametrize("recall", [0.8, 0.97])
def test_intervals_cover_the_truth(images: int, recall: float) -> None:
    """At 95% nominal, 300 sets: a true rate of 0.95 gives 0.913 to 0.98 (three sigma); 0.88 is what we promise."""
    names = ["map50", "map50_95", "precision", "recall", "f1", "mean_confidence", "undetected_image_rate"]
    large = compute(simulate(np.random.default_rng(99), 60_000, recall=recall), ["a"])
    covered = np.zeros(len(names))
    for seed in range(300):
        records = simulate(np.random.default_rng([images, seed]), images, recall=recall)
        found = resample(records, ["a"], names, resamples=300, seed=seed)
        for i, name in enumerate(names):
            low, high = found.interval(name)
            covered[i] += low <= large[name] <= high
    covered /= 300
    print(images, recall, dict(zip(names, covered.round(3), strict=True)))
    assert (covered > 0.88).all(), covered
    if images >= 60:
        # Nor do they cover by being wide, where there are enough failures for the bootstrap alone.
        assert covered[names.index("precision")] < 0.99
