"""The same dataset in YOLO, COCO and VOC, plain and packed, gives the same boxes."""

import gzip
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from scenes import clips, picture, write_yolo

from kfp_gate.data.label_processes import parse_files
from kfp_gate.data.label_text import parse_labels
from kfp_gate.data.progress import Meter
from kfp_gate.data.splitting import split_dataset
from kfp_gate.errors import InvalidInput

WIDTH, HEIGHT = 64, 48
NAMES = ("cone", "post")


def rows_of(result):
    return {
        row.image.rpartition("/")[2]: (row.boxes.round(12).tolist(), row.crowd.tolist(), row.sha256)
        for m in result.manifests.values()
        for row in m.rows()
    }


def yolo(root):
    return write_yolo(root, clips(8, 3))


def coco_json(folder=""):
    images, annotations = [], []
    for i, (image, boxes) in enumerate(clips(8, 3).items()):
        images.append({"id": i, "file_name": folder + image.rpartition("/")[2], "width": WIDTH, "height": HEIGHT})
        for c, cx, cy, w, h in boxes:
            box = [(cx - w / 2) * WIDTH, (cy - h / 2) * HEIGHT, w * WIDTH, h * HEIGHT]
            annotations.append({"id": len(annotations), "image_id": i, "category_id": 10 * (c + 1), "bbox": box})
    categories = [{"id": 20, "name": "post"}, {"id": 10, "name": "cone"}]
    return {"info": {"year": 2024}, "images": images, "categories": categories, "annotations": annotations}


def pictures(root, folder):
    (root / folder).mkdir(parents=True)
    for seed, image in enumerate(clips(8, 3)):
        picture(seed).save(root / folder / image.rpartition("/")[2])
    return root


def voc_xml(boxes):
    objects = "".join(
        f"<object><name>{NAMES[c]}</name><part><name>tip</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax>"
        f"<ymax>2</ymax></bndbox></part><difficult>0</difficult><bndbox><xmin>{(cx - w / 2) * WIDTH + 1}</xmin>"
        f"<ymin>{(cy - h / 2) * HEIGHT + 1}</ymin><xmax>{(cx + w / 2) * WIDTH}</xmax>"
        f"<ymax>{(cy + h / 2) * HEIGHT}</ymax></bndbox></object>"
        for c, cx, cy, w, h in boxes
    )
    return f"<annotation><size><width>{WIDTH}</width><height>{HEIGHT}</height></size>{objects}</annotation>"


def voc(root):
    pictures(root, "JPEGImages")
    (root / "Annotations").mkdir()
    for image, boxes in clips(8, 3).items():
        (root / "Annotations" / f"{Path(image).stem}.xml").write_text(voc_xml(boxes))
    return root


def test_three_formats_state_the_same_boxes(tmp_path):
    expected = rows_of(split_dataset(str(yolo(tmp_path / "yolo"))))
    root = pictures(tmp_path / "coco", "data/deep")
    (root / "labels.json").write_text(json.dumps(coco_json()))
    coco, other = split_dataset(str(root)), split_dataset(str(voc(tmp_path / "voc")))
    assert coco.coverage.classes == other.coverage.classes == NAMES
    assert rows_of(coco) == rows_of(other) == expected


@pytest.mark.parametrize("pack", ["gz", "zip-in-place", "zip-with-folder"])
def test_packed_annotations_are_read_as_if_unpacked(tmp_path, pack):
    expected = rows_of(split_dataset(str(yolo(tmp_path / "yolo"))))
    root = pictures(tmp_path / "set", "images")
    text = json.dumps(coco_json())
    if pack == "gz":
        with gzip.open(root / "labels.json.gz", "wt") as out:
            out.write(text)
    else:
        with zipfile.ZipFile(root / "annotations.zip", "w", zipfile.ZIP_DEFLATED) as out:
            out.writestr("annotations/labels.json" if pack == "zip-with-folder" else "labels.json", text)
            out.writestr("__MACOSX/._labels.json", "rubbish")
    assert rows_of(split_dataset(str(root))) == expected


def test_zipped_yolo_labels_and_xml_files(tmp_path):
    expected = rows_of(split_dataset(str(yolo(tmp_path / "yolo"))))
    root = yolo(tmp_path / "set")
    with zipfile.ZipFile(root / "labels.zip", "w") as out:
        for label in sorted((root / "labels").iterdir()):
            out.write(label, f"labels/{label.name}")
            label.unlink()
    assert rows_of(split_dataset(str(root))) == expected
    root = voc(tmp_path / "voc")
    with zipfile.ZipFile(root / "Annotations.zip", "w") as out:
        for label in sorted((root / "Annotations").iterdir()):
            out.write(label, label.name)
            label.unlink()
    assert rows_of(split_dataset(str(root))) == expected
    (root / "Annotations.zip").write_bytes((root / "Annotations.zip").read_bytes()[:-100])
    with pytest.raises(InvalidInput, match="not a zip file"):
        split_dataset(str(root))


