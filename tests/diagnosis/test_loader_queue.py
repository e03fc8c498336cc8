"""The loader's queue, against a simulation written otherwise: processes with inboxes, one event at a time."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.diagnosis.pacing.loader_queue import fit, play


def by_events(production, rest, workers, ahead, idle):
    """Seconds until the last step ends: a heap of finished batches, and an index queue a worker."""
    inbox = [[] for _ in range(workers)]
    free_at, finished, waiting = [-idle] * workers, {}, []

    def hand_out(index, now):
        if index < len(production):
            inbox[index % workers].append((index, now))

    for index in range(workers * ahead):
        hand_out(index, -idle)
    now = 0.0
    for wanted in range(len(production)):
        while wanted not in finished:
            for worker, box in enumerate(inbox):
                while box:
                    index, handed = box.pop(0)
                    free_at[worker] = max(free_at[worker], handed) + production[index]
                    heapq.heappush(waiting, (free_at[worker], index))
            while waiting:
                at, index = heapq.heappop(waiting)
                finished[index] = at
        now = max(now, finished[wanted])
        hand_out(wanted + workers * ahead, now)
        now += rest[wanted]
    return now


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(1, 4), ahead=st.integers(1, 3), idle=st.floats(0, 3), seed=st.integers(0, 999),
    length=st.integers(1, 40),
)  # fmt: skip
def test_play_is_what_events_give(workers, ahead, idle, seed, length):
    random = np.random.default_rng(seed)
    production, rest = random.lognormal(-2, 0.8, length), random.lognormal(-2.5, 0.5, length)
    played = play(
        production[None], rest[None], workers=workers, ahead=ahead, steps=length, idle=np.array([idle])
    )  # fmt: skip
    assert played[0] == pytest.approx(by_events(production, rest, workers, ahead, idle))


def test_a_long_epoch_goes_on_at_its_pace():
    rest = np.full((1, 320), 0.02)
    long = play(np.full((1, 1), 0.1), rest, workers=2, ahead=2, steps=10_000, idle=np.array([9.0]))
    assert long[0] == pytest.approx(10_000 * 0.05, rel=0.002)


@pytest.mark.parametrize("waiting", [0.0, 0.01, 0.05])
@pytest.mark.parametrize("parts", [None, 0.05, 0.1])
def test_a_fitted_loader_plays_what_was_measured(waiting, parts):
    rest = np.full((3, 200), 0.04)
    step = np.full(3, 0.04 + waiting)
    idle = np.full(3, 2.0)
    loader = fit(
        rest, step, None if parts is None else np.full(3, parts), workers=2, ahead=2, steps=200, idle=idle
    )  # fmt: skip
    if parts is None and waiting < 0.1 * step[0]:
        assert loader is None
        return
    again = play(loader.production * loader.uneven, rest, workers=2, ahead=2, steps=200, idle=idle)
    assert again / 200 + loader.left_s == pytest.approx(step)
    assert loader.bound == (parts == 0.1 or parts is None)
