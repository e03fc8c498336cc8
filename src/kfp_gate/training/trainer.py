"""All of our overrides of the upstream trainer, in one place.

Each names the upstream behaviour that it replaces (ultralytics 8.4.190), and has a test that fails when
upstream no longer behaves so. Everything that is not upstream's business lives elsewhere: validation, monitors,
checkpoints and tracking are handed in as a `Course`, which this class calls at its few joints.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils.data import RandomSampler
from ultralytics.models.yolo.detect import DetectionTrainer
from ultralytics.utils.torch_utils import unwrap_model

from kfp_gate.errors import Broken
from kfp_gate.observing import phases
from kfp_gate.observing.loader_profile import Flag, follow
from kfp_gate.observing.loading import Made, unwrap
from kfp_gate.training.group import Group
from kfp_gate.training.loader_parts import instrument
from kfp_gate.training.stand_ins import LoaderStart, NeverStops, NoLoader, Order, thread_count, without_device_ids

NAN_ATTEMPTS = 3
"""Recoveries in a row before training gives up."""


class Course(Protocol):
    """What happens around the steps: implemented by `kfp_gate.training.course`."""

    group: Group
    phases: phases.Phases
    corrupt: bool

    @property
    def flag(self) -> Flag | None:
        """Raised while the making of batches is profiled; None if it never is."""
        ...

    @property
    def whole_share(self) -> float:
        """How many images the training has for each one that this trainer sees."""
        ...

    @property
    def steady(self) -> bool:
        """Whether the number of batches to an optimizer step is the nominal one from the first step on."""
        ...

    def train_loader(self, loader: Any, *, accumulate: int) -> Any: ...
    def begin(self, trainer: "RankTrainer") -> None: ...
    def epoch_begins(self, trainer: "RankTrainer", epoch: int) -> None: ...
    def steps_end(self, trainer: "RankTrainer") -> None: ...
    def step_ends(self, trainer: "RankTrainer") -> None: ...
    def validate(self, trainer: "RankTrainer") -> tuple[dict[str, float], float]: ...
    def recover(self, trainer: "RankTrainer", reason: str) -> bool: ...
    def epoch_ends(self, trainer: "RankTrainer") -> None: ...


class RankTrainer(DetectionTrainer):  # type: ignore[misc]  # upstream has no types
    """One rank of a training. `course` decides and records; upstream moves the weights."""

    def __init__(self, overrides: dict[str, Any], course: Course) -> None:
        self.course = course
        self.group = course.group
        self._nominal_accumulate = 1
        self._stepping = False
        self.batch_index = -1
        self.last_step = -1
        self.made: Made | None = None
        self.images = self.moved = 0
        """Of the step that runs: how its batch was made, its images, and the bytes of their tensor."""
        super().__init__(overrides=overrides)
        # Upstream allows no loader processes on a CPU; who asks for some there gets them.
        self.args.workers = overrides["workers"]
        # Upstream's callbacks go as a whole: its trackers attach themselves by the class's name, and its MLflow
        # callback turns every failure into a warning, and tracking off for the rest of the run.
        self.callbacks: dict[str, list[Callable[[Any], None]]] = defaultdict(list)
        # Upstream takes the world from the number of local devices, so ranks in pods of their own would each train
        # a model of their own, and nothing would complain.
        if self.group.size > 1:
            self.world_size, self.ddp = self.group.size, False
            self.device = self.group.device
        # Upstream sets min(8, cores of the node - 1) threads, whatever the container's quota and OMP_NUM_THREADS say.
        torch.set_num_threads(thread_count())
        self.callbacks["on_train_epoch_start"].append(self._epoch_begins)
        self.callbacks["on_train_batch_start"].append(self._batch_begins)
        self.callbacks["on_train_batch_end"].append(self._batch_ends)
        self.callbacks["on_train_epoch_end"].append(self.course.steps_end)
        self.callbacks["on_fit_epoch_end"].append(self.course.epoch_ends)

    # Start ------------------------------------------------------------------------------------------------------

    def _setup_ddp(self) -> None:
        """Upstream makes its own group, over the devices of this machine alone. Ours exists already."""
        self.device = self.group.device
        if self.device.type != "cpu":
            from ultralytics.utils.torch_utils import get_torch_device_backend

            self.accelerator = get_torch_device_backend(self.device)

    def _setup_train(self) -> None:
        """Upstream hands `device_ids=[None]` to DDP on CPU, which refuses it."""
        wrapper = nn.parallel.DistributedDataParallel
        if self.device.type == "cpu" and self.group.size > 1:
            nn.parallel.DistributedDataParallel = without_device_ids(wrapper)
        try:
            super()._setup_train()
        finally:
            nn.parallel.DistributedDataParallel = wrapper
        # Upstream's early stopping knows one value, never fires at mAP 0, and is not in `Monitors`' hands.
        self.stopper = NeverStops()
        self.metrics: dict[str, float] = {}
        self._mark_phases()
        self.course.begin(self)

    def _build_train_pipeline(self) -> None:
        # Also runs again when upstream halves the batch after running out of GPU memory.
        self._stepping, self.last_step = False, -1
        super()._build_train_pipeline()

    def get_dataloader(self, dataset_path: str, batch_size: int = 16, rank: int = 0, mode: str = "train") -> Any:
        """Upstream keeps a second set of loader workers, twice as many, with prefetched validation batches."""
        if mode == "val":
            return NoLoader()
        loader = super().get_dataloader(dataset_path, batch_size, rank, mode)
        loader.worker_init_fn = LoaderStart(loader.worker_init_fn, self.course.flag)
        if self.course.flag is not None:
            follow(self.course.flag)
        instrument(loader)
        batches = loader.batch_sampler.sampler
        if isinstance(batches.sampler, RandomSampler):
            batches.sampler = Order(batches.sampler)
        return self.course.train_loader(loader, accumulate=max(1, round(self.args.nbs / self.batch_size)))

    def build_optimizer(
        self, model: Any, name: str = "auto", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5,
        iterations: float = 1e5,
    ) -> Any:  # fmt: skip
        """Upstream chooses the optimizer by the number of images it sees; a probe sees a part of them."""
        return super().build_optimizer(model, name, lr, momentum, decay, iterations * self.course.whole_share)

    def get_validator(self) -> Any:
        """Upstream's validator is never run: values come from the evaluator that the gate uses."""
        return SimpleNamespace(metrics=SimpleNamespace(keys=[]), dataloader=None, args=SimpleNamespace(plots=False))

    # Steps ------------------------------------------------------------------------------------------------------

    def preprocess_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        batch, self.made = unwrap(batch)
        self.images, self.moved = len(batch["img"]), batch["img"].nbytes
        result: dict[str, Any] = super().preprocess_batch(batch)
        if self._stepping:
            self.course.phases.enter(phases.FORWARD)
        return result

    def optimizer_step(self) -> None:
        self.course.phases.enter(phases.OPTIMIZER)
        super().optimizer_step()
        self.last_step = self.batch_index

    @property
    def nominal_accumulate(self) -> int:
        """Batches to an optimizer step, after the warm-up."""
        return self._nominal_accumulate

    @property
    def accumulate(self) -> float:
        """Upstream forgets on resume how many batches it has accumulated, and steps at once.

        While steps run, upstream asks `ni - last_opt_step >= accumulate`; we answer from counters that a checkpoint
        holds, so that a resumed run steps where the first one would have.
        """
        if not self._stepping:
            return self._nominal_accumulate
        due = self.batch_index - self.last_step >= self._accumulate_now()
        return -math.inf if due else math.inf

    @accumulate.setter
    def accumulate(self, value: int) -> None:
        if not self._stepping:
            self._nominal_accumulate = value

    def _accumulate_now(self) -> int:
        warmup = self._get_warmup_iterations(len(self.train_loader))
        if warmup and self.batch_index <= warmup and not self.course.steady:
            return max(1, round(float(np.interp(self.batch_index, [0, warmup], [1, self._nominal_accumulate]))))
        return self._nominal_accumulate

    def _epoch_begins(self, _trainer: Any) -> None:
        self.batch_index = self.epoch * len(self.train_loader) - 1
        self._stepping = True
        self.course.epoch_begins(self, self.epoch + 1)

    def _batch_begins(self, _trainer: Any) -> None:
        self.batch_index += 1
        self.course.phases.enter(phases.TRANSFER)

    def _mark_phases(self) -> None:
        """The model's last module ends the forward pass, and the scaling of the loss ends the loss."""
        whole = bool(self.args.compile)
        # A hook inside a compiled model would cut its graph in two; upstream computes the loss outside of it.
        end = self.model if whole else unwrap_model(self.model).model[-1]
        end.register_forward_hook(lambda *_: self._proceed(phases.FORWARD, phases.LOSS))
        scale = self.scaler.scale

        def scaled(loss: Any) -> Any:
            self._proceed(phases.LOSS, phases.BACKWARD)
            return scale(loss)

        self.scaler.scale = scaled

    def _proceed(self, current: str, then: str) -> None:
        """Enter the next phase of a step, and only where a step is in the one before."""
        if self._stepping and self.course.phases.current == current:
            self.course.phases.enter(then)

    def _batch_ends(self, _trainer: Any) -> None:
        self.course.step_ends(self)

    # Ends of epochs ---------------------------------------------------------------------------------------------

    def validate(self) -> tuple[dict[str, float], float]:
        """Upstream computes its own mAP, with rectangular batches, and gives other ranks None."""
        return self.course.validate(self)

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """Upstream asks rank 0's loss alone, and every rank for a last.pt that only rank 0 has."""
        if not self.course.corrupt:
            return False
        self.nan_recovery_attempts += 1
        reason = f"the loss or the weights are not finite in epoch {epoch + 1}"
        if self.nan_recovery_attempts > NAN_ATTEMPTS or not self.course.recover(self, reason):
            raise Broken(
                reason, expected="finite values", where="training",
                next_step="lower the learning rate (overrides lr0) or set precision to 'fp32', and look at the labels",
            )  # fmt: skip
        return True

    def save_metrics(self, metrics: dict[str, Any]) -> None:
        """Upstream writes a CSV whose header breaks at a comma in a class name; the timeline holds the values."""

    def save_model(self) -> bool:
        """Upstream's checkpoints hold half-precision weights alone, on rank 0's disk alone. See `epoch_ends`."""
        return True

    def final_eval(self) -> None:
        """Upstream's last validation runs on rank 0, while the others are already gone."""

    def plot_metrics(self) -> None:
        """Upstream draws from the CSV."""
