"""Whatever a timeline says, times are judged or left out: nothing but `InvalidInput` leaves."""

from math import isfinite

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kfp_gate.diagnosis.comparing.comparable import differences
from kfp_gate.diagnosis.comparing.compare import compare
from kfp_gate.diagnosis.pacing.counterfactual import estimate, phase_shares
from kfp_gate.diagnosis.pages.text import comparison_text
from kfp_gate.diagnosis.reading.runs import Run

ODD = ["", "data", "1", "\ud800"]
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 10**20), st.floats(allow_nan=True), st.sampled_from(ODD)
)  # fmt: skip
ANY = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
    max_leaves=8,
)
NUMBER = st.one_of(st.floats(0, 10), SCALARS)


def mapping(names: str, values):
    return st.one_of(st.dictionaries(st.sampled_from(names.split()), values), ANY)


def line(kind: str, required=None, **optional):
    return st.fixed_dictionaries({"kind": st.sampled_from(kind.split()), **(required or {})}, optional=optional)


TIMES = mapping("data forward backward optimizer odd", NUMBER)
PARTS = mapping("read transform:A other", st.one_of(st.lists(NUMBER), ANY))
LOADER = st.one_of(st.fixed_dictionaries({"batches": NUMBER, "parts": PARTS}), ANY)
PAIRS = st.one_of(st.lists(st.lists(NUMBER, max_size=3), max_size=4), ANY)
WINDOW = line(
    "window", {"seconds": TIMES}, steps=NUMBER, batches=st.one_of(st.lists(NUMBER, max_size=3), ANY), device=TIMES,
    loader=LOADER, each=PAIRS, warmup=SCALARS, images=NUMBER,
)  # fmt: skip
GOOD = st.fixed_dictionaries({
    "kind": st.just("window"), "steps": st.integers(1, 9), "images": st.integers(1, 9), "loader": LOADER, "each": PAIRS,
    "seconds": st.fixed_dictionaries({"data": st.floats(0, 9), "forward": st.floats(0, 9)}), "device": TIMES,
})  # fmt: skip
EPOCH = line("phases", {"seconds": TIMES, "steps": NUMBER}, device=TIMES)
NAMED = "workers prefetch steps_per_epoch cpus cpu_quota device settings manifests monitors seed"
CONDITIONS = line("conditions", None, **{k: st.one_of(NUMBER, ANY) for k in NAMED.split()})
SAMPLE = line("sample", {"phase": st.just("train"), "cpu": NUMBER, "loaders": ANY}, pressure_cpu=NUMBER)
VALUES = line("epoch", {"epoch": NUMBER, "values": ANY, "losses": ANY})
OTHERS = line(
    "start checkpoint validation memory profile end ?", None, waited_s=NUMBER, device_busy_s=NUMBER, steps=NUMBER,
    rss=NUMBER, versions=ANY, parts=PARTS, seconds=NUMBER,
)  # fmt: skip
LINES = st.lists(st.one_of(GOOD, WINDOW, EPOCH, CONDITIONS, SAMPLE, VALUES, OTHERS), max_size=12)
RECORD = st.dictionaries(st.sampled_from(["settings", "manifests", "ranks", "device", "classes"]), ANY)
RUNS = st.builds(Run, st.just("here"), st.dictionaries(st.integers(0, 2), LINES, max_size=3), RECORD)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(RUNS)
def test_any_lines_are_judged(run):
    found = estimate(run)
    assert (found.epoch_s is None) <= bool(found.unknown)
    for one in found.scenarios:
        assert isfinite(one.seconds)
        assert one.low <= one.seconds <= one.high
    assert all(p.low <= p.seconds <= p.high for p in phase_shares(run))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(RUNS, RUNS)
def test_any_two_runs_are_compared_once_their_differences_are_acknowledged(before, after):
    assert comparison_text(compare(before, after, [d.name for d in differences(before, after)]))
