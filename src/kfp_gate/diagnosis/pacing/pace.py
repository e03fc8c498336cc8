"""What sets the pace of one rank's step: measured means put together so that a part can be changed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kfp_gate.diagnosis.measured.spread import Draws
from kfp_gate.diagnosis.measured.steady import Floats
from kfp_gate.diagnosis.pacing.loader_queue import LONGEST, Loader, fit, play

USUAL_PREFETCH = 2
"""torch's default, where the run does not say."""

CROWDED, COMPUTING, FULL = 0.25, 0.3, 0.85
"""Share of the time that some task waits for a core; of a loader's time that it computes; of the cores in use."""


@dataclass(frozen=True)
class Pace:
    """One rank's step: what it waits for data, and the rest of its own work.

    Attributes:
        wait: (B,) seconds. Without loader processes this is preparation itself.
        rest: (B,) seconds of its own, without waiting for other ranks.
        compute: (B,) seconds of its own forward, loss and backward.
        loader: None without loader processes, or if it keeps up and its production is unknown.
    """

    draws: Draws
    steps: int
    idle: Floats
    wait: Floats
    rest: Floats
    compute: Floats
    ranks_on_node: int = 1
    fitted: bool = True

    @property
    def rank(self) -> int:
        return self.draws.of_rank.rank

    @property
    def workers(self) -> int | None:
        return self.draws.of_rank.workers

    @property
    def on_its_clock(self) -> bool:
        """Whether phases after the wait are known as work, not as the time that it took to queue it."""
        return not self.draws.of_rank.cuda or self.draws.has_device

    @property
    def own(self) -> Floats:
        return self.wait + self.rest

    @cached_property
    def pattern(self) -> Floats:
        return self.draws.patterns(min(self.steps, LONGEST))

    @cached_property
    def parts(self) -> dict[str, Floats]:
        return self.draws.parts()

    @cached_property
    def loader(self) -> Loader | None:
        if not self.workers or not self.fitted:
            return None
        made = np.sum(list(self.parts.values()), axis=0) if self.parts else None
        return fit(
            self.rest[:, None] * self.pattern, self.own, made, workers=self.workers, ahead=self._ahead,
            steps=self.steps, idle=self.idle,
        )  # fmt: skip

    @property
    def loading(self) -> Floats:
        """(B,) seconds that the loader processes together need for a batch; zeros without any, or if unknown."""
        if not self.workers or not self.parts:
            return np.zeros_like(self.wait)
        needed: Floats = np.sum(list(self.parts.values()), axis=0) / self.workers
        return needed

    @property
    def _ahead(self) -> int:
        return self.draws.of_rank.prefetch or USUAL_PREFETCH

    def share_of(self, members: Sequence[str]) -> Floats:
        """(B,) share of preparation that these loader parts take."""
        chosen = np.sum([self.parts[m] for m in members if m in self.parts] or [np.zeros_like(self.wait)], axis=0)
        whole = np.sum(list(self.parts.values()), axis=0) if self.workers else self.wait
        share: Floats = np.clip(np.divide(chosen, whole, out=np.zeros_like(whole), where=whole > 1e-12), 0.0, 1.0)
        return share

    def changed(self, prepared: Floats | float = 0.0, saved: Floats | float = 0.0, times: int = 1) -> Floats:
        """(B,) seconds of its own with a share of preparation gone, seconds of the rest gone, more workers."""
        rest = np.clip(self.rest - saved, 0.0, None)
        kept = 1.0 - np.broadcast_to(np.asarray(prepared, dtype=float), rest.shape)
        if not self.workers:
            return self.wait * kept + rest
        if self.loader is None:
            # It keeps up: what little it waits may as well be the cost of taking a batch that is ready.
            return self.wait + rest
        played = play(
            self.loader.production * kept[:, None] * self.loader.uneven, rest[:, None] * self.pattern,
            workers=self.workers * times, ahead=self._ahead, steps=self.steps, idle=self.idle,
        )  # fmt: skip
        left = self.loader.left_s * np.where(self.loader.uneven_wait & (self.loader.left_s > 0), kept, 1.0)
        bound = self._cpu_bound(kept, rest)
        # Bounded by what was measured: cores that gave it once can give it again.
        return np.maximum(played / self.steps + left, np.minimum(bound, self.own) if bound is not None else 0.0)

    def beside(self, workers: int) -> Floats:
        """(B,) seconds of its own if preparation ran in loader processes; now it has none."""
        played = play(
            self.wait[:, None], self.rest[:, None] * self.pattern, workers=workers, ahead=USUAL_PREFETCH,
            steps=self.steps, idle=self.idle,
        )  # fmt: skip
        bound = self._cpu_bound(np.ones_like(self.rest), self.rest)
        return np.maximum(played / self.steps, bound if bound is not None else 0.0)

    @property
    def cores_known(self) -> bool:
        return self._cpu_bound(np.ones_like(self.rest), self.rest) is not None

    @property
    def crowded(self) -> str | None:
        """Why more processes may get no more of the cores, though this run leaves some: others use them."""
        steps = self.draws.of_rank
        cpu, wall = (sum(float(v[0]) for v in self.draws.parts(cpu=c).values()) for c in (True, False))
        demand = self._cpu_bound(np.ones_like(self.rest), self.rest)
        if steps.pressure is None or demand is None or steps.pressure < CROWDED:
            return None
        if (self.workers and cpu < COMPUTING * wall) or demand[0] >= FULL * self.own[0]:
            return None
        used = float(demand[0] / self.own[0]) * (steps.cores or 0.0)
        return (
            f"some task waits for a core {steps.pressure:.0%} of the time, though this run uses {used:.2g} of "
            f"{steps.cores:.2g}: something else uses them"
        )

    def _cpu_bound(self, kept: Floats, rest: Floats) -> Floats | None:
        """(B,) seconds below which the cores cannot get through a step's CPU seconds; None: unknown."""
        steps = self.draws.of_rank
        if steps.cores is None:
            return None
        demand = np.zeros_like(rest)
        if self.workers:
            cpu = self.draws.parts(cpu=True)
            if not cpu:
                return None
            demand = demand + np.sum(list(cpu.values()), axis=0) * kept
        if not steps.cuda:
            # A host that waits for its GPU spins: that is no demand.
            if steps.main_cores is None:
                return None
            share = np.divide(rest, self.rest, out=np.ones_like(rest), where=self.rest > 1e-12)
            demand = demand + steps.main_cores * self.draws.step * share
        bound: Floats = demand * self.ranks_on_node / steps.cores
        return bound
