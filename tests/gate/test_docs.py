"""The worked example of docs/gate.md is what the gate says."""

import re
from pathlib import Path

import pytest
from simulated import worked_example

from kfp_gate.gate.judging import judge_evaluation
from kfp_gate.gate.settings import gate_settings
from kfp_gate.gate.suggesting import suggest
from kfp_gate.gate.summary import markdown
from kfp_gate.gate.verdict import Separation
from kfp_gate.gate.wording import warnings

TEXT = (Path(__file__).parents[2] / "docs" / "gate.md").read_text(encoding="utf-8")
EACH = {"cone": {"map50": 0.85}, "sign": {"map50": 0.8}, "cable": {"map50": 0.8}}
ASKED = {
    "default": {"min_map50": 0.5},
    "point": {"class_thresholds": EACH},
    "confident": {"class_thresholds": EACH, "decide": "confident"},
}


@pytest.mark.parametrize("name", ASKED)
def test_tables_of_the_example(name):
    judged = judge_evaluation(worked_example(), gate_settings(**ASKED[name]), separation=Separation("proven", 1))
    shown = re.search(rf"<!-- example: {name} -->\n((?:\|.*\n)+)", TEXT).group(1)
    told = "\n".join(line for line in markdown(judged.verdict).splitlines() if line.startswith("|"))
    assert shown.strip() == told
    if name == "default":
        assert all(f"> {text}" in TEXT for text in warnings(judged.verdict))


def test_suggestions_of_the_example():
    found = suggest(worked_example()).class_thresholds
    assert {c: m["map50"]["min"] for c, m in found.items()} == {"cone": 0.9, "sign": 0.82, "cable": 0.5}
    assert {c: m["recall"]["min"] for c, m in found.items()} == {"cone": 0.9, "sign": 0.82, "cable": 0.5}
