"""Functions by their own time, in the process that makes the batches, and the part they belong to."""

import cProfile
import json
from multiprocessing import RawValue
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from kfp_gate.observing import loader_profile, loading
from kfp_gate.observing.loader_profile import FunctionTimes


class Points:
    """A transform that loops in Python."""

    def __call__(self, image: Any) -> Any:
        return self.loop(image)

    def loop(self, image: Any) -> Any:
        total = 0
        for i in range(20_000):
            total += shared(i)
        return image


class Flip:
    """A transform that hardly costs anything."""

    def __call__(self, image: Any) -> Any:
        shared(1)
        return image[:, ::-1]


def shared(value: int) -> int:
    return value * 2


class Images:
    """A data set of ten images."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        image = np.full((4, 4), index, np.uint8)
        with loading.PARTS.during("transform:Points"):
            image = Points()(image)
        with loading.PARTS.during("transform:Flip"):
            return Flip()(image).copy()


@pytest.fixture
def flag() -> Any:
    value = RawValue("b", 0)
    loader_profile.follow(value)
    yield value
    loader_profile._state.flag = None


def top(batches: list[Any], count: int = 5) -> tuple[FunctionTimes, list[dict[str, Any]]]:
    times = FunctionTimes()
    names: set[str] = set()
    for batch in batches:
        _, made = loading.unwrap(batch)
        assert made is not None
        names |= set(made.parts)
        if made.profile:
            times.add(made.profile)
    return times, times.top(count, names)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loop_in_a_transform_is_named_wherever_batches_are_made(flag: Any, workers: int) -> None:
    loader = DataLoader(
        loading.TimedItems(Images()), batch_size=2, num_workers=workers, collate_fn=loading.TimedCollate(np.stack),
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip
    flag.value = 1
    times, rows = top(list(loader))
    assert times.batches == 5
    line = Points.loop.__code__.co_firstlineno
    assert rows[0]["function"] == f"test_loader_profile.py:{line}:Points.loop"
    assert rows[0]["part"] == "transform:Points" and rows[0]["calls"] == 10
    helper = next(r for r in rows if r["function"].endswith(":shared"))
    # Both transforms call it: it belongs to the one that spends its time in it.
    assert helper["part"] == "transform:Points" and helper["calls"] == 10 * 20_001
    assert rows[0]["total_s"] >= rows[0]["own_s"] > 0


def test_the_flag_works_on_processes_that_run_already(flag: Any) -> None:
    loader = DataLoader(
        loading.TimedItems(Images()), batch_size=1, num_workers=1, prefetch_factor=1,
        collate_fn=loading.TimedCollate(np.stack), multiprocessing_context="fork",
    )  # fmt: skip
    profiled = []
    for number, batch in enumerate(loader):
        flag.value = int(3 <= number < 6)
        profiled.append(bool(loading.unwrap(batch)[1].profile))  # type: ignore[union-attr]
    assert not any(profiled[:3]) and any(profiled[3:8]) and not profiled[9]


def test_a_profile_holds_no_place_and_no_value(flag: Any) -> None:
    flag.value = 1
    loading.begin()
    Points()(np.zeros((4, 4)))
    object.__repr__(Flip())
    made = loading.take()
    content = json.loads(made.profile)
    assert content["functions"]
    assert "/" not in "".join(f[0] for f in content["functions"])
    assert "0x" not in made.profile


def test_nothing_runs_while_the_flag_is_down(flag: Any) -> None:
    loading.begin()
    Points()(np.zeros((4, 4)))
    assert loading.take().profile == ""


def test_another_profiler_in_this_thread_keeps_its_place(flag: Any) -> None:
    flag.value = 1
    other = cProfile.Profile()
    other.enable()
    try:
        loading.begin()
        shared(1)
        loading.take()
    finally:
        other.disable()
    assert any("shared" in str(entry.code) for entry in other.getstats())


def test_a_batch_that_failed_leaves_no_profiler_running(flag: Any) -> None:
    flag.value = 1
    loading.begin()
    loading.begin()
    made = loading.take()
    assert made.profile and loader_profile._state.running is None
