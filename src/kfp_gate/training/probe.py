"""A probe: a bounded run that tells feeding from computing by changing one thing.

    warm-up | (profile window) | N steps as usual | settling | N steps on batches held in memory | end

Model, optimizer, transfer and everything else stay; only where a batch comes from changes. What the second stretch
gains is what the loader costs. Both are timed by the same clock, in one epoch, on every rank alike. A probe takes
the same time whatever the size of the data: it looks at a part of the images, chosen evenly, and validates a few
batches. The model that comes out is for nothing; `evaluation.model_folder.refuse_probe` keeps it out of the gate.

The timeline gets two `probe` lines:

    part            "usual" or "prepared"
    steps           measured steps
    step_s          seconds a step: the median over groups of steps, see `kfp_gate.training.step_spread`
    low, high       a 90% interval of that median
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from kfp_gate.metric_names import parse
from kfp_gate.observing.loading import KEY
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.step_spread import spread_of
from kfp_gate.training.windows import PREPARED, USUAL, WARM_STEPS

if TYPE_CHECKING:
    from kfp_gate.data.manifest import Manifest

log = logging.getLogger(__name__)

WARM, WINDOW, SETTLE = "warm-up", "window", "settle"

HELD_BATCHES = 4
HELD_BYTES = 512 << 20
"""What is held in memory: so many batches, fewer if they are larger than this together, at least one."""

VALIDATION_BATCHES = 2
"""Validation batches of each rank: a first one warms up, so one would not be measured."""

IMAGES_PER_SAMPLE = 4
"""A mosaic is made of so many images; with fewer on disk the page cache would serve reads that a training waits for."""


@dataclass(frozen=True)
class ProbePlan:
    """Numbers of steps: of warm-up, of the profile window, of each of the two measured stretches, of settling.

    The warm-up outlasts the batches that loader processes prepare in advance while the first, slow steps run: served
    from that stock, the measured steps would be faster than the loader is. Settling lasts until the optimizer's turn
    comes as it did in the first stretch, so that both hold the same steps.
    """

    warm: int
    window: int
    steps: int
    settle: int = WARM_STEPS

    @classmethod
    def of(cls, steps: int, *, stock: int, window: int = 0, accumulate: int = 1) -> "ProbePlan":
        """A plan.

        Args:
            steps: of each stretch.
            stock: batches that loader processes hold ready.
            window: steps that a profile window needs.
            accumulate: batches to an optimizer step.
        """
        return cls(WARM_STEPS + 2 * stock, window, steps, WARM_STEPS + -(steps + WARM_STEPS) % accumulate)

    @property
    def total(self) -> int:
        return self.warm + self.window + 2 * self.steps + self.settle

    @property
    def fed(self) -> int:
        """Steps before the switch."""
        return self.warm + self.window + self.steps

    def part(self, step: int) -> str:
        """What a step, counted from 0, belongs to."""
        for part, count in ((WARM, self.warm), (WINDOW, self.window), (USUAL, self.steps), (SETTLE, self.settle)):
            if step < count:
                return part
            step -= count
        return PREPARED


class ProbeLoader:
    """Stands for the train loader: one epoch of `plan.total` batches, the later ones from memory.

    Everything else is the loader's. Its processes are ended at the switch: idle ones would first fill their stock, and
    take cores from the steps that are measured.
    """

    def __init__(self, loader: Any, plan: ProbePlan) -> None:
        self.loader, self.plan = loader, plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return self.plan.total

    def __iter__(self) -> Iterator[dict[str, Any]]:
        held: list[dict[str, Any]] = []
        size = 0
        for batch in islice(self._without_end(), self.plan.fed):
            needed = _bytes_of(batch)
            # The last batch of a pass over the images may hold fewer; the first never does.
            whole = not held or len(batch["img"]) == len(held[0]["img"])
            if whole and len(held) < HELD_BATCHES and (not held or size + needed <= HELD_BYTES):
                # As it came: tensors in the memory that the loader put them in, pinned if it pins. A copy of the
                # mapping, since the trainer puts the device's tensors in their place; its making is counted once.
                held.append({k: v for k, v in batch.items() if k != KEY})
                size += needed
            yield batch
        self.loader.reset()
        for step in range(self.plan.total - self.plan.fed):
            yield dict(held[step % len(held)])

    def _without_end(self) -> Iterator[dict[str, Any]]:
        while True:
            yield from self.loader


class Probe:
    """What one rank measures. `step_done` once a step, then `tell`."""

    def __init__(self, steps: int, timeline: Timeline) -> None:
        self.steps, self.timeline = steps, timeline
        self.plan = ProbePlan.of(steps, stock=0)
        self.seconds: dict[str, list[float]] = {}
        self._step = 0

    def wrap(self, loader: Any, *, stock: int, window: int, accumulate: int) -> ProbeLoader:
        """The loader of this probe; once more if the trainer builds its loader anew, which starts again.

        Args:
            loader: the train loader.
            stock: batches that the loader processes of any rank hold ready, the same number on all ranks.
            window: steps that a profile window needs.
            accumulate: batches to an optimizer step.
        """
        self.plan = ProbePlan.of(self.steps, stock=stock, window=window, accumulate=accumulate)
        self.seconds, self._step = {}, 0
        return ProbeLoader(loader, self.plan)

    @property
    def part(self) -> str:
        """Of the step that runs now, or comes next between two steps."""
        return self.plan.part(self._step)

    @property
    def input(self) -> str:
        """Where the batch of this step comes from."""
        return PREPARED if self.part in (SETTLE, PREPARED) else USUAL

    @property
    def warm(self) -> bool:
        """Whether this step is not measured, since it is no steady state yet."""
        return self.part in (WARM, SETTLE)

    def step_done(self, seconds: float) -> None:
        """Count a step that took so long, its wait for data included."""
        self.seconds.setdefault(self.part, []).append(seconds)
        self._step += 1

    def tell(self, *, group: int) -> None:
        """Write both `probe` lines and say the result; `group` as in `spread_of`."""
        found = {part: spread_of(self.seconds.get(part, ()), group=group) for part in (USUAL, PREPARED)}
        for part, spread in found.items():
            if spread is not None:
                self.timeline.write(
                    "probe", part=part, steps=len(self.seconds[part]), step_s=round(spread.median, 6),
                    low=round(spread.low, 6), high=round(spread.high, 6),
                )  # fmt: skip
        usual, prepared = found[USUAL], found[PREPARED]
        if usual is not None and prepared is not None:
            gain = usual.median - prepared.median
            clear = prepared.high < usual.low
            log.info(
                "probe: %d steps as usual, %.4f s each (%.4f to %.4f); %d steps on batches held in memory, %.4f s each "
                "(%.4f to %.4f): %s",
                len(self.seconds[USUAL]), usual.median, usual.low, usual.high, len(self.seconds[PREPARED]),
                prepared.median, prepared.low, prepared.high,
                f"feeding costs {gain:.4f} s a step ({gain / usual.median:.0%})" if clear
                else "no gain beyond the spread",
            )  # fmt: skip


def part_of_the_data(
    manifests: Mapping[str, "Manifest"], *, batch: int, validation_batch: int, ranks: int, steps: int,
    monitors: Sequence[str],
) -> dict[str, "Manifest"]:  # fmt: skip
    """Manifests of the images that a probe looks at, the same on all ranks.

    Args:
        manifests: "train" and "val", whole.
        batch: images of a training step over all ranks; the part holds whole batches only, so that every step has
            as many images as a training's.
        validation_batch: images of a rank's validation batch.
        ranks: number of ranks.
        steps: of the probe, as `ProbePlan.total`.
        monitors: every class that one of them names is in the val part.
    """
    train, val = manifests["train"], manifests["val"]
    step = max(1, batch // ranks) * ranks
    wanted = min(len(train), step * steps * IMAGES_PER_SAMPLE)
    wanted = wanted // step * step or len(train)
    return {
        "train": _take(train, _evenly(len(train), wanted)),
        "val": _take(val, _val_rows(val, VALIDATION_BATCHES * validation_batch * ranks, monitors)),
    }


def _val_rows(val: "Manifest", count: int, monitors: Sequence[str]) -> list[int]:
    wanted = {parse(m).class_name for m in monitors} - {None}
    missing = {val.classes.index(name) for name in wanted if name in val.classes}
    first: list[int] = []
    with_objects = -1
    for index, row in enumerate(val.rows()):
        present = {int(c) for c in row.boxes[:, 0]}
        if present and with_objects < 0:
            with_objects = index
        if present & missing:
            first.append(index)
            missing -= present
        if not missing and with_objects >= 0:
            break
    if with_objects >= 0:
        first.append(with_objects)
    rows = set(first)
    for index in _evenly(len(val), min(len(val), count)):
        if len(rows) >= count:
            break
        rows.add(index)
    return sorted(rows)


def _evenly(total: int, count: int) -> list[int]:
    return [i * total // count for i in range(count)]


def _take(manifest: "Manifest", rows: Sequence[int]) -> "Manifest":
    return manifest if len(rows) == len(manifest) else replace(manifest, table=manifest.table.take(list(rows)))


def _bytes_of(batch: Mapping[str, Any]) -> int:
    return sum(v.numel() * v.element_size() for v in batch.values() if isinstance(v, torch.Tensor))
