"""Definitions on sets small enough to count by hand; and what cannot be computed is no number."""

import subprocess
import sys

import numpy as np
import pytest

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.columns import ABSURD, DEGENERATE, DUPLICATE, OUTSIDE
from kfp_gate.evaluation.metrics import NotComputed, compute
from kfp_gate.evaluation.records import Matcher, match

BOX = [10, 10, 50, 50]
FAR = [200, 200, 240, 240]


def test_counts_by_hand() -> None:
    """Image 0: one of two objects found, one false. 1: nothing found. 2: no object, one false. 3: empty, silent."""
    records = match(
        [
            (0, [BOX, [0, 100, 40, 140]], [0.9, 0.6], [0, 0], [BOX, FAR], [0, 0]),
            (1, np.zeros((0, 4)), [], [], [BOX], [0]),
            (2, [BOX], [0.5], [0], np.zeros((0, 4)), []),
            (3, [BOX], [0.1], [0], np.zeros((0, 4)), []),
        ],
        1,
    )
    found = compute(records, ["a"], confidence=0.25)
    assert found["precision"] == pytest.approx(1 / 3)
    assert found["recall"] == pytest.approx(1 / 3)
    assert found["f1"] == pytest.approx(1 / 3)
    assert found["mean_confidence"] == pytest.approx((0.9 + 0.6 + 0.5) / 3)
    assert found["undetected_image_rate"] == 0.5
    assert found["false_alarm_rate"] == 0.5
    assert found["calibration_error"] == pytest.approx((0.1 + 0.6 + 0.5) / 3)
    assert found["map50"] == pytest.approx(34 / 101)
    assert found.instances["all"] == 3
    assert {n: found[f"class/a/{n}"] for n in ("precision", "recall")} == {n: found[n] for n in ("precision", "recall")}


def test_a_false_positive_of_a_class_without_objects_counts_overall() -> None:
    records = match([(0, [BOX, FAR], [0.9, 0.8], [0, 1], [BOX], [0])], 2)
    found = compute(records, ["a", "ghost"])
    assert found["precision"] == 0.5
    assert found["map50"] == 1.0
    assert isinstance(found["class/ghost/map50"], NotComputed)
    assert isinstance(found["class/ghost/precision"], NotComputed)


def test_nothing_at_all() -> None:
    for records in (match([], 1), match([(0, np.zeros((0, 4)), [], [], np.zeros((0, 4)), [])], 1)):
        found = compute(records, ["a"])
        assert not set(found.numbers()) - {"false_alarm_rate", "class/a/false_alarm_rate"}
        assert all(found.not_computed().values())


def test_silent_model_has_recall_zero_and_no_precision() -> None:
    found = compute(match([(0, np.zeros((0, 4)), [], [], [BOX], [0])], 1), ["a"])
    assert found["recall"] == found["map50"] == found["f1"] == 0.0
    assert isinstance(found["precision"], NotComputed)
    assert found["undetected_image_rate"] == 1.0


def test_confidence_is_compared_as_stored() -> None:
    """0.7 is below float32(0.7); a detection of exactly that score counts at confidence 0.7."""
    records = match([(0, [BOX], [0.7], [0], [BOX], [0])], 1)
    assert compute(records, ["a"], confidence=0.7)["recall"] == 1.0
    assert compute(records, ["a"], confidence=0.7001)["recall"] == 0.0


def test_detections_beyond_one_hundred_count_in_recall_not_in_average_precision() -> None:
    corner = np.arange(150) * 4.0
    boxes = np.stack([corner, corner, corner + 3, corner + 3], 1)
    found = compute(match([(0, boxes, np.linspace(0.9, 0.5, 150), np.zeros(150), boxes, np.zeros(150))], 1), ["a"])
    assert found["recall"] == 1.0
    assert found["map50"] == pytest.approx(67 / 101)


