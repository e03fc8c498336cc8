"""Average precision of the same detections by every engine: CPU seconds, memory, and equality with pycocotools.

    python benchmarks/evaluate.py                                    500,000 detections, 20 and 80 classes; minutes
    python benchmarks/evaluate.py --detections 50000 --classes 20    a tenth

Each engine runs in a process of its own. Detections come image by image from one seeded generator, whose time is not
counted; turning arrays into what an engine wants is, as is all memory beyond its import. The last line is one JSON
object.
"""

import argparse
import contextlib
import gc
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

PER_IMAGE, OBJECTS, SIDE = 300, 20, 640
Image = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class Clock:
    """CPU seconds of this process outside the generator."""

    def __init__(self) -> None:
        self.spent = 0.0

    def images(self, detections: int, classes: int) -> Iterator[Image]:
        """Boxes, scores, classes, true boxes, true classes; boxes as x1 y1 x2 y2."""
        rng = np.random.default_rng(0)
        for _ in range(detections // PER_IMAGE):
            begin = time.process_time()
            corner = rng.uniform(0, SIDE - 140, (OBJECTS, 2))
            truth = np.concatenate([corner, corner + rng.uniform(10, 120, (OBJECTS, 2))], 1)
            kinds = rng.integers(0, classes, OBJECTS)
            source = rng.integers(0, OBJECTS, PER_IMAGE)
            boxes = truth[source] + rng.normal(0, 8, (PER_IMAGE, 4))
            boxes[:, 2:] = np.maximum(boxes[:, 2:], boxes[:, :2] + 1)
            found = np.where(rng.random(PER_IMAGE) < 0.8, kinds[source], rng.integers(0, classes, PER_IMAGE))
            scores = rng.random(PER_IMAGE).astype(np.float32)
            self.spent += time.process_time() - begin
            yield boxes, scores, found, truth, kinds


def xywh(boxes: np.ndarray) -> np.ndarray:
    return np.concatenate([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1)


def truth_dicts(truth: np.ndarray, kinds: np.ndarray, image: int, first: int) -> list[dict]:
    return [
        {"id": first + i, "image_id": image, "category_id": int(k), "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
        for i, (box, k) in enumerate(zip(xywh(truth).tolist(), kinds, strict=True))
    ]


def rows(image: Image, number: int) -> np.ndarray:
    boxes, scores, found, *_ = image
    return np.concatenate([np.full((len(boxes), 1), number), xywh(boxes), scores[:, None], found[:, None]], 1).astype(
        float
    )


def dataset(images: Iterator[Image], classes: int) -> tuple[dict, np.ndarray]:
    """What the COCO engines take: a dict of annotations, and an (n, 7) array of detections."""
    truth: list[dict] = []
    found = []
    for number, image in enumerate(images):
        truth += truth_dicts(image[3], image[4], number, len(truth) + 1)
        found.append(rows(image, number))
    data = {
        "info": {}, "images": [{"id": i, "width": SIDE, "height": SIDE} for i in range(len(found))],
        "annotations": truth, "categories": [{"id": k, "name": str(k)} for k in range(classes)],
    }  # fmt: skip
    return data, np.concatenate(found)


def kfp_gate(images: Iterator[Image], classes: int) -> np.ndarray:
    """Average precision alone, as the others compute it."""
    from kfp_gate.evaluation.metrics import ap_per_iou, rows_by_class, scoped
    from kfp_gate.evaluation.records import Matcher

    matcher = Matcher(classes, abnormal=False)
    for number, image in enumerate(images):
        matcher.add(number, *image, size=(SIDE, SIDE))
    records = matcher.finish()
    tables = [ap_per_iou(scoped(records, k, found, None)) for k, found in enumerate(rows_by_class(records, classes))]
    return np.array([[table[0], table.mean()] for table in tables])


def kfp_gate_all(images: Iterator[Image], classes: int) -> np.ndarray:
    """With precision, recall, F1, rates, calibration and abnormal boxes, as in every epoch."""
    from kfp_gate.evaluation.metrics import compute
    from kfp_gate.evaluation.records import Matcher

    matcher = Matcher(classes)
    for number, image in enumerate(images):
        matcher.add(number, *image, size=(SIDE, SIDE))
    found = compute(matcher.finish(), [str(k) for k in range(classes)])
    return np.array([[found[f"class/{k}/{m}"] for m in ("map50", "map50_95")] for k in range(classes)])


def from_precision(precision: np.ndarray) -> np.ndarray:
    """(K, 2) from pycocotools' (T, R, K, A, M)."""
    table = precision[:, :, :, 0, -1]
    return np.stack([table[0].mean(0), table.mean((0, 1))], 1)


def hotcoco_streaming(images: Iterator[Image], classes: int) -> np.ndarray:
    import hotcoco

    engine = hotcoco.StreamingEval([{"id": k, "name": str(k)} for k in range(classes)])
    number, first = 0, 1
    batch: list[Image] = []

    def flush() -> None:
        nonlocal number, first
        truth: list[dict] = []
        for i, image in enumerate(batch):
            truth += truth_dicts(image[3], image[4], number + i, first + len(truth))
        names = [{"id": number + i, "width": SIDE, "height": SIDE} for i in range(len(batch))]
        engine.update(names, truth, np.concatenate([rows(image, number + i) for i, image in enumerate(batch)]))
        number, first = number + len(batch), first + len(truth)
        batch.clear()

    for image in images:
        batch.append(image)
        if len(batch) == 16:
            flush()
    if batch:
        flush()
    done = engine.finalize()
    done.accumulate()
    return from_precision(np.asarray(done.eval["precision"]))


def hotcoco_batch(images: Iterator[Image], classes: int) -> np.ndarray:
    import hotcoco

    data, found = dataset(images, classes)
    truth = hotcoco.COCO(data)
    engine = hotcoco.COCOeval(truth, truth.loadRes(found), "bbox")
    engine.evaluate()
    engine.accumulate()
    return from_precision(np.asarray(engine.eval["precision"]))


def faster_coco_eval(images: Iterator[Image], classes: int) -> np.ndarray:
    from faster_coco_eval import COCO, COCOeval_faster

    data, found = dataset(images, classes)
    truth = COCO(data)
    engine = COCOeval_faster(truth, truth.loadRes(found), "bbox")
    engine.evaluate()
    engine.accumulate()
    return from_precision(np.asarray(engine.eval["precision"]))


def pycocotools(images: Iterator[Image], classes: int) -> np.ndarray:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    data, found = dataset(images, classes)
    truth = COCO()
    truth.dataset = data
    truth.createIndex()
    engine = COCOeval(truth, truth.loadRes(found), "bbox")
    engine.evaluate()
    engine.accumulate()
    return from_precision(engine.eval["precision"])


def torchmetrics(images: Iterator[Image], classes: int) -> np.ndarray:
    import torch
    from torchmetrics.detection import MeanAveragePrecision

    engine = MeanAveragePrecision(class_metrics=True, backend="faster_coco_eval")
    engine.warn_on_many_detections = False
    for boxes, scores, found, truth, kinds in images:
        engine.update(
            [{"boxes": torch.from_numpy(boxes), "scores": torch.from_numpy(scores), "labels": torch.from_numpy(found)}],
            [{"boxes": torch.from_numpy(truth), "labels": torch.from_numpy(kinds)}],
        )
    per_class = engine.compute()["map_per_class"].numpy()
    return np.stack([np.full(len(per_class), np.nan), per_class], 1)


def ultralytics(images: Iterator[Image], classes: int) -> np.ndarray:
    import torch
    from ultralytics.models.yolo.detect import DetectionValidator
    from ultralytics.utils.metrics import DetMetrics, box_iou

    validator = DetectionValidator(args={"plots": False})
    validator.iouv = torch.linspace(0.5, 0.95, 10)
    metrics = DetMetrics(dict(enumerate(map(str, range(classes)))))
    for boxes, scores, found, truth, kinds in images:
        overlap = box_iou(torch.from_numpy(truth).float(), torch.from_numpy(boxes).float())
        order = np.argsort(-scores)
        right = validator.match_predictions(
            torch.from_numpy(found[order]), torch.from_numpy(kinds), overlap[:, torch.from_numpy(order)]
        )
        metrics.update_stats({
            "tp": right.numpy(), "conf": scores[order], "pred_cls": found[order].astype(float),
            "target_cls": kinds.astype(float), "target_img": np.unique(kinds.astype(float)), "im_name": "",
        })  # fmt: skip
    metrics.process()
    return np.stack([metrics.box.ap50, metrics.box.ap], 1)


RUN: dict[str, Callable[[Iterator[Image], int], np.ndarray]] = {
    "kfp-gate": kfp_gate,
    "kfp-gate, all metrics": kfp_gate_all,
    "hotcoco streaming": hotcoco_streaming,
    "hotcoco batch": hotcoco_batch,
    "ultralytics": ultralytics,
    "faster-coco-eval": faster_coco_eval,
    "torchmetrics": torchmetrics,
    "pycocotools": pycocotools,
}


def resident(field: str) -> float:
    """MB of this process: VmRSS now, or VmHWM at most."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) / 1024


def child(engine: str, detections: int, classes: int) -> None:
    os.environ.update(YOLO_OFFLINE="1", YOLO_AUTOINSTALL="0", HOTCOCO_QUIET="1")
    run = RUN[engine]
    with contextlib.redirect_stdout(io.StringIO()):
        run(Clock().images(PER_IMAGE * 2, classes), classes)  # imports, once, outside the measurement
        gc.collect()
        # The kernel forgets the peak so far.
        Path("/proc/self/clear_refs").write_text("5")
        held = resident("VmRSS")
        clock = Clock()
        begin = time.process_time()
        table = run(clock.images(detections, classes), classes)
        spent = time.process_time() - begin - clock.spent
    print(json.dumps({"cpu_s": spent, "mb": resident("VmHWM") - held, "per_class": table.tolist()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detections", type=int, default=500_000)
    parser.add_argument("--classes", type=int, nargs="+", default=[20, 80])
    parser.add_argument("--engines", nargs="+", choices=list(RUN), default=list(RUN))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.detections, options.classes[0])
        return
    result: dict = {"name": "evaluate", "ours": {}, "peers": {}, "ratios": {}, "met": True}
    for classes in options.classes:
        found: dict[str, dict] = {}
        for engine in options.engines:
            command = [sys.executable, __file__, "--child", engine, "--detections", str(options.detections)]
            done = subprocess.run(
                [*command, "--classes", str(classes)], capture_output=True, text=True, check=False,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            if done.returncode:
                raise SystemExit(f"{engine} failed:\n{done.stderr[-3000:]}")
            found[engine] = json.loads(done.stdout.splitlines()[-1])
        compare(found, classes, options.detections, result)
    result["bars"] = {
        "cpu_of_hotcoco_streaming": 1.0, "memory_of_hotcoco_streaming": 1.0, "one_of_them": 0.5,
        "largest_class_difference_to_pycocotools": 1e-9,
    }  # fmt: skip
    print(json.dumps(result))


def compare(found: dict[str, dict], classes: int, detections: int, result: dict) -> None:
    """Print one table and add to the result."""
    tables = {name: np.array(one["per_class"]) for name, one in found.items()}
    reference = tables.get("pycocotools", tables["kfp-gate"])
    print(f"{detections:,} detections, {classes} classes, {PER_IMAGE} an image, {OBJECTS} objects an image")
    print(f"{'engine':20} {'CPU s':>8} {'MB added':>9} {'mAP50-95':>12} {'largest class difference':>26}")
    key = f"{classes} classes"
    for name, one in found.items():
        gap = np.nanmax(np.abs(tables[name] - reference))
        print(f"{name:20} {one['cpu_s']:8.2f} {one['mb']:9.1f} {tables[name][:, 1].mean():12.9f} {gap:26.2e}")
        side = result["ours" if name.startswith("kfp-gate") else "peers"]
        side.setdefault(name, {})[key] = {"cpu_s": round(one["cpu_s"], 3), "mb": round(one["mb"], 1)}
    ours, peer = found["kfp-gate"], found.get("hotcoco streaming")
    if peer is None:
        return
    gap = float(np.nanmax(np.abs(tables["kfp-gate"] - reference)))
    ratios = {
        "cpu_of_hotcoco_streaming": ours["cpu_s"] / peer["cpu_s"],
        "memory_of_hotcoco_streaming": ours["mb"] / peer["mb"],
        "largest_class_difference_to_pycocotools": gap,
    }  # fmt: skip
    result["ratios"][key] = {k: float(f"{v:.3g}") for k, v in ratios.items()}
    two = sorted([ratios["cpu_of_hotcoco_streaming"], ratios["memory_of_hotcoco_streaming"]])
    result["met"] &= two[0] <= 0.5 and two[1] <= 1.0 and gap <= 1e-9


if __name__ == "__main__":
    main()
