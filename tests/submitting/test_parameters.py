"""Values are checked against what the compiled pipeline declares, before anything starts."""

from pathlib import Path

import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.submitting.parameters import check, declared

GATE = declared((Path(__file__).parents[2] / "compiled" / "gate.yaml").read_text(encoding="utf-8"))

AS_TEXT = "`kfp run create` would send it as a string, without a word"


def test_text_becomes_the_declared_type() -> None:
    given = {
        "dataset": "123", "epochs": "20", "min_map50": "1", "class_thresholds": '{"원뿔": {"map50": 0.8}}',
        "monitors": '["map50"]', "experiment": "true",
    }  # fmt: skip
    assert check(GATE, given) == {
        "dataset": "123", "epochs": 20, "min_map50": 1.0, "class_thresholds": {"원뿔": {"map50": 0.8}},
        "monitors": ["map50"], "experiment": "true",
    }  # fmt: skip


def test_all_problems_come_at_once_with_close_matches() -> None:
    given = {"image_sise": "3", "epochs": "many", "min_map50": "nan", "class_thresholds": "{cone: 0.8}", "nodes": True}
    with pytest.raises(InvalidInput) as caught:
        check(GATE, given)
    assert [(p.where, p.found) for p in caught.value.problems] == [
        ("image_sise", "the pipeline has no such parameter; did you mean image_size?"),
        ("epochs", "'many' is not a whole number such as 20 (" + AS_TEXT + ")"),
        ("min_map50", "'nan' is not a finite number such as 0.5 (`kfp run create` would send nan, which is no JSON)"),
        (
            "class_thresholds",
            "'{cone: 0.8}' is not JSON such as "
            '{"cone": {"map50": {"min": 0.8}}}; was \'class_thresholds={"cone": 0.8}\''
            " meant, with the single quotes for the shell? (" + AS_TEXT + ")",
        ),
        ("nodes", "True is not a whole number such as 20"),
        ("dataset", "is required"),
    ]


def test_every_default_is_of_its_own_type() -> None:
    defaults = {name: p.default for name, p in GATE.items() if p.default is not None}
    assert set(check(GATE, {"dataset": "d", **defaults})) == {"dataset", *defaults}
