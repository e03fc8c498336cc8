"""The timer of nested parts: each moment counts once, in the innermost part, by thread."""

import threading
import time

import pytest

from kfp_gate.observing.parts import Parts, PartTime, add


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        sum(range(100))


def test_inner_parts_are_not_counted_twice() -> None:
    parts = Parts()
    started = time.perf_counter()
    with parts.during("outer"):
        spin(0.01)
        with parts.during("inner"):
            time.sleep(0.03)
            with parts.during("outer"):
                spin(0.01)
        spin(0.01)
    passed = time.perf_counter() - started
    found = parts.take()
    assert set(found) == {"outer", "inner"} and found["outer"].calls == 2 and found["inner"].calls == 1
    # Not more than there was, and not less than what was slept and spun.
    assert 0.06 <= sum(p.wall_s for p in found.values()) <= passed
    assert found["inner"].wall_s >= 0.03 > 0.015 > found["inner"].cpu_s
    assert found["outer"].cpu_s >= 0.03
    assert parts.take() == {}


def test_a_part_that_raises_is_left() -> None:
    parts = Parts()
    with pytest.raises(ValueError), parts.during("a"), parts.during("b"):
        raise ValueError
    with parts.during("c"):
        time.sleep(0.01)
    found = parts.take()
    assert found["c"].wall_s >= 0.01 > found["a"].wall_s and found["a"].calls == found["b"].calls == 1


def test_threads_have_parts_of_their_own_and_are_added_up() -> None:
    parts = Parts()

    def work() -> None:
        for _ in range(3):
            with parts.during("load"):
                time.sleep(0.005)

    with parts.during("main"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = parts.take()
    assert found["load"].calls == 12 and found["load"].threads == 4 and found["load"].wall_s >= 0.06
    assert found["main"].threads == 1 and found["main"].wall_s >= 0.015
    assert len(parts._threads) == 1, "threads that ended are forgotten"


def test_sums_grow_by_name() -> None:
    sums = {"a": [1.0, 0.5, 2]}
    add(sums, {"a": PartTime(1.0, 0.25, 3), "b": PartTime(0.5, 0.5, 1)})
    assert sums == {"a": [2.0, 0.75, 5], "b": [0.5, 0.5, 1]}
