"""Growth against what only looks like it."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.observing.growth import FEWEST, WARMUP, estimate, theil_sen

MIB = 1 << 20
GIB = 1 << 30


def numbered(values: Sequence[float | None], first: int = 1) -> list[tuple[int, float | None]]:
    return [(first + i, v) for i, v in enumerate(values)]


def noisy(values: np.ndarray, sigma: float, seed: int) -> list[tuple[int, float | None]]:
    return numbered(list(values + np.random.default_rng(seed).normal(0, sigma, len(values))))


# What grows ---------------------------------------------------------------------------------------------------------


@given(
    level=st.integers(0, 64 * GIB), slope=st.integers(16 * MIB, 2 * GIB), epochs=st.integers(FEWEST + WARMUP, 60),
    first=st.integers(1, 500), gaps=st.sets(st.integers(0, 59), max_size=5),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_a_straight_line_is_found_exactly(level: int, slope: int, epochs: int, first: int, gaps: set[int]) -> None:
    values = [None if i in gaps else float(level + slope * i) for i in range(epochs)]
    known = [i for i, v in enumerate(values) if v is not None and i >= WARMUP]
    found = estimate(numbered(values, first))
    if len(known) < FEWEST or slope * (known[-1] - known[0]) < 0.03 * (level + slope * epochs):
        return
    assert found is not None
    assert found.slope == pytest.approx(slope) and found.low == pytest.approx(slope) == found.high
    assert found.since == first + known[0] and found.last == first + known[-1]
    assert found.level == pytest.approx(level + slope * known[-1])
    limit = level + slope * 100
    reached = found.reaches(limit)
    assert reached in (first + 100, first + 101)  # the line may be off by a rounding


@pytest.mark.parametrize(("epochs", "slope", "sigma"), [(8, 20, 4), (12, 20, 6), (30, 20, 20), (30, 200, 60)])
def test_a_noisy_line_with_its_interval(epochs: int, slope: int, sigma: int) -> None:
    line = 2 * GIB + slope * MIB * np.arange(epochs)
    found = [g for seed in range(12) if (g := estimate(noisy(line, sigma * MIB, seed))) is not None]
    assert len(found) >= 11
    for growth in found:
        assert 0 < growth.low <= growth.slope <= growth.high
        assert growth.slope / (slope * MIB) == pytest.approx(1, abs=0.6)


def test_the_interval_holds_the_truth_nine_times_in_ten() -> None:
    x, held = np.arange(2.0, 14.0), 0
    for seed in range(400):
        _, low, high = theil_sen(x, 5 * x + np.random.default_rng(seed).normal(0, 10, len(x)))
        held += low <= 5 <= high
    # Sen's interval is exact but for its discreteness; 400 draws have a standard deviation of 1.5%.
    assert 0.85 <= held / 400 <= 0.97


@pytest.mark.parametrize("begins", [5, 10, 15])
def test_growth_that_begins_late_says_since_when(begins: int) -> None:
    line = 2 * GIB + 200 * MIB * np.maximum(np.arange(22) - begins, 0)
    found = estimate(noisy(line, 5 * MIB, 1))
    assert found is not None and abs(found.since - (begins + 1)) <= 1


def test_one_odd_epoch_in_a_leak_changes_nothing() -> None:
    line = 2 * GIB + 50.0 * MIB * np.arange(20)
    line[8] += 2 * GIB
    found = estimate(numbered(list(line)))
    assert found is not None and found.since == 2 and found.slope == pytest.approx(50 * MIB)


def test_a_leak_below_teeth_of_the_garbage_collector() -> None:
    line = 2 * GIB + 50 * MIB * (np.arange(30) % 7) + 40 * MIB * np.arange(30)
    found = estimate(noisy(line, MIB, 2))
    assert found is not None and found.low <= 42 * MIB and found.high >= 38 * MIB


def test_many_even_steps_are_a_leak_by_instalments() -> None:
    found = estimate(noisy(2 * GIB + 200 * MIB * (np.arange(30) // 3), MIB, 3))
    assert found is not None and found.slope == pytest.approx(200 / 3 * MIB, rel=0.2)


def test_a_jump_and_then_a_leak() -> None:
    line = 2 * GIB + 900 * MIB * (np.arange(16) >= 6) + 60 * MIB * np.maximum(np.arange(16) - 6, 0)
    found = estimate(noisy(line, 2 * MIB, 4))
    assert found is not None and found.slope == pytest.approx(60 * MIB, rel=0.1) and found.since in (7, 8)


# What does not ------------------------------------------------------------------------------------------------------

STEADY: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "constant": lambda n: 0 * n,
    "one jump": lambda n: 300 * (n >= 5),
    "a jump at the end": lambda n: 300 * (n >= n[-1]),
    "two jumps": lambda n: 300 * (n >= 4) + 300 * (n >= 8),
    "buffers of three checkpoints": lambda n: 200 * np.minimum(n // 3, 3),
    "two kept checkpoints": lambda n: 200 * np.minimum(n, 2),
    "teeth": lambda n: 50 * (n % 4),
    "long teeth": lambda n: 40 * (n % 7),
    "growth that stopped": lambda n: 200 * np.minimum(n, len(n) - 4),
    "a warm-up": lambda n: 1000 * (1 - np.exp(-n / 2)),
    "a fall": lambda n: -50 * n,
    "a hill": lambda n: 100 * np.minimum(n, len(n) - n),
    "one odd epoch": lambda n: 2000 * (n == 6),
    "odd last epoch": lambda n: 500 * (n == n[-1]),
    "creep of an allocator": lambda n: 0.4 * n,
}


@pytest.mark.parametrize("name", STEADY)
@pytest.mark.parametrize("epochs", [12, 16, 29])
@pytest.mark.parametrize("sigma", [0, 1, 5])
def test_this_is_no_growth(name: str, epochs: int, sigma: int) -> None:
    values = 2 * GIB + MIB * STEADY[name](np.arange(epochs)).astype(float)
    assert estimate(noisy(values, sigma * MIB, 7)) is None


@pytest.mark.parametrize("sigma", [2, 20, 100])
def test_noise_is_no_growth_in_whatever_epoch_one_looks(sigma: int) -> None:
    alarms = 0
    for seed in range(30):
        readings = noisy(np.full(40, 2.0 * GIB), sigma * MIB, seed)
        alarms += any(estimate(readings[:n]) for n in range(5, 41))
    assert alarms <= 2


@given(st.lists(st.floats(0, 1e12), max_size=40).map(lambda v: sorted(v, reverse=True)))
@settings(max_examples=80, deadline=None)
def test_what_never_rises_never_grows(values: list[float]) -> None:
    assert estimate(numbered(values)) is None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1e12), st.just(math.nan), st.just(math.inf)), max_size=40))
@settings(max_examples=120, deadline=None)
def test_whatever_is_read_a_growth_is_one(values: list[float | None]) -> None:
    found = estimate(numbered(values))
    if found is None:
        return
    assert 0 < found.low <= found.slope <= found.high
    assert found.readings >= FEWEST and WARMUP + 1 <= found.since < found.last <= len(values)
    assert found.last < found.reaches(found.level + 1) <= found.reaches(found.level + 10 * found.slope + 1)


@pytest.mark.parametrize("values", [[], [1e9], [1e9, 2e9, 3e9, 4e9], [None] * 20, [None, 1e9, 2e9, 3e9, None, None]])
def test_too_few_readings_are_no_growth(values: list[float | None]) -> None:
    assert estimate(numbered(values)) is None


def test_of_an_epoch_that_was_done_again_the_later_reading_counts() -> None:
    line = [(e, float(e * 100 * MIB)) for e in range(1, 9)]
    again = [*line[:5], (4, 4 * 100.0 * MIB), (5, 1e15), (5, 5 * 100.0 * MIB), *line[5:]]
    assert estimate(again) == estimate(line) is not None


def test_a_run_of_a_thousand_epochs() -> None:
    found = estimate(noisy(2 * GIB + 10 * MIB * np.arange(1000), 5 * MIB, 5))
    assert found is not None and found.since <= 20 and found.slope == pytest.approx(10 * MIB, rel=0.02)
