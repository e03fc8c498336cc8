"""Whatever a timeline says, there is a page, and no word or shape on it is a number that is none."""

import re
from datetime import UTC, datetime, timedelta

from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.pages import report
from kfp_gate.diagnosis.pages.text import text
from kfp_gate.diagnosis.reading.lines import clean
from kfp_gate.diagnosis.reading.runs import Run

from .recorded import diagnosed
from .test_report import words

START = datetime(2026, 1, 1, tzinfo=UTC)
KINDS = (
    *("start", "window", "sample", "phases", "memory", "validation", "checkpoint", "recover", "stop", "failure", "end"),
    *("growth", "profile", "probe", "conditions", "gpu", "resume", "sanity", "epoch", "something new"),
)

numbers = st.one_of(st.none(), st.floats(0, 1e12), st.integers(0, 10**15), st.sampled_from([0, 1, 0.5, 1e-9]))
times = st.one_of(
    st.integers(0, 10**6).map(lambda s: (START + timedelta(seconds=s)).isoformat()),
    st.sampled_from(["", "yesterday", "9999-12-31T23:59:59+14:00", "0001-01-01T00:00:00-14:00"]),
)
phases = st.dictionaries(st.sampled_from(["data", "forward", "backward", "validation", "checkpoint", "<b>"]), numbers)
loader = st.fixed_dictionaries(
    {"batches": numbers, "parts": st.dictionaries(st.text(max_size=5), st.lists(numbers, min_size=1, max_size=3))}
)
readings = dict.fromkeys(
    ("steps", "images", "gpu_util", "cpu", "rss", "throttled_s", "cgroup", "limit", "gpu_memory_used", "workers"),
    numbers,
)
lines = st.fixed_dictionaries(
    {"kind": st.sampled_from(KINDS)},
    optional={
        **readings,
        "time": times,
        "epoch": st.integers(0, 5),
        "seconds": st.one_of(numbers, phases),
        "device": st.one_of(st.none(), phases),
        "warmup": st.booleans(),
        "input": st.sampled_from(["usual", "prepared", "else"]),
        "gpu_throttle": st.one_of(st.none(), st.lists(st.text(max_size=8), max_size=2)),
        "loaders": st.one_of(st.none(), st.fixed_dictionaries({"count": numbers, "cpu": numbers, "read": numbers})),
        "loader": st.one_of(st.none(), loader),
        "message": st.text(max_size=20),
        "ops": st.just([{"name": "conv", "calls": None, "cpu_s": 1.0, "device_s": None}]),
        "functions": st.just([{"function": "f", "part": None, "calls": 1.0, "own_s": 0.5}]),
    },
)


@given(ranks=st.dictionaries(st.integers(0, 3), st.lists(lines, max_size=30), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_there_is_always_a_page(ranks):
    run = Run("odd", {r: [clean(line) for line in own] for r, own in sorted(ranks.items())})
    judged = diagnose(run)
    assert text(judged).strip()
    for found in (diagnosed(run), judged):
        page = report.html(found, run)
        assert not re.search(r'(?:\bd|style)="[^"]*(?:nan|inf|None)', page)
        assert not re.search(r"\b(?:nan|None)\b", words(page))
