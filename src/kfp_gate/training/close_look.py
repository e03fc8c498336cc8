"""How the steps of a rank are looked at: in stretches always, and closely where the spec asks for it.

A profile window and a probe change what kind of step comes next; every change begins a new stretch (`window` line), so
that no line mixes two kinds.
"""

from collections.abc import Callable, Mapping
from multiprocessing import RawValue
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gate.observing.loading import batches_ready
from kfp_gate.observing.phases import Phases
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.group import Group
from kfp_gate.training.probe import Probe
from kfp_gate.training.profiling import ProfileWindow
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.window_plan import WindowPlan
from kfp_gate.training.windows import USUAL, WARM_STEPS, Windows

if TYPE_CHECKING:
    from kfp_gate.training.trainer import RankTrainer

Reproduce = Callable[[Path, Mapping[str, Any]], str]
"""Writes into a folder a run that shows the profile window once more, given the optimizer's overrides; gives the
command."""


class CloseLook:
    """Of one process."""

    def __init__(
        self, spec: TrainingSpec, *, group: Group, folder: Path, timeline: Timeline, phases: Phases,
        reproduce: Reproduce | None,
    ) -> None:  # fmt: skip
        self.spec, self.group = spec, group
        self.windows = Windows(timeline, phases)
        self.probe = Probe(spec.probe_steps, timeline) if spec.probe_steps else None
        self.flag = RawValue("b", 0) if spec.profile_steps else None
        """Raised while the making of batches is profiled; None if it never is."""
        self.profile = ProfileWindow(
            spec.profile_steps, folder=folder, timeline=timeline, phases=phases, cuda=group.device.type == "cuda",
            flag=self.flag, reproduce=None if reproduce is None else lambda to: reproduce(to, self._optimizer),
        )  # fmt: skip
        self._optimizer: dict[str, Any] = {}
        self._stock = 0

    def loader(self, loader: Any, *, accumulate: int) -> Any:
        """What the trainer goes through instead of its loader: itself, but in a probe. All ranks call it; `accumulate`
        batches make an optimizer step."""
        # The same on all ranks, whose nodes may differ in cores and so in loader processes.
        self._stock = int(self.group.largest(float(loader.num_workers * (loader.prefetch_factor or 0))))
        if self.probe is None:
            return loader
        steps = self.spec.profile_steps
        window = WindowPlan.full(steps, self._stock).after_warm_up if steps else 0
        return self.probe.wrap(loader, stock=self._stock, window=window, accumulate=accumulate)

    def epoch_begins(self, trainer: "RankTrainer", epoch: int) -> None:
        """The first batch is asked for next."""
        self._optimizer = {"optimizer": trainer.args.optimizer, "lr0": trainer.args.lr0}
        self.windows.begin(epoch, trainer.batch_index + 1)
        plan = self.probe.plan if self.probe is not None else None
        self.profile.epoch_begins(
            plan.warm + plan.window if plan is not None else len(trainer.train_loader),
            # A probe's warm-up has used up the stock of batches already: the window need not wait for that again.
            skip=plan.warm - self._stock if plan is not None else max(0, WARM_STEPS - self.windows.taken),
            stock=self._stock, workers=trainer.train_loader.num_workers,
        )  # fmt: skip
        self._turn(self._kind())

    def step_ends(self, trainer: "RankTrainer") -> None:
        """Once a batch."""
        before = self._kind()
        ready = batches_ready(getattr(trainer.train_loader, "iterator", None))
        seconds = self.windows.step(images=trainer.images, moved=trainer.moved, made=trainer.made, ready=ready)
        self.profile.take(trainer.made)
        self.profile.step_done(seconds)
        if self.probe is not None:
            self.probe.step_done(seconds)
        if self.profile.due or self._kind() != before:
            self._turn(before)

    def steps_end(self, trainer: "RankTrainer") -> None:
        """Once an epoch, after its last batch."""
        self.windows.end()
        self.profile.steps_end()
        if self.probe is not None:
            self.probe.tell(group=max(trainer.train_loader.num_workers, trainer.nominal_accumulate))

    def _kind(self) -> dict[str, Any]:
        """What kind of step runs now, or comes next between two."""
        probe = self.probe
        return {
            "input": USUAL if probe is None else probe.input, "warm": probe is not None and probe.warm,
            "profiled": self.profile.open,
        }  # fmt: skip

    def _turn(self, before: dict[str, Any]) -> None:
        """Between two steps another kind begins. The time that the instruments take belongs to no stretch."""
        self.windows.switch(**before)
        self.profile.turn()
        self.windows.switch(**self._kind())
