"""The queue between loader processes and the step, as torch's DataLoader runs it.

Batch k goes to worker k mod W, at most `ahead` batches of each worker are under way or waiting, batches are taken in
order, and a new one is handed out when one is taken:

    made[k]  = max(taken[k - W * ahead], made[k - W]) + production[k]
    taken[k] = max(asked[k], made[k])
    asked[k + 1] = taken[k] + rest[k]

which is a max-plus recursion: no time can shrink when a production or a rest grows. In the long run a step takes the
larger of production / W and rest (the bottleneck law: Denning and Buzen 1978, "The Operational Analysis of Queueing
Network Models"); the recursion adds what is ready at an epoch's start and the waits that uneven times cause.
"""

from dataclasses import dataclass

import numpy as np

from kfp_gate.diagnosis.measured.steady import Floats

LONGEST = 320
"""Steps that are played; what lies beyond goes on at the pace of their second half."""

STARVED = 0.10
"""Share of the step spent waiting below which the loader keeps up: taking a ready batch also costs a little."""

_ROUNDS = 24
_WIDEST = 1.6


def play(production: Floats, rest: Floats, *, workers: int, ahead: int, steps: int, idle: Floats) -> Floats:
    """Seconds of an epoch's steps. The workers go on in the idle time before, until the queue is full.

    Args:
        production: (B, L) or (B, 1) seconds that one worker needs for a batch.
        rest: (B, L) seconds of a step but for the wait.
        workers: W, at least 1.
        ahead: batches under way per worker.
        steps: of the epoch; L = min(steps, `LONGEST`).
        idle: (B,) seconds before the first step in which nothing is taken, such as validation.

    Returns:
        (B,)
    """
    replicates, length = rest.shape
    production = np.broadcast_to(production, rest.shape)
    capacity = workers * ahead
    made = np.zeros((length, replicates))
    taken = np.zeros((length, replicates))
    asked = np.zeros(replicates)
    half = np.zeros(replicates)
    for k in range(length):
        if k == length // 2:
            half = asked
        begun = taken[k - capacity] if k >= capacity else -idle
        made[k] = (np.maximum(begun, made[k - workers]) if k >= workers else begun) + production[:, k]
        taken[k] = np.maximum(asked, made[k])
        asked = taken[k] + rest[:, k]
    if steps <= length:
        return asked
    pace = (asked - half) / max(1, length - length // 2)
    beyond: Floats = asked + (steps - length) * pace
    return beyond


@dataclass(frozen=True)
class Loader:
    """A loader fitted to what was measured: with it, `play` gives the measured epoch, but for `left_s`.

    Attributes:
        production: (B, 1) mean seconds of one worker for a batch.
        uneven: (B, L) factors of mean 1: how production differs from batch to batch.
        left_s: (B,) seconds of a step that neither explains.
        uneven_wait: whether the wait is taken as one for uneven production; what is left of it shrinks with production.
        bound: whether the loader sets the pace: production / W is longer than the rest of the step. Then what the
            parts leave unexplained (passing batches on, cores that others use) is taken as production, too; else it is
            taken as uneven production.
    """

    production: Floats
    uneven: Floats
    left_s: Floats
    uneven_wait: bool
    bound: bool


def fit(
    rest: Floats,
    step: Floats,
    parts: Floats | None,
    *,
    workers: int,
    ahead: int,
    steps: int,
    idle: Floats,
    seed: int = 0,
) -> Loader | None:
    """Find the production that explains the measured step.

    Args:
        rest: (B, L) seconds of a step but for the wait.
        step: (B,) measured mean seconds of a step.
        parts: (B,) measured seconds of one worker for a batch; None: unknown.
        workers, ahead, steps, idle: as for `play`.

    Returns:
        None if production is unknown and the loader keeps up: then it may be anything below the step.
    """
    target, even = step * steps, np.ones_like(rest)

    def played(production: Floats) -> Floats:
        return play(production, rest, workers=workers, ahead=ahead, steps=steps, idle=idle)

    waiting = 1 - float(rest[0].mean() / step[0])
    bound = waiting >= STARVED if parts is None else bool(parts[0] > workers * rest[0].mean())
    if parts is None and not bound:
        return None
    if bound or parts is None:
        low, high = np.zeros_like(step), workers * step * 2 + step
        for _ in range(_ROUNDS):
            middle = (low + high) / 2
            over = played(middle[:, None]) > target
            low, high = np.where(over, low, middle), np.where(over, middle, high)
        production, uneven = high[:, None], even
    elif waiting < STARVED:
        production, uneven = parts[:, None], even
    else:
        production = parts[:, None]
        draws: Floats = np.random.default_rng(seed).standard_normal(rest.shape[1:])
        lean, wide = np.zeros_like(step), np.full_like(step, _WIDEST)
        for _ in range(_ROUNDS // 2):
            middle = (lean + wide) / 2
            over = played(production * _uneven(middle, draws)) > target
            lean, wide = np.where(over, lean, middle), np.where(over, middle, wide)
        uneven = _uneven(lean, draws)
    return Loader(
        production, uneven, (target - played(production * uneven)) / steps, waiting >= STARVED and not bound, bound
    )


def _uneven(spread: Floats, draws: Floats) -> Floats:
    factors = np.exp(spread[:, None] * draws)
    scaled: Floats = factors / factors.mean(axis=1, keepdims=True)
    return scaled
