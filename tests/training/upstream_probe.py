"""What the upstream trainer does today, as rank 0 of 2 would find it. Prints one JSON object.

Run by test_upstream.py in a process of its own, since upstream reads the environment at import.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(folder: Path, data: Path) -> dict[str, Any]:
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import read_ranks

    upstream.prepare(folder / "config", read_ranks())
    import torch
    import torch.distributed as dist
    from torch.utils.data import RandomSampler
    from ultralytics.engine.trainer import BaseTrainer
    from ultralytics.models.yolo.detect import DetectionTrainer
    from ultralytics.utils.torch_utils import EarlyStopping

    upstream.settle()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    # A group of one stands for the real one: only what happens on this rank is looked at.
    dist.init_process_group("gloo", init_method=f"file://{folder / 'group'}", rank=0, world_size=1)
    trainer = DetectionTrainer(overrides={
        "model": "yolo11n.yaml", "data": str(data), "epochs": 4, "imgsz": 64, "batch": 4, "device": "cpu",
        "plots": False,
        "project": str(folder / "runs"), "name": "probe", "workers": 0, "amp": False,
    })  # fmt: skip
    found["world_size"] = trainer.world_size
    found["threads"] = torch.get_num_threads()
    trainer.world_size = 2
    try:
        trainer._setup_train()
    except Exception as error:
        found["device_ids"] = type(error).__name__
    trainer.world_size = 1
    trainer.model = "yolo11n.yaml"
    trainer._setup_train()
    for name, iterations in (("few", 1e3), ("many", 1e6)):
        found[f"optimizer_of_{name}"] = type(
            trainer.build_optimizer(trainer.model, "auto", iterations=iterations)
        ).__name__
    loader = trainer.test_loader
    found["val_loader_images"], found["val_rect"] = len(loader.dataset), bool(loader.dataset.rect)
    found["validator_is_upstreams"] = type(trainer.validator).__module__.startswith("ultralytics")

    stopper = EarlyStopping(patience=2)
    found["stops_at_zero"] = any(stopper(epoch, 0.0) for epoch in range(1, 20))

    trainer.epoch, trainer.train_time_start = 1, 0.0
    trainer.metrics, trainer.fitness = {"x": 1.0}, 0.5
    trainer.save_metrics({"metric of a,b": 1.0})
    header, row = trainer.csv.read_text().splitlines()[:2]
    found["csv_columns"] = [header.count(","), row.count(",")]
    trainer.save_model()
    saved = torch.load(trainer.last, weights_only=False)
    found["saved"] = sorted(saved)
    found["saved_dtype"] = str(next(saved["ema"].parameters()).dtype)

    trainer.last.unlink()
    trainer.loss = torch.tensor(float("nan"))
    try:
        trainer._handle_nan_recovery(1)
    except RuntimeError as error:
        found["nan_without_last"] = str(error)
    trainer.loss = torch.tensor(1.0)
    found["nan_elsewhere_is_seen"] = bool(trainer._handle_nan_recovery(1))

    import inspect

    found["final_eval_validates"] = "self.validator(model=" in inspect.getsource(BaseTrainer.final_eval)
    found["resume_steps_at_once"] = "last_opt_step = -1" in inspect.getsource(BaseTrainer._do_train)
    found["best_is_by_device_count"] = "len(self.args.device.split" in inspect.getsource(BaseTrainer.__init__)

    generator = torch.Generator().manual_seed(1)
    list(RandomSampler(range(4), generator=generator))
    once = torch.Generator().manual_seed(1)
    torch.randperm(4, generator=once)
    found["sampler_draws_once"] = torch.equal(generator.get_state(), once.get_state())
    return found


if __name__ == "__main__":
    os.environ.update(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
    result = main(Path(sys.argv[1]), Path(sys.argv[2]))
    print("FOUND " + json.dumps(result))
