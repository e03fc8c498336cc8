"""Storage, disk, memory, GPU and images: whether the machine under the pipeline is what the pipeline assumes."""

import re
import shutil
import uuid
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import gettempdir

from kfp_gate.data.manifest import Manifest
from kfp_gate.errors import KfpGateError
from kfp_gate.images.check import EVALUATION_STACK
from kfp_gate.images.names import image_files, reference
from kfp_gate.observing.memory import find_control_group, read_memory, size
from kfp_gate.preflight.checks import Check, error, from_error, ok, warning
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.storage import open_store

_PIN = re.compile(r"^([A-Za-z0-9_.\-]+)==([^\s;\\]+)")
GATE_MEMORY = 2 << 30
"""What the gate needs beside the data: torch, the model, one batch."""


def check_storage(request: PreflightRequest) -> list[Check]:
    """Write, read and delete a file where checkpoints go."""
    if request.model_uri:
        return []
    if not request.checkpoint_uri:
        if request.backend == "processes":
            return [ok("no checkpoint_uri: checkpoints stay in the step, on this machine")]
        return [
            warning(
                "checkpoint_uri is empty", why="a job that loses a pod starts again from epoch 1",
                cure="name a place that outlives pods, for instance s3://bucket/checkpoints",
            )
        ]  # fmt: skip
    key, content = f"kfp-gate-probe-{uuid.uuid4().hex}", uuid.uuid4().bytes
    try:
        store = open_store(request.checkpoint_uri)
        store.write(key, content)
        try:
            back = store.read(key)
        finally:
            store.delete(key)
        left = store.exists(key)
    except KfpGateError as problem:
        return from_error(problem, why="checkpoints could not be written while training runs")
    except OSError as problem:
        what = f"checkpoint_uri {request.checkpoint_uri!r} cannot be written ({problem.strerror})"
        return [error(what, why="checkpoints could not be kept", cure="name a place that this step may write to")]
    if back != content:
        what = f"a file written to {request.checkpoint_uri} came back changed"
        return [error(what, why="a checkpoint would not be what was saved", cure="check the store")]
    if left:
        what = f"a file in {request.checkpoint_uri} could not be deleted"
        return [warning(what, why="old checkpoints would pile up", cure="allow deletion below this prefix")]
    return [ok(f"{request.checkpoint_uri} can be written, read and deleted from")]


def check_machine(
    request: PreflightRequest, manifests: Mapping[str, Manifest], folder: Path | None = None
) -> list[Check]:
    """Disk and memory of this step against the test set, and the GPU that the gate will ask for."""
    return [*_disk(manifests, folder or Path(gettempdir())), *_memory(request), *_gpu(request)]


def check_images(request: PreflightRequest) -> list[Check]:
    """Whether the gate, in whose image this runs, measures with the versions that training measures with."""
    if request.model_uri or request.backend == "processes":
        return []
    if request.worker_image and request.worker_image != reference("worker"):
        return [
            warning(
                f"worker_image {request.worker_image!r} is not the one of this release",
                why="its versions cannot be seen from here, and another torch or ultralytics gives other numbers",
                cure="build it from images/worker, or compare the versions in the model card with the verdict's",
            )
        ]
    pinned = _pins(image_files().joinpath("worker", "constraints.txt").read_text(encoding="utf-8"))
    different = []
    for name in EVALUATION_STACK:
        try:
            here = version(name)
        except PackageNotFoundError:
            continue  # the GUI build of opencv stands in for the headless one on a developer's machine
        # A local part such as +cu126 names the build, not the code.
        if name in pinned and here.partition("+")[0] != pinned[name].partition("+")[0]:
            different.append(f"{name} {here} here, {pinned[name]} in the worker's image")
    if different:
        return [
            error(
                f"the gate and the training ranks differ: {'; '.join(different)}",
                why="the numbers that chose the weights and those that judge them would come from different code",
                cure="build both images from one release: kfp-gate images build",
            )
        ]
    return [ok("the gate and the training ranks pin the same evaluation stack")]


def _disk(manifests: Mapping[str, Manifest], folder: Path) -> list[Check]:
    copied = [m for m in manifests.values() if m.source_uri.startswith("s3://")]
    if not copied:
        return [ok("the images are mounted and are not copied")]
    test = sum(m.table["bytes"].to_numpy().sum() for s, m in manifests.items() if s == "test" and m in copied)
    whole = sum(m.table["bytes"].to_numpy().sum() for m in copied)
    free = shutil.disk_usage(folder).free
    told = f"{size(int(test))} of test images are copied to {folder}, {size(free)} are free"
    if free < test * 1.05 + (1 << 30):
        cure = "give the gate's step more ephemeral storage, or mount the data set"
        return [error(told, why="the gate would fill the disk and be evicted", cure=cure)]
    return [ok(f"{told}; the ranks copy {size(int(whole - test))}")]


def _memory(request: PreflightRequest) -> list[Check]:
    limit = read_memory(group=find_control_group()).limit
    if limit is None:
        return []
    # Images of a batch as float32 in host memory, decoded originals beside them.
    wanted = GATE_MEMORY + request.batch * request.image_size**2 * 3 * 4 * 4
    told = f"this step may use {size(limit)} of memory; the gate needs about {size(wanted)}"
    if limit < wanted:
        return [error(told, why="the gate would be killed", cure="raise the step's memory limit, or lower batch")]
    return [ok(told)]


def _gpu(request: PreflightRequest) -> list[Check]:
    if not request.gate_gpu:
        return []
    try:
        import torch
    except ImportError:
        return [error("torch cannot be imported here", why="the gate needs it", cure="use the gate's image")]
    if not torch.cuda.is_available():
        return [
            error(
                "a GPU was asked for, and torch sees none", why="the gate would run on the CPU, for hours, or stop",
                cure="check the node's driver and device plugin, the step's GPU limit, and that torch is a CUDA build "
                f"(it is built for CUDA {torch.version.cuda or 'no version'})",
            )
        ]  # fmt: skip
    free, total = torch.cuda.mem_get_info()
    return [ok(f"GPU {torch.cuda.get_device_name(0)}, {size(free)} of {size(total)} free")]


def _pins(constraints: str) -> dict[str, str]:
    return {m[1].lower().replace("_", "-"): m[2] for m in map(_PIN.match, constraints.splitlines()) if m}