def test_abnormal_boxes() -> None:
    matcher = Matcher(2)
    boxes = [BOX, [11, 11, 51, 51], [300, 5, 300.5, 90], [620, 10, 700, 50], [10, 60, 50, 100], [10, 10, 50, 50]]
    matcher.add(0, boxes, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0, 0, 0, 0, 0, 1], [BOX], [0], size=(640, 480))
    bits = matcher.finish().bits
    assert [int(b) & (DEGENERATE | OUTSIDE | DUPLICATE) for b in bits] == [0, DUPLICATE, DEGENERATE, OUTSIDE, 0, 0]
    matcher.add(0, boxes, [0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [0, 0, 0, 0, 0, 1], [BOX], [0])
    assert compute(matcher.finish(), ["a", "b"])["abnormal_box_rate"] == pytest.approx(2 / 6)


def test_duplicates_agree_with_all_pairs() -> None:
    from kfp_gate.evaluation.abnormal import abnormal_bits
    from kfp_gate.evaluation.matching import overlaps

    rng = np.random.default_rng(0)
    group = np.sort(rng.integers(0, 5, 300))
    boxes = np.c_[np.round(rng.uniform(0, 60, (300, 2))), np.round(rng.uniform(30, 40, (300, 2)))]
    expected = np.zeros(300, bool)
    for i in range(300):
        for j in range(i):
            expected[i] |= group[i] == group[j] and overlaps(boxes[i : i + 1], boxes[j : j + 1])[0] >= 0.9
    found = (abnormal_bits(group, boxes, np.zeros((300, 2), np.int32)) & DUPLICATE) != 0
    np.testing.assert_array_equal(found, expected)
    assert 0 < expected.sum() < 300


def test_boxes_absurd_against_the_training_set() -> None:
    class Row:
        width, height = 100, 100
        boxes = np.array([[0, 0.5, 0.5, w, w] for w in np.linspace(0.1, 0.3, 12)] + [[1, 0.5, 0.5, 0.9, 0.3]])
        crowd = np.zeros(13, bool)

    reference = BoxReference.from_json(BoxReference.of([Row], 3).to_json())
    matcher = Matcher(3, reference=reference)
    boxes = [[10, 10, 30, 30], [0, 0, 70, 70], [10, 10, 14, 14], [10, 10, 60, 20], [10, 10, 80, 40]]
    matcher.add(0, boxes, [0.9, 0.8, 0.7, 0.6, 0.5], [0, 0, 0, 0, 2], np.zeros((0, 4)), [], size=(100, 100))
    assert [bool(b & ABSURD) for b in matcher.finish().bits] == [False, True, True, True, False]
    with pytest.raises(InvalidInput):
        Matcher(2, reference=reference)
    with pytest.raises(InvalidInput):
        BoxReference.of([], 2)
    with pytest.raises(InvalidInput):
        BoxReference.from_json({"area": 1})


@pytest.mark.parametrize(
    "change",
    [{"scores": [float("nan")]}, {"boxes": [[0, 0, np.inf, 1]]}, {"classes": [2]}, {"classes": [-1]},
     {"scores": [0.1, 0.2]}, {"truth_classes": [0, 0]}, {"truth_boxes": [[np.nan] * 4]}],
)  # fmt: skip
def test_impossible_detections_are_broken(change: dict) -> None:
    good = {"boxes": [BOX], "scores": [0.5], "classes": [0], "truth_boxes": [BOX], "truth_classes": [0]}
    with pytest.raises(Broken, match="image 7"):
        Matcher(2).add(7, **{**good, **change})


def test_the_same_image_twice_is_broken() -> None:
    with pytest.raises(Broken, match="twice"):
        match([(1, [BOX], [0.5], [0], [BOX], [0])] * 2, 1)


def test_bad_requests_are_refused() -> None:
    records = match([(0, [BOX], [0.5], [0], [BOX], [0])], 1)
    for change in ({"confidence": float("nan")}, {"confidence": 1.5}, {"bands": True}):
        with pytest.raises(InvalidInput):
            compute(records, ["a"], **change)
    with pytest.raises(InvalidInput, match="twice"):
        compute(records, ["a", "a"])


def test_judging_needs_no_torch() -> None:
    """The image of `judge_evaluation` has neither torch nor ultralytics, and training ranks judge nothing."""
    code = (
        "import sys\n"
        "for name in ('torch', 'ultralytics', 'cv2', 'hotcoco'): sys.modules[name] = None\n"
        "from kfp_gate.evaluation import metrics, records, bootstrap, diagnostics, evaluate, slices, gather, predict\n"
        "try:\n"
        "    import torch\n"
        "except ImportError:\n"
        "    print('hidden')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "hidden\n", done.stderr


def test_best_first_is_a_stable_sort() -> None:
    from kfp_gate.evaluation.columns import best_first

    rng = np.random.default_rng(0)
    scores = np.concatenate([rng.normal(0, 1, 500), np.round(rng.random(500), 1), [0.0, -0.0, 1.0, -1.0, 1e-40]])
    scores = rng.permutation(scores).astype(np.float32)
    np.testing.assert_array_equal(best_first(scores), np.argsort(-scores, kind="stable"))
    assert len(best_first(np.zeros(0, np.float32))) == 0
