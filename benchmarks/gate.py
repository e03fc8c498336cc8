"""The whole gate against `yolo val`: same images, weights, size, thresholds and threads; start to exit of a process.

    python benchmarks/gate.py                       about 160 images at 640 pixels, on the CPU
    python benchmarks/gate.py --clips 20 --image-size 160

The gate's time holds all that `yolo val` does not do: digests of the images, separation, 1,000 resamples, verdict and
report with thumbnails. Both run in a fixed square: with upstream's default, `rect=True`, values depend on the batch.
CPU time decides, as wall time depends on who else uses the machine. The last line is one JSON object.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BAR = 1.0


def prepare(folder: Path, clips: int, image_size: int) -> int:
    """A data set, its manifests, a data.yaml and a model; gives the number of test images."""
    import matplotlib
    import torch

    from kfp_gate.data.manifest import write_manifest
    from kfp_gate.data.materialize import materialize
    from kfp_gate.data.splitting import split_dataset
    from kfp_gate.demo import make_dataset
    from kfp_gate.evaluation.model_folder import adopt_weights

    source = make_dataset(folder / "source", clips=clips, frames=5)
    result = split_dataset(str(source), shares=(0.1, 0.1, 0.8))
    materialize(result.manifests, folder / "yolo")
    test = result.manifests["test"]
    write_manifest(test, folder / "test.parquet")
    # Upstream asks the network for this font even offline; give it one.
    fonts = folder / "config" / "Ultralytics"
    fonts.mkdir(parents=True)
    shipped = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    for name in ("Arial.ttf", "Arial.Unicode.ttf"):
        shutil.copy(shipped, fonts / name)
    torch.manual_seed(0)
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel("yolo11n.yaml", nc=len(test.classes), verbose=False)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2)
    for branch in model.model[-1].cv3:
        # As after training: few anchors reach the confidence floor, in every image some.
        branch[-1].weight.data *= 4
        branch[-1].bias.data.fill_(-9.0)
    model.names = dict(enumerate(test.classes))
    weights = folder / "weights.pt"
    torch.save({"epoch": -1, "model": None, "ema": model.half(), "train_args": {"imgsz": image_size}}, weights)
    adopt_weights(weights, folder / "model", classes=test.classes, image_size=image_size)
    return len(test)


def gate(folder: Path, image_size: int) -> None:
    from kfp_gate.evaluation.predict import PredictSettings
    from kfp_gate.gate.run import GateOutputs, validate
    from kfp_gate.gate.settings import GateSettings

    out = folder / "out"
    judged = validate(
        folder / "model", folder / "test.parquet", GateSettings(allow_unproven_separation=True),
        GateOutputs(out / "evaluation", out / "verdict.json", out / "report.html"),
        predict=PredictSettings(image_size=image_size, device="cpu"),
    )  # fmt: skip
    print(len(judged.candidate.records.scores), "detections")


def cost(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """CPU and wall seconds of a process."""
    begin = time.monotonic()
    child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert child.stdout is not None
    output = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{' '.join(command[:4])} failed:\n{output[-3000:]}")
    return used.ru_utime + used.ru_stime, time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=40)
    parser.add_argument("--image-size", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        gate(options.child, options.image_size)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        threads = "1"  # upstream takes all cores but one, whatever the environment says: one on two cores
        environment = {
            **os.environ, "YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0", "YOLO_CONFIG_DIR": str(folder / "config"),
            "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        }  # fmt: skip
        os.environ.update(environment)
        images = prepare(folder, options.clips, options.image_size)
        ours = [sys.executable, __file__, "--child", str(folder), "--image-size", str(options.image_size)]
        theirs = [
            str(Path(sys.executable).parent / "yolo"), "detect", "val", f"model={folder / 'weights.pt'}",
            f"data={folder / 'yolo' / 'data.yaml'}", "split=test", f"imgsz={options.image_size}", "batch=16",
            "conf=0.001", "iou=0.7", "max_det=300", "rect=False", "plots=False", "workers=0", "device=cpu",
            f"project={folder / 'runs'}",
        ]  # fmt: skip
        costs: dict[str, list[tuple[float, float]]] = {"kfp-gate": [], "yolo val": []}
        for _ in range(options.rounds):
            costs["kfp-gate"].append(cost(ours, environment))
            costs["yolo val"].append(cost(theirs, environment))
    print(f"{images} images at {options.image_size} pixels, one thread, best of {options.rounds}")
    print(f"{'':12} {'CPU ms/image':>13} {'wall ms/image':>14}")
    per_image = {n: [min(c[i] for c in found) * 1000 / images for i in (0, 1)] for n, found in costs.items()}
    for label, (cpu, wall) in per_image.items():
        print(f"{label:12} {cpu:13.1f} {wall:14.1f}")
    ratio = per_image["kfp-gate"][0] / per_image["yolo val"][0]
    print(json.dumps({
        "name": "gate", "ours": {"cpu_ms_per_image": round(per_image["kfp-gate"][0], 2)},
        "peers": {"yolo val": {"cpu_ms_per_image": round(per_image["yolo val"][0], 2)}},
        "ratios": {"cpu_of_yolo_val": round(ratio, 3)}, "bars": {"cpu_of_yolo_val": BAR}, "met": ratio <= BAR,
    }))  # fmt: skip


if __name__ == "__main__":
    main()
