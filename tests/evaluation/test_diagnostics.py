"""Kinds of error as TIDE counts them, checked against hotcoco; confusion that agrees with the metrics."""

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation import diagnostics
from kfp_gate.evaluation.diagnostics import causes, confusion_matrix, error_parts
from kfp_gate.evaluation.metrics import compute
from kfp_gate.evaluation.records import match

from .coco import Picture, generate, records_of

CLASSES = ("a", "b", "c", "empty")


def reference(pictures: list[Picture]) -> dict:
    import hotcoco

    truth, rows = [], []
    for i, p in enumerate(pictures):
        for (x1, y1, x2, y2), c in zip(p.truth_boxes, p.truth_classes, strict=True):
            w, h = x2 - x1, y2 - y1
            truth.append({
                "id": len(truth) + 1, "image_id": i, "category_id": int(c), "bbox": [x1, y1, w, h], "area": w * h,
                "iscrowd": 0,
            })  # fmt: skip
        for (x1, y1, x2, y2), s, c in zip(p.boxes, p.scores, p.classes, strict=True):
            rows.append([i, x1, y1, x2 - x1, y2 - y1, float(s), c])
    data = {
        "images": [{"id": i, "width": 640, "height": 640} for i in range(len(pictures))], "annotations": truth,
        "categories": [{"id": k, "name": str(k)} for k in range(4)],
    }  # fmt: skip
    gt = hotcoco.COCO(data)
    evaluation = hotcoco.COCOeval(gt, gt.loadRes(np.array(rows)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    return evaluation.tide_errors()


@pytest.mark.parametrize("seed", range(4))
def test_kinds_are_those_of_tide(seed: int) -> None:
    pictures = generate(np.random.default_rng(seed), images=60, detections=40, objects=10)
    records = records_of(pictures, 4)
    theirs, ours = reference(pictures), causes(records)
    names = {"Loc": diagnostics.LOCATION, "Cls": diagnostics.CLASS, "Dupe": diagnostics.DUPLICATE,
             "Both": diagnostics.BOTH, "Bkg": diagnostics.NOTHING}  # fmt: skip
    assert {n: int((ours.kinds == k).sum()) for n, k in names.items()} == {n: theirs["counts"][n] for n in names}
    parts = error_parts(records, CLASSES)
    for ours_name, name in [("both", "Both"), ("duplicate", "Dupe"), ("background", "Bkg"), ("missed", "Miss")]:
        assert parts[ours_name] == pytest.approx(theirs["delta_ap"][name], abs=1e-9)
    # Of several wrong detections on one object hotcoco may move another one; the gain differs in the third digit.
    for ours_name, name in [("class", "Cls"), ("location", "Loc")]:
        assert parts[ours_name] == pytest.approx(theirs["delta_ap"][name], abs=0.005)


def test_every_found_object_is_taken_once() -> None:
    records = records_of(generate(np.random.default_rng(3), images=40, crowds=0.2, grid=True, score_levels=3), 4)
    found = causes(records)
    taken = found.targets[found.kinds == diagnostics.RIGHT]
    assert len(set(taken)) == len(taken) == (records.bits & 1).sum() == found.found.sum()
    assert (records.truth_classes[taken] == records.classes[found.kinds == diagnostics.RIGHT]).all()


def test_confusion_by_hand() -> None:
    a, b, c = [0, 0, 40, 40], [100, 100, 140, 140], [200, 200, 240, 240]
    records = match(
        [(0, [a, b, [300, 300, 340, 340], c], [0.9, 0.8, 0.7, 0.1], [0, 0, 1, 1], [a, b, c], [0, 1, 1])], 2, detail=True
    )
    # a is right; b is taken for class 0; one detection of class 1 is on nothing; c is found below the confidence only.
    assert confusion_matrix(records, ["0", "1"], confidence=0.25).tolist() == [[1, 0, 0], [1, 0, 1], [0, 1, 0]]
    assert confusion_matrix(records, ["0", "1"], confidence=0.05).tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 0]]


def test_confusion_agrees_with_recall_and_counts() -> None:
    records = records_of(generate(np.random.default_rng(9), images=50, crowds=0.1), 4)
    table = confusion_matrix(records, CLASSES, confidence=0.3)
    found = compute(records, CLASSES, confidence=0.3)
    for k, name in enumerate(CLASSES[:3]):
        assert table[k].sum() == found.instances[f"class/{name}"]
        assert table[k, k] / table[k].sum() == pytest.approx(found[f"class/{name}/recall"])


def test_perfect_model_has_no_errors_to_mend() -> None:
    perfect = []
    for p in generate(np.random.default_rng(1), images=20):
        scores = np.linspace(0.9, 0.5, len(p.truth_boxes))
        perfect.append(Picture(p.truth_boxes, scores, p.truth_classes, p.truth_boxes, p.truth_classes, p.crowd))
    assert compute(records_of(perfect, 4), CLASSES)["map50_95"] == 1.0
    assert max(map(abs, error_parts(records_of(perfect, 4), CLASSES).values())) < 1e-9


def test_empty_and_compact_records() -> None:
    assert error_parts(match([(0, [[0, 0, 5, 5]], [0.5], [0], np.zeros((0, 4)), [])], 1, detail=True), ["a"]) == {}
    with pytest.raises(InvalidInput, match="boxes"):
        error_parts(match([(0, [[0, 0, 5, 5]], [0.5], [0], [[0, 0, 5, 5]], [0])], 1), ["a"])
