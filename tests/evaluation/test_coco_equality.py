"""Average precision is COCO's: equal to pycocotools to 1e-9, overall, per class, per threshold and per size band."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.evaluation.metrics import NotComputed, ap_per_iou, compute, rows_by_class, scoped

from .coco import Picture, coco_precision, generate, records_of

HOSTILE = {
    "plain": {},
    "ties": {"score_levels": 4},
    "equal overlaps": {"grid": True, "score_levels": 3},
    "crowds": {"crowds": 0.3},
    "crowds and ties": {"crowds": 0.5, "grid": True, "score_levels": 2},
    "nothing but crowds": {"crowds": 1.0},
    "more than 100 of a class in an image": {"classes": 2, "detections": 400, "images": 4, "objects": 30},
    "duplicate detections": {"duplicates": True, "score_levels": 5},
    "no detections": {"detections": 0},
    "no objects": {"objects": 0},
    "one class": {"classes": 1},
    "200 classes": {"classes": 200, "objects": 20, "detections": 60},
}


def check(pictures: list[Picture], class_count: int) -> None:
    reference = coco_precision(pictures, class_count)
    records = records_of(pictures, class_count)
    names = [f"class {k}" for k in range(class_count)]
    found = compute(records, names, bands=True)
    for area, scope in enumerate(("", "size/small/", "size/medium/", "size/large/")):
        for metric, part in (("map50", reference[:1]), ("map75", reference[5:6]), ("map50_95", reference)):
            table = part[..., area]
            expect(found[scope + metric], table[table > -1])
            for k, name in enumerate(names):
                column = table[..., k]
                expect(found[f"class/{name}/{scope}{metric}"], column[column > -1])
    for k, rows in enumerate(rows_by_class(records, class_count)):
        ranked = scoped(records, k, rows, None)
        if ranked.positives:
            np.testing.assert_allclose(ap_per_iou(ranked), reference[:, :, k, 0].mean(1), atol=1e-9, rtol=0)


def expect(value: float | NotComputed, reference: np.ndarray) -> None:
    if len(reference) == 0:
        assert isinstance(value, NotComputed)
    else:
        assert value == pytest.approx(reference.mean(), abs=1e-9, rel=0)


@pytest.mark.parametrize("case", HOSTILE)
@pytest.mark.parametrize("seed", range(3))
def test_equal_to_pycocotools(case: str, seed: int) -> None:
    options = dict(HOSTILE[case])
    check(generate(np.random.default_rng(seed), **options), options.get("classes", 4))


@given(
    seed=st.integers(0, 2**32), classes=st.integers(1, 5), levels=st.integers(0, 6), crowds=st.sampled_from([0, 0.4])
)
@settings(max_examples=40, deadline=None)
def test_equal_to_pycocotools_on_any_set(seed: int, classes: int, levels: int, crowds: float) -> None:
    rng = np.random.default_rng(seed)
    check(generate(rng, images=6, classes=classes, score_levels=levels, crowds=crowds, grid=levels % 2 == 0), classes)


def test_equal_to_hotcoco() -> None:
    import hotcoco

    pictures = generate(np.random.default_rng(5), images=60, detections=80)
    streaming = hotcoco.StreamingEval([{"id": k, "name": str(k)} for k in range(4)])
    number = 1
    for i, p in enumerate(pictures):
        truth = []
        for (x1, y1, x2, y2), c in zip(p.truth_boxes, p.truth_classes, strict=True):
            box = [x1, y1, x2 - x1, y2 - y1]
            truth.append({
                "id": number, "image_id": i, "category_id": int(c), "bbox": box, "area": box[2] * box[3], "iscrowd": 0
            })  # fmt: skip
            number += 1
        xywh = np.c_[p.boxes[:, :2], p.boxes[:, 2:] - p.boxes[:, :2]]
        rows = np.c_[np.full(len(xywh), i), xywh, p.scores.astype(float), p.classes]
        streaming.update([{"id": i, "width": 640, "height": 640}], truth, rows.astype(np.float64))
    done = streaming.finalize()
    done.accumulate()
    done.summarize()
    ours = compute(records_of(pictures, 4), list("abcd"))
    assert ours["map50_95"] == pytest.approx(done.stats[0], abs=1e-9)
    assert ours["map50"] == pytest.approx(done.stats[1], abs=1e-9)


def test_order_of_images_and_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from kfp_gate.evaluation import records as module
    from kfp_gate.evaluation.columns import columns
    from kfp_gate.evaluation.records import Matcher

    pictures = generate(np.random.default_rng(7), images=30, score_levels=5, crowds=0.2)
    once = records_of(pictures, 4)
    monkeypatch.setattr(module, "_CHUNK_DETECTIONS", 40)
    matcher = Matcher(4, detail=True)
    for i in np.random.default_rng(1).permutation(len(pictures)):
        p = pictures[i]
        matcher.add(
            int(i), p.boxes, p.scores, p.classes, p.truth_boxes, p.truth_classes, crowd=p.crowd, size=(640, 640)
        )
    chunked = matcher.finish()
    for name, column in columns(once).items():
        np.testing.assert_array_equal(column, columns(chunked)[name], err_msg=name)
