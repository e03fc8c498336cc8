"""A real training whose data set has one more transform, which waits: DATA OUT SECONDS WORKERS."""

import logging
import os
import sys
from pathlib import Path

from diagnosis.planted.faults import AskedElsewhere, with_transform
from kfp_gate.training import upstream
from kfp_gate.training.ranks import read_ranks
from kfp_gate.training.spec import TrainingSpec


def main(data: Path, out: Path, seconds: float, workers: int) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
    ranks = read_ranks()
    private = out / f"rank{ranks.rank}"
    private.mkdir(parents=True)
    upstream.prepare(private / "config", ranks)
    from kfp_gate.training.session import Session

    # Present at 0 seconds too, so that nothing but the wait differs.
    with_transform(lambda: AskedElsewhere(seconds))(0)
    spec = TrainingSpec(**{
        "base_model": "yolo11n.yaml:depth=0.33,width=0.125", "image_size": 64, "batch": 4, "sanity_batches": 0,
        "overrides": {"optimizer": "AdamW", "mosaic": 0.0, "warmup_epochs": 0, "close_mosaic": 0}, "patience": 0,
        "train_manifest": str(data / "train.parquet"), "val_manifest": str(data / "val.parquet"),
        "source_uri": str(data), "epochs": 3, "workers": workers,
    })  # fmt: skip
    code = Session(spec, ranks, out=out, private=private, node="here").run()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
