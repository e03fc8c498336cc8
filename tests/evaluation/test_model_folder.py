"""The model artifact says what its weights are, and is not believed where they are others."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.model_folder import (
    CARD,
    FINGERPRINTS,
    ModelCard,
    adopt_weights,
    read_card,
    read_fingerprints,
    write_model_folder,
)

CARD_VALUES = ModelCard(
    "", ("원뿔 (소형)", "50%"), 640, settings={"epochs": 3, "nested": {"a": [1, 2]}}, monitors=("map50", "recall"),
    chosen_by="map50", manifests={"train": "t", "val": "v"}, versions={"torch": "2"}, run_id="r",
    other_weights={"recall": "s3://b/recall.pt"},
)  # fmt: skip


def rows(*shas):
    return pa.table({"sha256": shas, "phash": pa.array(range(len(shas)), pa.uint64()), "group": ["g"] * len(shas)})


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "best.pt").write_bytes(b"weights")
    write_model_folder(tmp_path / "model", tmp_path / "best.pt", CARD_VALUES, [rows("a", "b"), rows("a")])
    return tmp_path / "model"


def test_what_is_written_is_read(folder):
    card = read_card(folder)
    assert card.weights == "model.pt"
    assert len(card.sha256) == 64
    for name in ("classes", "image_size", "settings", "monitors", "chosen_by", "manifests", "run_id", "other_weights"):
        assert getattr(card, name) == getattr(CARD_VALUES, name)
    # Each image once, whatever the number of splits that it was seen in.
    assert sorted(read_fingerprints(folder)["sha256"].to_pylist()) == ["a", "b"]


def test_changed_weights_are_not_the_model(folder):
    (folder / "model.pt").write_bytes(b"Weights")
    with pytest.raises(Broken, match="as the card says"):
        read_card(folder)
    assert read_card(folder, verify=False).image_size == 640


def test_unknown_keys_are_tolerated(folder):
    values = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps({**values, "of_the_future": 1}))
    assert read_card(folder).chosen_by == "map50"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"sha256": "x"}', "null"])
def test_what_is_no_card_is_refused(folder, text):
    (folder / CARD).write_text(text)
    with pytest.raises(InvalidInput):
        read_card(folder)


def test_a_card_cannot_point_out_of_its_folder(folder):
    values = json.loads((folder / CARD).read_text())
    for name in ("../model.pt", "/etc/passwd", "missing.pt", "."):
        (folder / CARD).write_text(json.dumps({**values, "weights": name}))
        with pytest.raises(InvalidInput, match="not in the folder"):
            read_card(folder)


def test_a_damaged_proof_is_not_no_proof(folder):
    (folder / FINGERPRINTS).write_bytes(b"PAR1 cut")
    with pytest.raises(InvalidInput, match="unreadable fingerprints"):
        read_fingerprints(folder)
    (folder / FINGERPRINTS).unlink()
    assert read_fingerprints(folder) is None


def test_weights_from_elsewhere_become_a_folder_without_proof(tmp_path):
    (tmp_path / "net.onnx").write_bytes(b"onnx")
    card = adopt_weights(tmp_path / "net.onnx", tmp_path / "model", classes=("a",), image_size=320)
    assert card.weights == "model.onnx"
    assert read_card(tmp_path / "model") == card
    assert read_fingerprints(tmp_path / "model") is None


@pytest.mark.parametrize(
    "values",
    [
        {"image_size": "640"}, {"image_size": True}, {"classes": "ab"}, {"classes": [1]}, {"weights": 5},
        {"sha256": None}, {"settings": []}, {"monitors": "map50"}, {"versions": None},
    ],
)  # fmt: skip
def test_a_card_with_values_of_other_types_is_no_card(folder, values):
    facts = json.loads((folder / CARD).read_text())
    (folder / CARD).write_text(json.dumps(facts | values))
    with pytest.raises(InvalidInput, match="no readable model card"):
        read_card(folder)
    (folder / CARD).write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="no readable model card"):
        read_card(folder)


@pytest.mark.parametrize(
    "table",
    [
        {"sha256": ["a"], "phash": ["b"], "group": ["g"]},
        {"sha256": ["a", None], "phash": [1, 2], "group": ["g", "g"]},
        {"sha256": ["a", "b"], "phash": [1, None], "group": ["g", "g"]},
    ],
)
def test_fingerprints_that_could_match_nothing_are_no_proof(folder, table):
    pq.write_table(pa.table(table), folder / FINGERPRINTS)
    with pytest.raises(InvalidInput, match="unreadable fingerprints"):
        read_fingerprints(folder)
