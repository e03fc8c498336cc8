"""How sure a mean over a run's steps is: its stretches, drawn again with replacement.

A stretch of about 5 s is a block: neighbouring steps are not independent (a slow file, a busy node), so single steps
would promise too much. Row 0 of every array is the run as it was measured.
"""

from dataclasses import dataclass
from functools import cached_property
from math import sqrt

import numpy as np

from kfp_gate.diagnosis.measured.steady import DATA, Floats, RankSteps, Stretch, steady_steps
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.evaluation.intervals import t_quantile

REPLICATES = 200
SEED = 20240229
_Z90 = 1.6448536269514722


def interval(samples: Floats, blocks: int) -> tuple[float, float]:
    """A 90% interval of samples whose first is the measured value.

    Args:
        samples: (B,)
        blocks: independent pieces behind them; for few the interval is wider, below 2 it is the point.
    """
    point = float(samples[0])
    if blocks < 2 or len(samples) < 2:
        return point, point
    low, high = (float(v) for v in np.quantile(samples[1:], (0.05, 0.95)))
    widened = t_quantile(_Z90, blocks - 1) * sqrt(blocks / (blocks - 1)) / _Z90
    return min(point, point - widened * (point - low)), max(point, point + widened * (high - point))


def draw_weights(blocks: int, *, seed: int = SEED, replicates: int = REPLICATES) -> Floats:
    """(1 + replicates, blocks) how often each block was drawn; all once in row 0."""
    drawn = np.random.default_rng(seed).multinomial(blocks, np.full(blocks, 1 / blocks), size=replicates)
    return np.vstack([np.ones((1, blocks)), drawn.astype(float)])


def drawn_medians(values: Floats, *, seed: int = SEED) -> Floats:
    """(B,) medians of values drawn again; zeros without any. Spread wider for few, as `interval` does."""
    if not len(values):
        return np.zeros(REPLICATES + 1)
    picks = np.random.default_rng(seed + 1).integers(0, len(values), size=(REPLICATES, len(values)))
    samples = np.concatenate([[np.median(values)], np.median(values[picks], axis=1)])
    if len(values) < 2:
        return samples
    widened = t_quantile(_Z90, len(values) - 1) * sqrt(len(values) / (len(values) - 1)) / _Z90
    clipped: Floats = np.clip(samples[0] + widened * (samples - samples[0]), 0.0, None)
    return clipped


@dataclass(frozen=True)
class Draws:
    """Means of one rank's steady steps, (B,) each."""

    of_rank: RankSteps
    seed: int = 0

    @classmethod
    def of(cls, run: Run, rank: int, *, seed: int = 0) -> "Draws | None":
        """None if the rank has no steady steps. Two runs that are compared need two seeds."""
        steps = steady_steps(run, rank)
        return cls(steps, seed) if steps is not None and sum(s.total for s in steps.stretches) > 0 else None

    @property
    def blocks(self) -> int:
        return len(self.of_rank.stretches)

    @cached_property
    def weights(self) -> Floats:
        return draw_weights(self.blocks, seed=SEED + 17 * self.of_rank.rank + 7919 * self.seed)

    @cached_property
    def step(self) -> Floats:
        """Seconds of a step."""
        return self._mean([s.total for s in self.of_rank.stretches], [s.steps for s in self.of_rank.stretches])

    def images(self) -> Floats | None:
        """(B,) images of a step; None: unknown."""
        stretches = self.of_rank.stretches
        if any(s.images is None for s in stretches):
            return None
        return self._mean([float(s.images or 0) for s in stretches], [s.steps for s in stretches])

    def names(self) -> list[str]:
        """Phases, on the clock that `phase` uses."""
        if not self.has_device:
            return self.of_rank.names()
        known = {n for s in self.of_rank.stretches for n, v in (s.device or {}).items() if v > 0}
        return [*(n for n in self.of_rank.names() if n in known), *sorted(known - set(self.of_rank.names()))]

    @cached_property
    def has_device(self) -> bool:
        return any(sum((s.device or {}).values()) > 0 for s in self.of_rank.stretches)

    def host(self, *names: str) -> Floats:
        """Seconds a step of some phases together, on the host's clock."""
        stretches = self.of_rank.stretches
        return self._mean([sum(s.seconds.get(n, 0.0) for n in names) for s in stretches], [s.steps for s in stretches])

    def phase(self, *names: str) -> Floats:
        """Seconds a step of some phases together, on the device's clock where there is one.

        What the device's clock knows late belongs to a later stretch, so its shares are taken, not its seconds. A
        clock that does not know the wait shares out the rest.
        """
        if not self.has_device:
            return self.host(*names)
        stretches = [s.device or {} for s in self.of_rank.stretches]
        share = self._mean([sum(d.get(n, 0.0) for n in names) for d in stretches], [sum(d.values()) for d in stretches])
        return share * (self.step if self._waits_known else self.step - self.host(DATA))

    def wait(self) -> Floats:
        """Seconds a step in which nothing went on but waiting for data, or preparing it."""
        host = self.host(DATA)
        return np.minimum(host, self.phase(DATA)) if self._waits_known else host

    @cached_property
    def _waits_known(self) -> bool:
        return any(DATA in (s.device or {}) for s in self.of_rank.stretches)

    def parts(self, *, cpu: bool = False) -> dict[str, Floats]:
        """Loader part to wall (or CPU) seconds a batch, of one process; empty if they are unknown."""
        column = 1 if cpu else 0
        names = sorted({n for s in self.of_rank.stretches for n in s.parts or {}})
        found = {}
        for name in names:
            sums = [(s.parts or {}).get(name, (0.0, 0.0))[column] for s in self.of_rank.stretches]
            found[name] = self._mean(sums, [s.batches if s.parts else 0 for s in self.of_rank.stretches])
        return {} if any(not np.isfinite(v).all() for v in found.values()) else found

    def patterns(self, length: int) -> Floats:
        """(B, length) factors of mean 1: how what follows the wait differs from step to step."""
        stretches: tuple[Stretch, ...] = self.of_rank.stretches
        pools = [s.each[:, 1] - s.each[:, 0] for s in stretches]
        pools = [p / p.mean() if len(p) and p.mean() > 0 else np.ones(1) for p in pools]
        random = np.random.default_rng(SEED + 3)
        rows = []
        for weights in self.weights:
            chosen = random.choice(len(pools), size=length, p=weights / weights.sum())
            row = np.array(
                [pools[i][int(u * len(pools[i]))] for i, u in zip(chosen, random.random(length), strict=True)]
            )
            rows.append(row / row.mean() if row.mean() > 0 else np.ones(length))
        return np.array(rows)

    def _mean(self, sums: list[float], counts: list[float] | list[int]) -> Floats:
        """Ratio of sums; a draw without any count gets the measured value."""
        above, below = self.weights @ np.array(sums, dtype=float), self.weights @ np.array(counts, dtype=float)
        if below[0] <= 1e-12:
            return np.full(len(below), np.nan)
        ratio = np.divide(above, below, out=np.full(len(below), above[0] / below[0]), where=below > 1e-12)
        mean: Floats = ratio
        return mean
