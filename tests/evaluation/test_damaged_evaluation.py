"""A stored evaluation that was damaged or edited is an input error: never a traceback, and never some verdict."""

import json
import re

import numpy as np
import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.evaluate import FACTS, RECORDS, Evaluation
from kfp_gate.evaluation.records import match


@pytest.fixture
def folder(tmp_path):
    truth, found = [[0, 0, 10, 10], [20, 20, 40, 40]], [[0, 0, 10, 10], [0, 0, 10, 9], [20, 20, 40, 41]]
    records = match([(i, found, [0.9, 0.5, 0.3], [0, 1, 0], truth, [0, 1]) for i in range(40)], 2, detail=True)
    images = tuple(f"{i}.jpg" for i in range(40))
    slices = {"site": ("a", "b") * 20}
    Evaluation(("a", "b"), "d" * 64, "m" * 64, {}, records, images, slices=slices).save(tmp_path)
    return tmp_path


def refused(folder):
    with pytest.raises(InvalidInput) as caught:
        Evaluation.load(folder)
    return caught.value.found


def test_the_whole_one_is_read(folder):
    assert Evaluation.load(folder).metrics["class/a/recall"] == 1.0


@pytest.mark.parametrize(
    ("column", "rows", "value"),
    [
        ("detection_counts", slice(0, 2), [-3, 9]),
        ("truth_counts", slice(0, 2), [-2, 6]),
        ("classes", 0, 99),
        ("classes", 0, -1),
        ("truth_classes", slice(0, None, 2), 99),
        ("scores", 5, np.nan),
        ("images", 39, 4000),
        ("images", 1, 0),
        ("images", slice(None), range(40, 0, -1)),
    ],
)
def test_columns_that_do_not_fit_together_are_refused(folder, column, rows, value):
    """Objects of a class that does not exist, for instance, would just not count: a better recall."""
    columns = dict(np.load(folder / RECORDS))
    columns[column][rows] = value
    np.savez_compressed(folder / RECORDS, **columns)
    refused(folder)


@pytest.mark.parametrize(
    "facts",
    [
        {"classes": ["a"]}, {"classes": [1, 2]}, {"classes": None}, {"images": ["0.jpg"]}, {"images": list(range(40))},
        {"slices": {"site": ["a"]}}, {"slices": {"site": [1] * 40}}, {"slices": []}, {"settings": 3},
        {"versions": None}, {"schema_version": "1"}, {"schema_version": 99}, {"unknown_classes": [None]},
    ],
)  # fmt: skip
def test_facts_that_do_not_fit_the_records_are_refused(folder, facts):
    (folder / FACTS).write_text(json.dumps(json.loads((folder / FACTS).read_text()) | facts))
    refused(folder)


def test_any_damaged_byte_is_noticed_or_harmless(folder):
    whole, data = Evaluation.load(folder), (folder / RECORDS).read_bytes()
    refusals = 0
    for at in range(0, len(data), 23):
        (folder / RECORDS).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            assert Evaluation.load(folder).metrics == whole.metrics
        except InvalidInput:
            refusals += 1
    assert refusals > len(data) / 23 / 2


def test_a_password_and_endless_json_are_refused(folder):
    data = bytearray((folder / RECORDS).read_bytes())
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        for found in re.finditer(mark, bytes(data)):
            data[found.start() + at] |= 1
    (folder / RECORDS).write_bytes(data)
    assert "password" in refused(folder)
    (folder / FACTS).write_text("[" * 100_000)
    assert "RecursionError" in refused(folder)
