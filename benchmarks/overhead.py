"""What the worker's own record keeping costs, against the training steps themselves.

    python benchmarks/overhead.py [--epochs 1] [--size 320] [--images 192] [--workers 0]

One real training in a process of its own, with everything on but the profile window. CPU seconds are read around every
call of an instrument and around the training steps; sampler and timeline sender count their own threads. The parts of
the loader are too many and too short to read a clock around each: their number is in the timeline, and what one costs
is measured beside it, in the same process, as the difference to the same call without it. Loader processes count on
both sides. Validation and checkpoints are not steps and count on neither. What is read once an epoch (memory, above
all the shared pages of each process) counts in full, against an epoch of 24 steps; no real one is so short. On a
machine that does other work the sampler's share is too high: it looks once a second, however little was done in it.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

BAR = 0.01
"""Instrumentation CPU over step CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--size", type=int, default=320)
    parser.add_argument("--images", type=int, default=192)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        inside(options.inside, options)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--inside", folder]
        command += [x for n in ("epochs", "size", "images", "workers") for x in (f"--{n}", str(getattr(options, n)))]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    found = json.loads(done.stdout.splitlines()[-1])
    report(found)


def report(found: dict[str, Any]) -> None:
    step = found["step_cpu_s"]
    print(f"{'instrument':<22}{'calls':>8}{'CPU ms':>10}{'us a call':>12}{'of step CPU':>14}")
    for name, (calls, seconds) in found["instruments"].items():
        print(
            f"{name:<22}{calls:>8}{seconds * 1e3:>10.2f}{seconds / max(calls, 1) * 1e6:>12.1f}{seconds / step:>14.4%}"
        )
    total = sum(seconds for _, seconds in found["instruments"].values())
    print(f"{'all':<22}{'':>8}{total * 1e3:>10.2f}{'':>12}{total / step:>14.4%}")
    print(f"steps: {found['steps']}, {step:.1f} CPU s, {found['wall_s']:.1f} s of wall time")
    print(json.dumps({
        "name": "overhead", "ours": {"instrument_cpu_s": round(total, 4), "step_cpu_s": round(step, 2)}, "peers": {},
        "ratios": {"instrument_over_step": round(total / step, 6)}, "bars": {"instrument_over_step": BAR},
        "met": total / step < BAR,
    }))  # fmt: skip


def inside(folder: Path, options: argparse.Namespace) -> None:
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import Ranks

    private = folder / "out" / "rank0"
    private.mkdir(parents=True)
    upstream.prepare(private / "config", Ranks())
    from kfp_gate.observing import phases, timeline
    from kfp_gate.training import course, session, trainer
    from kfp_gate.training.spec import TrainingSpec

    spent: dict[str, list[float]] = {}
    nested = [0]

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        entry = spent.setdefault(name, [0, 0.0])

        def call(*arguments: Any, **more: Any) -> Any:
            # An instrument that uses another one is counted once, as itself.
            if nested[0]:
                return function(*arguments, **more)
            nested[0] += 1
            started = time.thread_time()
            try:
                return function(*arguments, **more)
            finally:
                entry[0] += 1
                entry[1] += time.thread_time() - started
                nested[0] -= 1

        return call

    phases.Phases.enter = counted("phases", phases.Phases.enter)  # type: ignore[method-assign]
    for name in ("step_ends", "steps_end"):
        setattr(course.TrainingCourse, name, counted("windows", getattr(course.TrainingCourse, name)))
    course.read_memory = counted("memory", course.read_memory)
    course.MemoryWatch.epoch_ends = counted("memory watch", course.MemoryWatch.epoch_ends)  # type: ignore[method-assign]
    write = timeline.Timeline.write

    def lines(self: Any, kind: str, **values: Any) -> None:
        # The sampler's own lines are in the sampler's own count.
        (write if kind == "sample" else timed)(self, kind, **values)

    timed = counted("timeline", write)
    timeline.Timeline.write = lines  # type: ignore[method-assign]
    steps = {"cpu": 0.0, "wall": 0.0, "count": 0}
    began = {"cpu": 0.0, "wall": 0.0}
    begins, validates, batch = (
        course.TrainingCourse.epoch_begins,
        course.TrainingCourse.validate,
        trainer.RankTrainer._batch_ends,
    )

    def epoch_begins(self: Any, *arguments: Any) -> None:
        begins(self, *arguments)
        began.update(cpu=time.process_time(), wall=time.perf_counter())

    def validate(self: Any, *arguments: Any) -> Any:
        steps["cpu"] += time.process_time() - began["cpu"]
        steps["wall"] += time.perf_counter() - began["wall"]
        return validates(self, *arguments)

    def batch_ends(self: Any, *arguments: Any) -> None:
        steps["count"] += 1
        batch(self, *arguments)

    course.TrainingCourse.epoch_begins, course.TrainingCourse.validate = epoch_begins, validate  # type: ignore[method-assign]
    trainer.RankTrainer._batch_ends = batch_ends  # type: ignore[method-assign]
    train, val = scene(folder / "data", options.images)
    spec = TrainingSpec(
        train_manifest=str(train), val_manifest=str(val), base_model="yolo11n.yaml", epochs=options.epochs,
        image_size=options.size, batch=8, sanity_batches=0, overrides={"optimizer": "AdamW"}, workers=options.workers,
    )  # fmt: skip
    run = session.Session(spec, Ranks(), out=folder / "out", private=private, node="here")
    code = run.run()
    if code:
        raise SystemExit(code)
    assert run.sampler is not None
    # The sampler also runs while there are no steps: its share of the wall time of the steps is what they pay.
    share = run.sampler.cost_s / max(run.sampler.count, 1) * steps["wall"] / run.sampler.every_s
    spent["sampler"] = [round(steps["wall"] / run.sampler.every_s), share]
    assert run.held.timelines is not None
    spent["timeline sender"] = [1, run.held.timelines.cost_s]
    loader = [x["loader"] for x in timeline.read_timeline(run.timeline.path) if x["kind"] == "window" and x["loader"]]
    assert loader, "no window says what the loader did"
    parts = sum(v[2] for x in loader for v in x["parts"].values())
    reads = sum(x["parts"]["read"][2] for x in loader if "read" in x["parts"])
    batches = sum(x["batches"] for x in loader)
    part_s, read_s, batch_s = cost_of_parts(folder, loader[0]["parts"])
    spent["loader parts"] = [parts, parts * part_s]
    spent["loader reads"] = [reads, reads * read_s]
    spent["sums in batches"] = [batches, batches * batch_s]
    if options.workers:
        steps["cpu"] += sum(v[1] for x in loader for v in x["parts"].values())
    print(
        json.dumps({"instruments": spent, "step_cpu_s": steps["cpu"], "wall_s": steps["wall"], "steps": steps["count"]})
    )


