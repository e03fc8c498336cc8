"""A YOLO dataset becomes three manifests, and a manifest a folder that trains."""

from pathlib import Path

import pytest
import yaml
from scenes import clips, write_yolo

from kfp_gate.data import coverage
from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.data.splitting import split_dataset
from kfp_gate.errors import InvalidInput

AERIAL = Path(__file__).resolve().parents[3] / "shared/data/aerial-trees"


def test_split_saves_manifests_that_read_back_equal(tmp_path):
    result = split_dataset(str(write_yolo(tmp_path / "set", clips(20, 4))))
    result.save(tmp_path / "out")
    groups = {}
    for split in ("train", "val", "test"):
        manifest = read_manifest(tmp_path / "out" / f"{split}.parquet")
        assert manifest.digest == result.manifests[split].digest
        assert (manifest.split, manifest.classes, manifest.seed) == (split, ("cone", "post"), 0)
        groups[split] = {row.group for row in manifest.rows()}
    assert sum(len(m) for m in result.manifests.values()) == 80
    assert not groups["train"] & groups["val"] and not groups["test"] & (groups["train"] | groups["val"])
    assert set().union(*groups.values()) == {f"name:clip{i:03}" for i in range(20)}
    first = next(result.manifests["train"].rows())
    assert (first.width, first.height, first.boxes.shape) == (64, 48, (2, 5))


def test_materialized_folder_has_links_labels_and_a_yaml_without_path(tmp_path):
    source = write_yolo(tmp_path / "set", clips(12, 3))
    manifests = split_dataset(str(source)).manifests
    local = materialize(manifests, tmp_path / "local")
    content = yaml.safe_load(local.data_yaml.read_text())
    assert content == {
        "train": "images/train", "val": "images/val", "test": "images/test", "names": {0: "cone", 1: "post"},
    }  # fmt: skip
    for split, manifest in manifests.items():
        assert len(local.images[split]) == len(manifest)
        for row, path in zip(manifest.rows(), local.images[split], strict=True):
            assert path.resolve() == (source / row.image).resolve()
            label = Path(str(path).replace("/images/", "/labels/")).with_suffix(".txt")
            assert [float(v) for v in label.read_text().split()] == row.boxes.ravel().tolist()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("names: [one]", ("one",)),
        ("names: {0: '원뿔 (소형)', 1: '50%'}", ("원뿔 (소형)", "50%")),
        ("names: [no, 1e3, 'a: b', '\"']", ("no", "1e3", "a: b", '"')),
        ("names: [" + ", ".join(f"c{i}" for i in range(80)) + "]", tuple(f"c{i}" for i in range(80))),
    ],
)
def test_class_names_survive_split_and_materialize(tmp_path, names, expected):
    images = {f"images/g{i}__0.png": [(0, 0.5, 0.5, 0.5, 0.5)] for i in range(8)}
    result = split_dataset(str(write_yolo(tmp_path / "set", images, names=names)))
    assert result.coverage.classes == expected
    local = materialize(result.manifests, tmp_path / "local")
    assert list(yaml.safe_load(local.data_yaml.read_text())["names"].values()) == list(expected)
    assert all(name[:8] in coverage.text(result.coverage) for name in expected if len(expected) < 12)


def test_class_without_instance_in_a_split_is_named_and_no_number_is_nan(tmp_path):
    images = clips(20, 2)
    for image in images:
        images[image] = [(0, 0.5, 0.5, 0.25, 0.25)]
    images["images/clip000__000.png"] = [(1, 0.5, 0.5, 0.25, 0.25)]
    result = split_dataset(str(write_yolo(tmp_path / "set", images)))
    assert any("'post' (" in note for note in result.notes)
    assert all(value == value and abs(value) != float("inf") for value in coverage.metrics(result.coverage).values())
    assert ">nan" not in coverage.html(result.coverage).lower()


def test_train_and_val_folders_of_ultralytics_are_pooled(tmp_path):
    images = {
        **clips(6, 2, "images/train"),
        **{k.replace("clip", "tape"): v for k, v in clips(6, 2, "images/val").items()},
    }
    root = write_yolo(tmp_path / "set", images, splits="path: ../datasets/x\ntrain: images/train\nval: images/val")
    result = split_dataset(str(root))
    assert sum(len(m) for m in result.manifests.values()) == 24


def test_fewer_than_three_groups_is_refused_with_the_cure(tmp_path):
    root = write_yolo(tmp_path / "set", clips(2, 5))
    with pytest.raises(InvalidInput, match="2 groups of images by the rule 'auto'"):
        split_dataset(str(root))


@pytest.mark.skipif(not AERIAL.is_dir(), reason="the shared data set is not part of a clone")
def test_four_real_groups_fill_three_splits_and_the_notes_name_the_shares():
    result = split_dataset(str(AERIAL))
    assert {len(m) for m in result.manifests.values()} == {36, 9, 2}
    assert any(
        note.startswith("4 groups cannot give the asked shares 70/15/15; they give train") for note in result.notes
    )
