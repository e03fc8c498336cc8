"""Broken datasets: every defect is found, named with file and line, and nothing vanishes."""

import csv
import io
import json
import struct
import warnings
import zlib

import pytest
from scenes import clips, picture, write_yolo

from kfp_gate.data.splitting import split_dataset
from kfp_gate.errors import InvalidInput

GOOD = "0 0.5 0.5 0.25 0.25\n"


def hostile_yolo(root):
    """40 good images, and one of each defect that a YOLO dataset can have."""
    write_yolo(root, clips(20, 2))
    images, labels = root / "images", root / "labels"

    def add(name, text, data=None):
        picture(zlib.crc32(name.encode()) % 1000 + 500).save(images / f"{name}.png") if data is None else None
        if data is not None:
            (images / f"{name}.png").write_bytes(data)
        (labels / f"{name}.txt").write_bytes(text if isinstance(text, bytes) else text.encode())

    whole = io.BytesIO()
    picture(999, (200, 200)).save(whole, "PNG")
    add("bad-01-empty", GOOD, b"")
    add("bad-02-cut", GOOD, whole.getvalue()[:-2000])
    add("bad-03-text", GOOD, b"<html>not found</html>")
    add("bad-04-four", "0 0.5 0.5 0.25\n")
    add("bad-05-word", GOOD + "0 0.5 half 0.25 0.25\n")
    add("bad-06-nan", "0 nan 0.5 0.25 0.25\n")
    add("bad-07-polygon", "0 0.1 0.1 0.9 0.1 0.9 0.9 0.1 0.9\n")
    add("bad-08-class", GOOD + "2 0.5 0.5 0.25 0.25\n")
    add("bad-09-negative", "-1 0.5 0.5 0.25 0.25\n")
    add("bad-10-fraction", "0.5 0.5 0.5 0.25 0.25\n")
    add("bad-11-beyond", "0 0.95 0.5 0.25 0.25\n")
    add("bad-12-outside", "0 1.5 0.5 0.25 0.25\n")
    add("bad-13-pixels", "0 320 240 100 100\n")
    add("bad-14-flat", "0 0.5 0.5 0.25 0\n")
    add("bad-15-backwards", "0 0.5 0.5 -0.25 0.25\n")
    add("bad-16-twice", GOOD + "\n" + GOOD)
    add("bad-17-binary", b"\xff\xfe0\x00 \x000\x00")
    (labels / "bad-18-alone.txt").write_text(GOOD)
    picture(777).save(images / "bad-19-shared.png")
    picture(778).save(images / "bad-19-shared.jpg")
    (labels / "bad-19-shared.txt").write_text(GOOD)
    return root


def refused(root, **options):
    with pytest.raises(InvalidInput) as caught:
        split_dataset(str(root), **options)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(str(root), "DATASET").replace(str(root.parent), "FOLDER")


def test_every_yolo_defect_is_listed_at_once(tmp_path, snapshot):
    snapshot("hostile-yolo", refused(hostile_yolo(tmp_path / "set")))


def test_dropping_leaves_out_whole_images_and_lists_each(tmp_path, snapshot):
    root = hostile_yolo(tmp_path / "set")
    result = split_dataset(str(root), rejects="drop", rejects_file=tmp_path / "rejects.csv")
    placed = [row.image for m in result.manifests.values() for row in m.rows()]
    rows = list(csv.DictReader((tmp_path / "rejects.csv").open()))
    dropped = {r["image"] for r in rows if r["action"] == "dropped"}
    on_disk = {p.relative_to(root).as_posix() for p in (root / "images").iterdir()}
    assert len(placed) == len(set(placed)) and set(placed) | dropped == on_disk and not set(placed) & dropped
    assert result.coverage.rejected == len(dropped) == len(on_disk) - 40
    assert [r["image"] for r in rows if r["action"] == "left out"] == [""]
    snapshot("hostile-yolo-rejects", (tmp_path / "rejects.csv").read_text().rstrip("\n"))


def test_fixing_mends_only_what_has_an_exact_cure(tmp_path):
    root = write_yolo(tmp_path / "set", clips(20, 2))
    (root / "labels/clip000__000.txt").write_text("0 0.95 0.5 0.25 0.25\n" + GOOD + GOOD)
    result = split_dataset(str(root), rejects="fix")
    rows = {row.image: row for m in result.manifests.values() for row in m.rows()}
    assert rows["images/clip000__000.png"].boxes.tolist() == [
        [0, 0.5, 0.5, 0.25, 0.25],
        [0, 0.9125, 0.5, pytest.approx(0.175), 0.25],
    ]
    assert [(d.kind, d.line, d.action) for d in result.rejects] == [
        ("out of range", 1, "clipped to the border"),
        ("duplicate box", 3, "kept once"),
    ]
    assert len(rows) == 40
    (root / "labels/clip001__000.txt").write_text("0 1.5 0.5 0.25 0.25\n")  # wholly outside: nothing to keep
    assert "1 x out of range" in refused(root, rejects="fix")
    both = split_dataset(str(root), rejects="fix+drop")
    assert sum(map(len, both.manifests.values())) == 39
    assert {d.action for d in both.rejects} == {"clipped to the border", "kept once", "dropped"}


