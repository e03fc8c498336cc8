"""The plantings: what is put into which training, and which cause a diagnosis must name."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import faults
from .scenes import Images

DEFAULT_IMAGES = Images()
SMALL_MODEL = "yolo11n.yaml:depth=0.33,width=0.125"


@dataclass(frozen=True)
class Mount:
    """A slow file system over the images."""

    bytes_per_s: float = 0
    open_s: float = 0


@dataclass(frozen=True)
class Planting:
    """One training.

    Attributes:
        cause: the key of `findings.CAUSES` that must come first; "" for a healthy run.
        about: what is planted, for the table.
        fault: applied in every rank.
        says: words that the first finding's title or detail must hold, such as a transform's name.
        ranks: processes.
        images: the data set.
        settings: of the `TrainingSpec`, over `SETTINGS`.
        mount: where the images are read through a slow file system ...
        elsewhere: ... and what replaces that mount on a machine without FUSE.
        cores, memory: limits of a control group, in cores and bytes; 0 is none.
        fails: the training ends in a failure.
        cure: settings that must make the same training faster, for the bench to try.
        crowd: processes beside the training that compute all the time.
    """

    cause: str
    about: str
    fault: faults.Fault = faults.none
    says: tuple[str, ...] = ()
    ranks: int = 1
    images: Images = DEFAULT_IMAGES
    settings: Mapping[str, Any] = field(default_factory=dict)
    mount: Mount | None = None
    elsewhere: faults.Fault | None = None
    cores: float = 0
    memory: int = 0
    crowd: int = 0
    fails: bool = False
    cure: Mapping[str, Any] = field(default_factory=dict)


SETTINGS: Mapping[str, Any] = {
    "base_model": SMALL_MODEL, "epochs": 2, "image_size": 64, "batch": 4, "sanity_batches": 0, "patience": 0,
    "workers": 0, "overrides": {"optimizer": "AdamW", "mosaic": 0.0, "warmup_epochs": 0, "close_mosaic": 0},
}  # fmt: skip

SLOW_LOOP = faults.with_transform(lambda: faults.TargetMaps(loop=True, grid=224))
FILES = Images(train=48, val=2, width=160, height=120, suffix="png")
LONG = {"epochs": 60, "batch": 8}
COMPUTING = {"image_size": 320, "batch": 8, "epochs": 2}
COMPUTED = Images(train=120, val=4)

SEED: dict[str, Any] = {
    "images": Images(train=144, val=4, width=160, height=120, suffix="png"), "mount": Mount(bytes_per_s=1e6),
    "settings": {"image_size": 192, "epochs": 1, "workers": 1}, "elsewhere": faults.slow_reader(0.058),
}  # fmt: skip
"""One training in three states: its transform is slow, then its reads, then neither."""

SEED_CASE = ("seed_before", "seed_between", "seed_after")

PLANTINGS: dict[str, Planting] = {
    "slow_reads": Planting(
        "slow_reads", "a file system of 0.5 MB/s, two loader processes", images=FILES,
        settings={"workers": 2, "batch": 2, "epochs": 1}, mount=Mount(bytes_per_s=0.5e6),
        elsewhere=faults.slow_reader(0.23),
    ),
    "slow_reads_alone": Planting(
        "slow_reads", "a file system of 0.5 MB/s, no loader process", images=FILES,
        settings={"batch": 2, "epochs": 1},
        mount=Mount(bytes_per_s=0.5e6), elsewhere=faults.slow_reader(0.115),
    ),
    "small_files": Planting(
        "small_files", "80 ms to open each of many small files", images=Images(train=72, val=4, width=64, height=48),
        settings={"workers": 1, "epochs": 1}, mount=Mount(open_s=0.08),
    ),
    "preparation_cpu": Planting(
        "preparation_cpu", "a Python loop in the transform TargetMaps, two loader processes",
        SLOW_LOOP, ("TargetMaps",), images=Images(train=96, val=4), settings={"workers": 2, "epochs": 1},
    ),
    "preparation_cpu_alone": Planting(
        "preparation_cpu", "the same without loader processes", SLOW_LOOP, ("TargetMaps",),
        images=Images(train=64, val=4), settings={"epochs": 1},
    ),
    "too_few_workers": Planting(
        "too_few_workers", "one loader process that waits in many places", faults.a_mix_of_waits,
        images=Images(train=96, val=4, width=160, height=120), settings={"workers": 1, "epochs": 1},
        mount=Mount(open_s=0.004), elsewhere=faults.slow_reader(0.004),
        cure={"workers": 2},
    ),
    "cpu_quota": Planting(
        "cpu_quota", "a quota of 0.25 cores", cores=0.25, images=Images(train=40, val=4),
        settings={"image_size": 224},
    ),
    "transfer": Planting(
        "transfer", "0.5 s to copy a batch to the device", faults.slow_copy, images=Images(train=32, val=4),
    ),
    "rank_imbalance": Planting(
        "rank_imbalance", "rank 1 of 2 computes 0.5 s longer", faults.rank_1_computes_slowly, ranks=2,
        images=Images(train=32, val=4),
    ),
    "rank_imbalance_reads": Planting(
        "rank_imbalance", "rank 1 of 2 reads 0.2 s longer an image", faults.rank_1_reads_slowly, ("rank 1",), ranks=2,
        images=Images(train=64, val=4), settings={"epochs": 1},
    ),
    "checkpoint_stall": Planting(
        "checkpoint_stall", "a disk that takes 4 s for a state", faults.slow_disk, images=Images(train=32, val=4),
        settings={"epochs": 3},
    ),
    "upload_stall": Planting(
        "upload_stall", "a store that takes 6 s for a state", faults.slow_store, images=Images(train=24, val=4),
        settings={"epochs": 3},
    ),
    "validation": Planting(
        "validation", "400 val images for 40 train images", images=Images(train=40, val=400),
    ),
    "validation_suppress": Planting(
        "validation", "slow suppression", faults.slow_suppression, ("suppress",), images=Images(train=40, val=60),
    ),
    "memory_growth": Planting(
        "memory_growth", "48 MiB kept by every validation, limit 2 GiB",
        faults.only_first_epochs(8, faults.evaluator_keeps_its_predictions), ("validat",),
        images=Images(train=80, val=4), settings={**LONG, "image_size": 224}, memory=2 << 30,
    ),
    "forked_copies": Planting(
        "forked_copies", "two loader processes that read a list of three million tuples, limit 2 GiB",
        faults.only_first_epochs(8, faults.annotations_in_a_list), images=Images(train=80, val=4),
        settings={**LONG, "image_size": 224, "workers": 2}, memory=2 << 30,
    ),
    "memory_pressure": Planting(
        "memory_pressure", "one image that unpacks to 1.5 GiB in a loader process, limit 1.5 GiB",
        faults.with_transform(lambda: faults.Panorama(3 << 29)), images=Images(train=160, val=4),
        settings={"workers": 1, "epochs": 1}, memory=3 << 29, fails=True,
    ),
    "discarded_work": Planting(
        "discarded_work", "epochs 2 to 4 done three times: not finite", faults.not_finite,
        settings={"image_size": 160, "epochs": 4},
    ),
    "seed_before": Planting(
        "preparation_cpu", "target maps by a loop over points, reads of 58 ms an image",
        faults.with_transform(lambda: faults.TargetMaps(loop=True, grid=224)), ("TargetMaps",), **SEED,
    ),
    "seed_between": Planting(
        "slow_reads", "target maps by rows, the same reads",
        faults.with_transform(lambda: faults.TargetMaps(loop=False, grid=224)), **SEED,
    ),
    "seed_after": Planting(
        "", "target maps by rows, the images on a disk of this machine",
        faults.with_transform(lambda: faults.TargetMaps(loop=False, grid=224)), **{**SEED, "mount": None},
    ),
    "healthy": Planting("", "no loader process", images=COMPUTED, settings=COMPUTING),
    "healthy_workers": Planting(
        "", "two loader processes", images=COMPUTED, settings={**COMPUTING, "workers": 2},
    ),
    "healthy_crowded": Planting(
        "", "two processes of others that never rest", crowd=2, images=COMPUTED, settings=COMPUTING,
    ),
    "healthy_ranks": Planting("", "two ranks", ranks=2, images=COMPUTED, settings=COMPUTING),
}  # fmt: skip
