"""1,000 image resamples of every class's AP50-95: ours against recomputing it for each resample.

    python benchmarks/bootstrap.py                                  500,000 detections, 20 classes
    python benchmarks/bootstrap.py --detections 50000 --resamples 200

The peers are run on a few resamples and scaled up, as they would take hours; each in a process of its own. The bar is
against the fastest engine that gives per-class values, hotcoco, evaluating the drawn images anew. Shown beside it, for
the reader's judgement: ranking our own records anew (matching kept), and `hotcoco.compare`, which resamples two
models' totals at once and has no interval per class. The last line is one JSON object.
"""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from typing import Any

import numpy as np

PER_IMAGE, OBJECTS, BAR = 300, 20, 50.0
ENGINES = {"kfp-gate": 0, "hotcoco for each resample": 5, "records ranked anew": 20, "hotcoco.compare": 10}
"""How many resamples each engine runs; 0 for all."""


def pictures(detections: int, classes: int) -> list[tuple[np.ndarray, ...]]:
    rng = np.random.default_rng(0)
    made = []
    for _ in range(detections // PER_IMAGE):
        corner = rng.uniform(0, 500, (OBJECTS, 2))
        truth = np.concatenate([corner, corner + rng.uniform(10, 120, (OBJECTS, 2))], 1)
        kinds = rng.integers(0, classes, OBJECTS)
        source = rng.integers(0, OBJECTS, PER_IMAGE)
        boxes = truth[source] + rng.normal(0, 8, (PER_IMAGE, 4))
        boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
        found = np.where(rng.random(PER_IMAGE) < 0.8, kinds[source], rng.integers(0, classes, PER_IMAGE))
        made.append((boxes, rng.random(PER_IMAGE).astype(np.float32), found, truth, kinds))
    return made


def records_of(images: list[tuple[np.ndarray, ...]], classes: int) -> Any:
    from kfp_gate.evaluation.records import Matcher

    matcher = Matcher(classes, abnormal=False)
    for number, image in enumerate(images):
        matcher.add(number, *image)
    return matcher.finish()


def ours(images: list[tuple[np.ndarray, ...]], classes: int, resamples: int) -> tuple[float, np.ndarray]:
    from kfp_gate.evaluation.bootstrap import resample

    records, names = records_of(images, classes), [str(k) for k in range(classes)]
    begin = time.process_time()
    found = resample(records, names, [f"class/{k}/map50_95" for k in names], resamples=resamples)
    return time.process_time() - begin, found.samples


def ranked_anew(images: list[tuple[np.ndarray, ...]], classes: int, resamples: int) -> tuple[float, np.ndarray]:
    from kfp_gate.evaluation.bootstrap import image_weights
    from kfp_gate.evaluation.columns import columns, from_columns
    from kfp_gate.evaluation.metrics import ap_per_iou, rows_by_class, scoped

    records = records_of(images, classes)
    own = columns(records)
    ends = np.cumsum(records.detection_counts)
    truth_ends = np.cumsum(records.truth_counts)
    weights = np.concatenate(list(image_weights(len(records), resamples, 0)))
    table = []
    begin = time.process_time()
    for weight in weights:
        drawn = np.repeat(np.arange(len(records)), weight)
        rows = np.concatenate([np.arange(ends[i] - records.detection_counts[i], ends[i]) for i in drawn])
        truths = np.concatenate([np.arange(truth_ends[i] - records.truth_counts[i], truth_ends[i]) for i in drawn])
        index = {"detection": rows, "truth": truths, "image": drawn}
        sizes = {len(records.scores): "detection", len(records.truth_classes): "truth", len(records): "image"}
        again = {n: c[index[sizes[len(c)]]] for n, c in own.items()}
        again["images"] = np.arange(len(drawn), dtype=np.int32)
        part = from_columns(again)
        by_class = rows_by_class(part, classes)
        table.append([ap_per_iou(scoped(part, k, found, None)).mean() for k, found in enumerate(by_class)])
    return time.process_time() - begin, np.array(table)


def coco_inputs(images: list[tuple[np.ndarray, ...]], drawn: np.ndarray) -> tuple[list[dict], list[dict], np.ndarray]:
    names, truth, rows = [], [], []
    for number, i in enumerate(drawn):
        boxes, scores, found, true, kinds = images[i]
        names.append({"id": number, "width": 640, "height": 640})
        for box, kind in zip(np.c_[true[:, :2], true[:, 2:] - true[:, :2]].tolist(), kinds, strict=True):
            truth.append({
                "id": len(truth) + 1, "image_id": number, "category_id": int(kind), "bbox": box,
                "area": box[2] * box[3], "iscrowd": 0,
            })  # fmt: skip
        columns = [np.full(len(boxes), number), boxes[:, :2], boxes[:, 2:] - boxes[:, :2], scores, found]
        rows.append(np.column_stack(columns).astype(float))
    return names, truth, np.concatenate(rows)


def hotcoco_each(images: list[tuple[np.ndarray, ...]], classes: int, resamples: int) -> tuple[float, np.ndarray]:
    """Per resample: what the library does from arrays to per-class values. Building its inputs is not counted."""
    import hotcoco

    from kfp_gate.evaluation.bootstrap import image_weights

    weights = np.concatenate(list(image_weights(len(images), resamples, 0)))
    spent, table = 0.0, []
    for weight in weights:
        inputs = coco_inputs(images, np.repeat(np.arange(len(images)), weight))
        begin = time.process_time()
        engine = hotcoco.StreamingEval([{"id": k, "name": str(k)} for k in range(classes)])
        engine.update(*inputs)
        done = engine.finalize()
        done.accumulate()
        table.append(np.asarray(done.eval["precision"])[:, :, :, 0, -1].mean((0, 1)))
        spent += time.process_time() - begin
    return spent, np.array(table)


def hotcoco_compare(images: list[tuple[np.ndarray, ...]], classes: int, resamples: int) -> tuple[float, np.ndarray]:
    import hotcoco

    names, truth, rows = coco_inputs(images, np.arange(len(images)))
    categories = [{"id": k, "name": str(k)} for k in range(classes)]
    gt = hotcoco.COCO({"images": names, "annotations": truth, "categories": categories})
    pair = []
    for _ in range(2):
        engine = hotcoco.COCOeval(gt, gt.loadRes(rows), "bbox")
        engine.evaluate()
        engine.accumulate()
        pair.append(engine)
    begin = time.process_time()
    hotcoco.compare(*pair, n_bootstrap=resamples, seed=0)
    return (time.process_time() - begin) / 2, np.zeros((0, classes))


RUN = {
    "kfp-gate": ours, "hotcoco for each resample": hotcoco_each, "records ranked anew": ranked_anew,
    "hotcoco.compare": hotcoco_compare,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detections", type=int, default=500_000)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--resamples", type=int, default=1000)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        count = min(ENGINES[options.child] or options.resamples, options.resamples)
        with contextlib.redirect_stdout(io.StringIO()):
            images = pictures(options.detections, options.classes)
            spent, table = RUN[options.child](images, options.classes, count)
        print(json.dumps({"cpu_s": spent * options.resamples / count, "ran": count, "first": table[:5].tolist()}))
        return
    found = {}
    for engine in ENGINES:
        command = [sys.executable, __file__, "--child", engine, "--detections", str(options.detections)]
        command += ["--classes", str(options.classes), "--resamples", str(options.resamples)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
        found[engine] = json.loads(done.stdout.splitlines()[-1])
    mine = found["kfp-gate"]
    print(f"{options.resamples:,} resamples, {options.detections:,} detections, {options.classes} classes")
    print(f"{'engine':28} {'CPU s':>9} {'resamples run':>14} {'times ours':>11} {'largest difference':>19}")
    for engine, one in found.items():
        rows = min(len(one["first"]), len(mine["first"]))
        gap = np.abs(np.array(one["first"][:rows]) - np.array(mine["first"][:rows])).max() if rows else np.nan
        print(f"{engine:28} {one['cpu_s']:9.1f} {one['ran']:14} {one['cpu_s'] / mine['cpu_s']:10.1f}x {gap:19.1e}")
    ratios = {e: round(one["cpu_s"] / mine["cpu_s"], 1) for e, one in found.items() if e != "kfp-gate"}
    print(json.dumps({
        "name": "bootstrap", "ours": {"cpu_s": round(mine["cpu_s"], 2)},
        "peers": {e: {"cpu_s": round(found[e]["cpu_s"], 1), "scaled_from": found[e]["ran"]} for e in ratios},
        "ratios": ratios, "bars": {"hotcoco for each resample": BAR},
        "met": ratios["hotcoco for each resample"] >= BAR,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