def test_rounding_of_a_writer_is_no_defect(tmp_path):
    root = write_yolo(tmp_path / "set", clips(20, 2))
    (root / "labels/clip000__000.txt").write_text("0 0.9167 0.5 0.1667 0.25\n")
    assert split_dataset(str(root)).rejects == ()


def test_twenty_of_each_kind_are_listed_and_the_rest_counted(tmp_path, snapshot):
    root = write_yolo(tmp_path / "set", clips(10, 5))
    for path in sorted((root / "labels").iterdir())[:30]:
        path.write_text("0 0.5\n")
    snapshot("many-of-one-kind", refused(root))
    for path in sorted((root / "labels").iterdir())[30:]:
        path.write_text("7 0.5 0.5 0.1 0.1\n")
    text = refused(root)
    assert text.count("has 2 numbers") == 20 and text.count("class 7 with 2 names") == 20
    assert "50 defects of 2 kinds" in text and "30 x not five numbers" in text and text.count("... and 10 more") == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("missing", lambda root: None),
        ("empty-folder", lambda root: root.mkdir()),
        ("no-labels", lambda root: write_yolo(root, dict.fromkeys(clips(4, 1)))),
        ("no-yaml", lambda root: (write_yolo(root, clips(4, 1)) / "data.yaml").unlink()),
        ("no-images", lambda root: write_yolo(root, {})),
        ("no-names", lambda root: write_yolo(root, clips(4, 1), names="nc: 2")),
        ("names-gap", lambda root: write_yolo(root, clips(4, 1), names="names: {0: a, 2: b}")),
        ("names-twice", lambda root: write_yolo(root, clips(4, 1), names="names: [a, b, a]")),
        ("names-empty", lambda root: write_yolo(root, clips(4, 1), names="names: []")),
        ("nc-differs", lambda root: write_yolo(root, clips(4, 1), names="names: [a, b]\nnc: 3")),
        ("yaml-broken", lambda root: write_yolo(root, clips(4, 1), names="names: [a, b")),
        ("splits-nowhere", lambda root: write_yolo(root, clips(4, 1), splits="train: /data/other/train")),
        ("one-group", lambda root: write_yolo(root, clips(1, 4))),
        ("one-image", lambda root: write_yolo(root, clips(1, 1))),
    ],
)  # fmt: skip
def test_unusable_datasets_say_what_was_expected(tmp_path, snapshot, name, make):
    make(tmp_path / "set")
    snapshot(f"unusable-{name}", refused(tmp_path / "set"))


@pytest.mark.parametrize(
    "options",
    [
        {"shares": (0.7, 0.3, 0.0)}, {"shares": (0.7, 0.2, 0.2)}, {"shares": (float("nan"), 0.5, 0.5)},
        {"shares": ("a", 0.1, 0.2)}, {"shares": "0.7"}, {"shares": (True, 0.1, 0.2)},
        {"group_rule": "guess"}, {"format": "tfrecord"}, {"rejects": "ignore"}, {"strategy": "random"},
        {"on_shortfall": "maybe"}, {"tolerance": 0.0},
    ],
)  # fmt: skip
def test_wrong_parameters_are_refused_by_name(tmp_path, options):
    write_yolo(tmp_path / "set", clips(4, 1))
    with pytest.raises(InvalidInput):
        split_dataset(str(tmp_path / "set"), **options)


