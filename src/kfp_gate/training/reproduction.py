"""A finite run that shows a profile window once more, under NVIDIA Nsight Systems: a folder that can be carried away.

    profile/spec.json, train.parquet, val.parquet       a probe of the same settings, on a part of the same images

The command is for a shell in that folder, on a machine that reaches the images, with `nsys` and this package.
"""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kfp_gate.training.spec import TrainingSpec

if TYPE_CHECKING:
    from kfp_gate.data.manifest import Manifest

SPEC = "spec.json"
PROBE_STEPS = 1
"""The window is what is wanted; a probe of one step ends soonest after it."""


def write_reproduction(
    folder: Path, spec: TrainingSpec, manifests: Mapping[str, "Manifest"], *, ranks: int, local_ranks: int, cuda: bool,
    optimizer: Mapping[str, object],
) -> str:  # fmt: skip
    """Write the folder's files; returns the command.

    Args:
        folder: made if missing.
        spec: of the run whose window it was.
        manifests: "train" and "val": the part of the images to look at.
        ranks: of that run; local_ranks: of them on one machine, which is what the command starts.
        cuda: whether the window was on a GPU. On a CPU the whole run is sampled, since nothing there opens a range.
        optimizer: the overrides that upstream's own choice came to; by fewer images it would choose another.
    """
    from kfp_gate.data.manifest import write_manifest

    folder.mkdir(parents=True, exist_ok=True)
    for name, manifest in manifests.items():
        write_manifest(manifest, folder / f"{name}.parquet")
    here = max(1, min(local_ranks, ranks))
    base = Path(spec.base_model)
    again = spec.with_changes(
        train_manifest="train.parquet", val_manifest="val.parquet", probe_steps=PROBE_STEPS,
        batch=max(here, spec.batch // ranks * here), overrides={**spec.overrides, **optimizer}, sanity_batches=0,
        base_model=str(base.resolve()) if base.is_file() else spec.base_model,
        checkpoint_uri="", resume_from="", tracking_uri="", mlflow_run_id="", run_id="", heartbeat_bound_s=0.0,
    )  # fmt: skip
    (folder / SPEC).write_text(again.to_json(), encoding="utf-8")
    return shlex.join([*nsys(cuda=cuda), *worker(here)])


def nsys(*, cuda: bool) -> list[str]:
    """`nsys profile` and its options (Nsight Systems User Guide, "CLI profile command switch options").

    On a GPU it records from the start to the stop of the CUDA profiler, which are the window's.
    """
    what = ["--trace=cuda,nvtx,osrt,cudnn,cublas", "--sample=none", "--cpuctxsw=none",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]  # fmt: skip
    return ["nsys", "profile", *(what if cuda else ["--trace=nvtx,osrt", "--sample=process-tree"]),
            "--force-overwrite=true", "--output=window"]  # fmt: skip


def worker(ranks: int) -> list[str]:
    """The worker on this machine, by torchrun if it has several ranks."""
    arguments = ["--spec", SPEC, "--out", "again"]
    if ranks == 1:
        return ["kfp-gate-worker", *arguments]
    return ["torchrun", "--standalone", f"--nproc-per-node={ranks}", "-m", "kfp_gate.training.worker", *arguments]
