"""Runs a plan of trainings in one process, so that several trainings share one start of torch.

    python drive.py PLAN.json        [{"spec": FILE, "out": FOLDER, "port": 29501, "fault": NAME, "code": 0}, ...]

Faults are put in where the product calls the outside world or where a rank would really fail. Prints one line
`CODE n` after each training.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
    for item in plan:
        run(item)


def run(item: dict[str, Any]) -> None:
    os.environ["MASTER_PORT"] = str(item.get("port", 29500))
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import read_ranks
    from kfp_gate.training.spec import TrainingSpec
    from kfp_gate.training.worker import _on_sigterm

    ranks = read_ranks()
    out = Path(item["out"])
    private = out / f"rank{ranks.rank}"
    private.mkdir(parents=True, exist_ok=True)
    if item.get("fault") == "disk_full_in_epoch_2":
        # A small disk of its own for what the rank writes; model and record go beside it.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(private)], check=True)
    upstream.prepare(private / "config", ranks)
    from kfp_gate.training.session import Session

    undo = FAULTS[item.get("fault", "none")](ranks.rank)
    session = Session(TrainingSpec.read(Path(item["spec"])), ranks, out=out, private=private, node=socket.gethostname())
    _on_sigterm(session.end_by_signal, busy=lambda: session.failing)
    code = session.run()
    undo()
    print(f"CODE {code}", flush=True)
    if code:
        os._exit(code)


def none(_rank: int) -> Any:
    return lambda: None


def dies_in_epoch_3(rank: int) -> Any:
    """The process is gone between two batches of epoch 3, as after an eviction."""
    from kfp_gate.training.course import TrainingCourse

    original = TrainingCourse.epoch_begins

    def begins(self: Any, trainer: Any, epoch: int) -> None:
        if epoch == 3:
            print("CODE 99", flush=True)
            os._exit(99)
        original(self, trainer, epoch)

    TrainingCourse.epoch_begins = begins
    return lambda: setattr(TrainingCourse, "epoch_begins", original)


def nan_on_rank_1_and_storage_down_in_epoch_2(rank: int) -> Any:
    """One batch of rank 1 is not finite in epoch 3; the store takes nothing in epoch 2."""
    from kfp_gate.errors import Unavailable
    from kfp_gate.storage import LocalStore
    from kfp_gate.training.trainer import RankTrainer

    original, upload, done = RankTrainer.preprocess_batch, LocalStore.upload, []

    def preprocess(self: Any, batch: Any) -> Any:
        result = original(self, batch)
        if rank == 1 and self.epoch == 2 and not done:
            done.append(1)
            result["img"] = result["img"] * float("nan")
        return result

    def fails(self: Any, path: Path, key: str) -> None:
        if "/000002-" in key:
            raise Unavailable("no answer", expected="a store", where=key, next_step="wait")
        upload(self, path, key)

    RankTrainer.preprocess_batch, LocalStore.upload = preprocess, fails

    def undo() -> None:
        RankTrainer.preprocess_batch, LocalStore.upload = original, upload

    return undo


def says_what_it_sees_and_ends_with(rank: int) -> Any:
    """No fault: the images of each training batch, and a checksum of all parameters after the last one."""
    from hashlib import sha256

    from kfp_gate.training.trainer import RankTrainer

    original, end = RankTrainer.preprocess_batch, RankTrainer.final_eval

    def preprocess(self: Any, batch: Any) -> Any:
        for file in batch["im_file"]:
            print(f"SEEN {self.epoch} {Path(file).name}", flush=True)
        return original(self, batch)

    def final_eval(self: Any) -> None:
        digest = sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            # Running statistics of batch norm are each rank's own until validation takes rank 0's.
            if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
                digest.update(tensor.detach().cpu().numpy().tobytes())
        print(f"PARAMETERS {digest.hexdigest()}", flush=True)
        end(self)

    RankTrainer.preprocess_batch, RankTrainer.final_eval = preprocess, final_eval

    def undo() -> None:
        RankTrainer.preprocess_batch, RankTrainer.final_eval = original, end

    return undo


def rank_0_fails_in_the_validation_of_epoch_2(rank: int) -> Any:
    from kfp_gate.training.validation import Validation

    original, calls = Validation._compute, []

    def compute(self: Any, records: Any, expected: int) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("made by the test")
        return original(self, records, expected)

    Validation._compute = compute
    return lambda: None


def rank_1_raises_in_epoch_2(rank: int) -> Any:
    from kfp_gate.training.trainer import RankTrainer

    original = RankTrainer._batch_begins

    def begins(self: Any, trainer: Any) -> None:
        if rank == 1 and self.epoch == 1:
            raise ValueError("made by the test, with password=hunter22")
        original(self, trainer)

    RankTrainer._batch_begins = begins
    return lambda: None


def rank_1_is_killed_in_epoch_2(rank: int) -> Any:
    from kfp_gate.training.trainer import RankTrainer

    original = RankTrainer._batch_begins

    def begins(self: Any, trainer: Any) -> None:
        if rank == 1 and self.epoch == 1:
            print(f"KILLED {time.time()}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, trainer)

    RankTrainer._batch_begins = begins
    return lambda: None


def slow_epochs(rank: int) -> Any:
    """Time for the test to send a signal."""
    from kfp_gate.training.trainer import RankTrainer

    original = RankTrainer._batch_begins

    def begins(self: Any, trainer: Any) -> None:
        if self.epoch >= 1:
            time.sleep(0.5)
        original(self, trainer)

    RankTrainer._batch_begins = begins
    return lambda: None


def disk_full_in_epoch_2(rank: int) -> Any:
    """The disk is really full: a file fills what is left before the checkpoint, and goes before the next."""
    from kfp_gate.training.course import TrainingCourse

    original = TrainingCourse._checkpoint

    def checkpoint(self: Any, trainer: Any, epoch: int, *rest: Any, **more: Any) -> None:
        filler = self.folder / "filler"
        if epoch == 2:
            with filler.open("wb", buffering=0) as handle:
                try:
                    while True:
                        handle.write(bytes(1 << 16))
                except OSError:
                    pass
        original(self, trainer, epoch, *rest, **more)
        filler.unlink(missing_ok=True)

    TrainingCourse._checkpoint = checkpoint
    return lambda: setattr(TrainingCourse, "_checkpoint", original)


def a_transform_that_waits_and_loops(rank: int) -> Any:
    """30 ms an image, in the data set's own list of transforms; also says what it sees and ends with."""
    from ultralytics.data.dataset import YOLODataset

    original, undo = YOLODataset.build_transforms, says_what_it_sees_and_ends_with(rank)

    def build(self: Any, hyp: Any = None) -> Any:
        transforms = original(self, hyp)
        transforms.insert(len(transforms.transforms) - 1, WaitsAndLoops())
        return transforms

    YOLODataset.build_transforms = build

    def undo_both() -> None:
        undo()
        YOLODataset.build_transforms = original

    return undo_both


def runs_out_of_memory_in_step_6(rank: int) -> Any:
    """As a GPU does, once: upstream halves the batch and starts the epoch again."""
    from ultralytics.nn.tasks import DetectionModel

    original, calls = DetectionModel.loss, []

    def loss(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 6:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return original(self, *arguments)

    DetectionModel.loss = loss
    return lambda: setattr(DetectionModel, "loss", original)


class WaitsAndLoops:
    def __call__(self, labels: Any) -> Any:
        self.loop()
        time.sleep(0.03)
        return labels

    def loop(self) -> int:
        return sum(i * i for i in range(2_000))


FAULTS = {
    f.__name__: f
    for f in (
        none, dies_in_epoch_3, says_what_it_sees_and_ends_with,
        nan_on_rank_1_and_storage_down_in_epoch_2, rank_0_fails_in_the_validation_of_epoch_2,
        rank_1_raises_in_epoch_2,
        rank_1_is_killed_in_epoch_2, slow_epochs, disk_full_in_epoch_2,
        a_transform_that_waits_and_loops, runs_out_of_memory_in_step_6,
    )
}  # fmt: skip

if __name__ == "__main__":
    main()
