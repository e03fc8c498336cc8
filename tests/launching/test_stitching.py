"""Log stitching as a property: whatever is cut and replayed, every line comes once and in order."""

from datetime import UTC, datetime

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kfp_gate.launching.logs import Stitcher

BASE = 1_796_000_000
SECOND = 1_000_000_000


def stamp(at: int, zone: str = "Z") -> bytes:
    shift = 9 * 3600 if zone == "+09:00" else 0
    whole = datetime.fromtimestamp(BASE + at // SECOND + shift, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    fraction = f"{at % SECOND:09d}".rstrip("0")
    return (f"{whole}.{fraction}" if fraction else whole).encode() + zone.encode()


def since_second(text: str) -> int:
    return (int(datetime.fromisoformat(text).timestamp()) - BASE) * SECOND


# Steps between lines: many equal stamps, many in one second, sometimes several seconds.
STEPS = st.lists(st.sampled_from([0, 0, 1, 999, 100_000_000, 500_000_000, SECOND, 3 * SECOND]), min_size=1, max_size=60)


@settings(max_examples=300, deadline=None)
@given(steps=STEPS, cuts=st.lists(st.integers(0, 70), max_size=12), zone=st.sampled_from(["Z", "+09:00"]))
@example(steps=[0] * 20, cuts=[5, 5, 6, 19], zone="Z")
def test_every_line_once_and_in_order(steps, cuts, zone):
    times, at = [], 250_000_000
    for step in steps:
        at += step
        times.append(at)
    lines = [stamp(at, zone) + b" line %d" % number for number, at in enumerate(times)]
    got: list[bytes] = []
    stitcher = Stitcher()
    for length in [*cuts, len(lines)]:
        stitcher.begin()
        since = since_second(stitcher.since) if stitcher.since else 0
        served = [line for line, at in zip(lines, times, strict=True) if at >= since]
        # A connection that replays without end makes no progress; the last one is whole.
        stitcher.take(served[:length], got.append)
    stitcher.begin()
    since = since_second(stitcher.since)
    stitcher.take([line for line, at in zip(lines, times, strict=True) if at >= since], got.append)
    assert got == [b"line %d" % number for number in range(len(lines))]
    assert stitcher.gaps == 0
    assert stitcher.complete(lines[-20:])


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, missing=st.integers(1, 20))
def test_the_log_is_not_complete_before_its_last_line(steps, missing):
    times, at = [], 0
    for step in steps:
        at += step
        times.append(at)
    lines = [stamp(at) + b" line %d" % number for number, at in enumerate(times)]
    stitcher = Stitcher()
    stitcher.begin()
    stitcher.take(lines[: max(0, len(lines) - missing)], lambda _line: None)
    assert not stitcher.complete(lines[-20:])


def test_a_rest_without_a_stamp_at_the_head_of_a_replay_was_emitted_before():
    got: list[bytes] = []
    stitcher = Stitcher()
    stitcher.begin()
    stitcher.take([stamp(0) + b" " + b"x" * 5 + b"y" * 5, stamp(2 * SECOND) + b" next"], got.append)
    stitcher.begin()
    stitcher.take([b"yyyyy", stamp(2 * SECOND) + b" next", stamp(3 * SECOND) + b" new", b"server text"], got.append)
    assert got == [b"xxxxxyyyyy", b"next", b"new", b"server text"]


def test_a_clock_that_steps_back_within_a_connection_loses_nothing():
    got: list[bytes] = []
    stitcher = Stitcher()
    stitcher.begin()
    stitcher.take([stamp(9 * SECOND) + b" a", stamp(3 * SECOND) + b" b", stamp(4 * SECOND) + b" c"], got.append)
    assert got == [b"a", b"b", b"c"]


def test_a_rotated_file_is_noticed():
    stitcher = Stitcher()
    stitcher.begin()
    stitcher.take([stamp(0) + b" a", stamp(1) + b" b"], lambda _line: None)
    stitcher.begin()
    stitcher.take([stamp(2) + b" z"], lambda _line: None)
    assert stitcher.gaps == 1


def test_text_that_looks_almost_like_a_stamp_is_text():
    got: list[bytes] = []
    stitcher = Stitcher()
    stitcher.begin()
    stitcher.take([stamp(0) + b" 2026-11-30 10:00:00 INFO", stamp(1) + b" ", stamp(2) + b"  two spaces"], got.append)
    assert got == [b"2026-11-30 10:00:00 INFO", b"", b" two spaces"]