def cost_of_parts(folder: Path, parts: dict[str, Any]) -> tuple[float, float, float]:
    """CPU seconds that one timed call, one read in two steps, and the sums of one batch cost more than without."""
    import pickle

    from ultralytics.utils import patches

    from kfp_gate.observing import loading
    from kfp_gate.training.loader_parts import TimedTransform

    def each(call: Callable[[], object], count: int) -> float:
        best = 1e9
        for _ in range(5):
            started = time.thread_time()
            for _ in range(count):
                call()
            best = min(best, time.thread_time() - started)
        return best / count

    plain, file = (lambda: None), str(next((folder / "data" / "images").iterdir()))
    timed = TimedTransform(plain)
    # The proxy counts its two parts, which are counted with the others.
    part = max(0.0, each(timed, 5000) - each(plain, 5000))
    read = each(lambda: patches.np.fromfile(file, np.uint8), 500) - each(lambda: np.fromfile(file, np.uint8), 500)
    loading.take()

    def batch() -> None:
        for name in parts:
            with loading.PARTS.during(name):
                pass
        pickle.loads(pickle.dumps(loading.take()))

    return part, max(0.0, read - 2 * part), max(0.0, each(batch, 500) - len(parts) * part)


def scene(folder: Path, count: int) -> tuple[Path, Path]:
    """Manifests of noise with boxes: what is learnt does not matter here."""
    import hashlib

    from kfp_gate.data.manifest import Manifest, build_table, write_manifest

    rng, paths = np.random.default_rng(0), []
    (folder / "images").mkdir(parents=True)
    for split, images in (("train", count), ("val", 4)):
        columns: dict[str, list[object]] = {
            n: [] for n in ("image", "bytes", "width", "height", "sha256", "phash", "group")
        }
        for i in range(images):
            name = f"images/{split}{i}.png"
            Image.fromarray(rng.integers(0, 255, (160, 160, 3), dtype=np.uint8)).save(folder / name)
            raw = (folder / name).read_bytes()
            row = (name, len(raw), 160, 160, hashlib.sha256(raw).hexdigest(), i, f"{split}{i}")
            for key, value in zip(columns, row, strict=True):
                columns[key].append(value)
        boxes = np.column_stack(
            [np.zeros(images), rng.uniform(0.3, 0.7, (images, 2)), rng.uniform(0.1, 0.3, (images, 2))]
        )
        table = build_table(columns, np.arange(images + 1), boxes, np.zeros(images, bool))
        paths.append(folder / f"{split}.parquet")
        write_manifest(Manifest(table, ("thing",), split, str(folder), 0, "benchmark", "0"), paths[-1])
    return paths[0], paths[1]


if __name__ == "__main__":
    main()