def hostile_coco(root):
    """14 good images in one json, and one of each defect that COCO can have."""
    (root / "pictures").mkdir(parents=True)
    images = []
    annotations = []
    for i in range(14):
        picture(i).save(root / f"pictures/{i:02}.jpg")
        images.append({"id": str(i), "file_name": f"{i:02}.jpg", "width": 64, "height": 48})
        annotations.append({"id": i, "image_id": i, "category_id": 3, "bbox": [8, 8, 16, 16], "iscrowd": 0})
    images += [
        {"id": 20, "file_name": "gone.jpg", "width": 64, "height": 48},
        {"id": 21, "file_name": "00.jpg", "width": 64, "height": 48},
        {"id": 1, "file_name": "11.jpg", "width": 64, "height": 48},
        {"file_name": "nameless.jpg"},
        {"id": 22, "file_name": "sideways.jpg", "width": 48, "height": 64},
        {"id": 23, "file_name": "sizeless.jpg"},
    ]
    picture(22).save(root / "pictures/sideways.jpg")
    picture(23).save(root / "pictures/sizeless.jpg")
    annotations += [
        {"id": 100, "image_id": 99, "category_id": 3, "bbox": [1, 1, 2, 2]},
        {"id": 101, "image_id": 2, "category_id": 77, "bbox": [1, 1, 2, 2]},
        {"id": 102, "image_id": 3, "category_id": 3, "bbox": [1, 1, 2]},
        {"id": 103, "image_id": 4, "category_id": 3},
        {"id": 104, "image_id": 5, "category_id": 3, "bbox": [1, 1, 0, 2]},
        {"id": 105, "image_id": 6, "category_id": 3, "bbox": [60, 1, 20, 2]},
        {"id": 106, "image_id": 7, "category_id": 3, "bbox": [8, 8, 16, 16]},
        {"id": 107, "image_id": 8, "category_id": 3, "bbox": [1, float("nan"), 2, 2]},
        {"id": 108, "image_id": 23, "category_id": 3, "bbox": [1, 1, 2, 2]},
        "text",
    ]
    content = {"annotations": annotations, "images": images, "categories": [{"id": 3, "name": "cone"}]}
    (root / "labels.json").write_text(json.dumps(content))
    return root


def test_every_coco_defect_is_listed_at_once(tmp_path, snapshot):
    root = hostile_coco(tmp_path / "set")
    snapshot("hostile-coco", refused(root))
    result = split_dataset(str(root), rejects="drop")
    placed = {row.image for m in result.manifests.values() for row in m.rows()}
    listed = {d.image for d in result.rejects if d.action == "dropped"}
    on_disk = {p.relative_to(root).as_posix() for p in (root / "pictures").iterdir()}
    assert placed.isdisjoint(listed) and placed | (listed & on_disk) == on_disk


def hostile_voc(root):
    (root / "Annotations").mkdir(parents=True)
    (root / "JPEGImages").mkdir()
    (root / "classes.txt").write_text("cone\n")
    box = (
        "<object>\n<name>{}</name><bndbox><xmin>{}</xmin><ymin>9</ymin><xmax>{}</xmax><ymax>24</ymax></bndbox></object>"
    )
    size = "<size><width>64</width><height>48</height></size>"
    texts = {f"good{i}": size + box.format("cone", 9, 24) for i in range(8)}
    texts |= {
        "bad1": size + "<object>",
        "bad2": size + box.format("dog", 9, 24),
        "bad3": size + box.format("cone", "left", 24),
        "bad4": size + box.format("cone", 24, 9),
        "bad5": box.format("cone", 9, 24),
        "bad6": size + box.format("cone", 9, 90),
        "alone": size + box.format("cone", 9, 24),
    }
    for i, (name, text) in enumerate(texts.items()):
        (root / f"Annotations/{name}.xml").write_text(f"<annotation>\n{text}</annotation>")
        if name != "alone":
            picture(i).save(root / f"JPEGImages/{name}.jpg")
    return root


def test_every_voc_defect_is_listed_at_once(tmp_path, snapshot):
    root = hostile_voc(tmp_path / "set")
    snapshot("hostile-voc", refused(root))
    result = split_dataset(str(root), rejects="drop")
    assert sum(map(len, result.manifests.values())) == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"images": [',
        '{"images": [{"id": 1}',
        '{"images": [1 2]}',
        '{"a": 1, "b": [] "x"}',
        '{"images": [\x00]}',
    ],
)
def test_broken_json_names_the_place(tmp_path, text):
    root = tmp_path / "set"
    root.mkdir()
    picture(1).save(root / "1.jpg")
    (root / "labels.json").write_text(text)
    with pytest.raises(InvalidInput) as caught:
        split_dataset(str(root / "labels.json"))
    assert "not JSON at character" in str(caught.value) and "labels.json" in caught.value.where


def test_a_bomb_is_refused_by_its_header_and_without_a_warning(tmp_path):
    root = write_yolo(tmp_path / "set", clips(20, 1))
    image = root / "images/clip000__000.png"
    header = b"IHDR" + struct.pack(">2I5B", 40_000, 40_000, 8, 2, 0, 0, 0)
    data = image.read_bytes()
    image.write_bytes(data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "Image size (1600000000 pixels) exceeds limit" in refused(root)