def test_a_coco_json_in_pieces_with_ids_of_any_kind_and_crowds(tmp_path):
    root = pictures(tmp_path / "set", "images")
    whole = coco_json()
    for half, name in ((0, "instances_train2017"), (1, "instances_val2017")):
        images = [i for i in whole["images"] if i["id"] % 2 == half]
        boxes = [
            {**a, "image_id": str(a["image_id"]), "iscrowd": int(a["category_id"] == 20)}
            for a in whole["annotations"]
            if a["image_id"] % 2 == half
        ]
        part = {"annotations": boxes, "images": images, "categories": whole["categories"]}
        (root / "annotations").mkdir(exist_ok=True)
        (root / f"annotations/{name}.json").write_text(json.dumps(part, indent=half))
    (root / "annotations/captions_val2017.json").write_text(json.dumps({"images": [], "annotations": []}))
    result = split_dataset(str(root))
    assert sum(map(len, result.manifests.values())) == 24
    assert any("captions_val2017.json" in note for note in result.notes)
    crowds = sum(row.crowd.sum() for m in result.manifests.values() for row in m.rows())
    assert crowds == 8 and result.coverage.instances[1].sum() == 0  # a crowd is no instance
    fixed = split_dataset(str(root), group_rule="none", strategy="hash")
    assert fixed.manifests["train"].classes == NAMES


def test_two_folders_with_equal_names_are_told_apart_by_the_json(tmp_path):
    root = tmp_path / "set"
    for split, seeds in (("train", range(0, 12)), ("val", range(50, 56)), ("test", range(80, 86))):
        (root / split).mkdir(parents=True)
        images = []
        for i, seed in enumerate(seeds):
            picture(seed).save(root / split / f"{i}.jpg")
            images.append({"id": i, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT})
        boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [8, 8, 8, 8]} for i in range(len(images))]
        content = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "x"}]}
        (root / split / "_annotations.coco.json").write_text(json.dumps(content))
    result = split_dataset(str(root), strategy="fixed", group_rule="none")
    assert {s: len(m) for s, m in result.manifests.items()} == {"train": 12, "val": 6, "test": 6}


def test_difficult_objects_of_voc_are_not_judged(tmp_path):
    root = voc(tmp_path / "voc")
    file = root / "Annotations/clip000__000.xml"
    file.write_text(file.read_text().replace("<difficult>0", "<difficult>1", 1))
    result = split_dataset(str(root))
    assert sorted(rows_of(result)["clip000__000.png"][1]) == [False, True]
    assert any("1 objects are marked difficult" in note for note in result.notes)


def test_yolo_lists_of_files_and_of_folders(tmp_path):
    root = write_yolo(tmp_path / "set", clips(6, 2), splits="train: [train.txt, images/none]\nval: ./lists/val.txt")
    names = sorted(p.name for p in (root / "images").iterdir())
    (root / "lists").mkdir()
    (root / "train.txt").write_text("".join(f"./images/{n}\n" for n in names[:8]))
    (root / "lists/val.txt").write_text("".join(f"{root.resolve()}/images/{n}\n" for n in names[8:11]))
    result = split_dataset(str(root))
    assert sum(map(len, result.manifests.values())) == 11
    assert "1 image files are in no split of data.yaml and were not used" in result.notes
    assert "data.yaml names train: 'images/none', where no image is" in result.notes
    (root / "train.txt").write_text("images/gone.png\n")
    with pytest.raises(InvalidInput, match="1 listed images do not exist"):
        split_dataset(str(root))


def test_roboflow_layout_with_paths_that_lead_outside(tmp_path):
    images = {
        f"{s}/images/{s}{i}_jpg.rf.{i:032x}.jpg": [(0, 0.5, 0.5, 0.5, 0.5)]
        for s in ("train", "valid", "test")
        for i in range(4)
    }
    splits = "train: ../train/images\nval: ../valid/images\ntest: ../test/images"
    root = write_yolo(tmp_path / "set", images, splits=splits)
    result = split_dataset(str(root), strategy="fixed")
    assert {s: len(m) for s, m in result.manifests.items()} == {"train": 4, "val": 4, "test": 4}


def test_worker_processes_parse_like_this_one(tmp_path):
    rng = np.random.default_rng(0)
    texts = ["".join(f"{i % 3} {v:.6f} 0.5 0.1 0.2\n" for v in rng.random(i % 7)) for i in range(9000)]
    texts[5000] = "0 0.5\n"
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text)
    names = [f"{i}.txt" if i % 100 else "" for i in range(9000)]
    parts = parse_files(tmp_path, names, Meter("labels", 9000), workers=2)
    expected = parse_labels([texts[i].encode() if i % 100 else b"" for i in range(9000)])
    assert np.concatenate([p.rows for p in parts]).tolist() == expected.rows.tolist()
    assert np.concatenate([p.counts for p in parts]).tolist() == expected.counts.tolist()
    assert [(k * 4096 + i, *rest) for k, p in enumerate(parts) for i, *rest in p.problems] == []  # 5000 % 100 == 0
    with pytest.raises(InvalidInput, match="does not exist"):
        parse_files(tmp_path, [*names[:5000], "gone.txt", *names], Meter("labels", 1), workers=2)
