"""Input that is damaged or ambiguous in a way that a reader could take for sound."""

import gzip
import io
import json
import os
import re
import struct
import zipfile
import zlib
from dataclasses import replace

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from scenes import clips, picture, write_yolo

from kfp_gate.data.images import look_at
from kfp_gate.data.manifest import read_manifest, write_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.data.splitting import split_dataset, split_to_folder
from kfp_gate.errors import InvalidInput

LINE = "0 0.5 0.5 0.25 0.25\n"
XMP = (
    '<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">'
    '<rdf:Description xmlns:tiff="http://ns.adobe.com/tiff/1.0/" tiff:Orientation="6"/></rdf:RDF></x:xmpmeta>'
)


def coco(root, *, images=None, annotations=None):
    """Eight images in a folder that the json does not name, each with one box."""
    (root / "images").mkdir(parents=True)
    for i in range(8):
        picture(i).save(root / f"images/{i}.png")
    listed = [{"id": i, "file_name": f"{i}.png", "width": 64, "height": 48} for i in range(8)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [8, 8, 16, 12 + i]} for i in range(8)]
    for found, changes in ((listed, images), (boxes, annotations)):
        for at, values in (changes or {}).items():
            found[at] |= values
    text = json.dumps({"images": listed, "annotations": boxes, "categories": [{"id": 1, "name": "a"}]})
    (root / "all.json").write_text(text)
    return root


def placed(root, **options):
    """Image to boxes of what a split keeps."""
    result = split_dataset(str(root), group_rule="none", **options)
    return {row.image: row.boxes.tolist() for m in result.manifests.values() for row in m.rows()}, result


@pytest.mark.parametrize("width", [None, 0, "64", float("nan"), 10**30])
def test_a_coco_image_without_a_usable_size_leaves_with_its_boxes(tmp_path, width):
    images, result = placed(coco(tmp_path / "set", images={2: {"width": width}}), rejects="drop")
    assert sorted(images) == [f"images/{i}.png" for i in range(8) if i != 2]
    assert [(d.kind, d.image, d.action) for d in result.rejects] == [
        ("incomplete annotation", "images/2.png", "dropped")
    ]
    assert result.coverage.rejected == 1


def test_two_coco_images_of_one_id_both_leave(tmp_path):
    """An annotation with that id may mean either: kept, one image would have the boxes of both."""
    changes = {"images": {3: {"id": 2}}, "annotations": {3: {"image_id": 2}}}
    images, result = placed(coco(tmp_path / "set", **changes), rejects="drop")
    assert sorted(images) == [f"images/{i}.png" for i in range(8) if i not in (2, 3)]
    assert all(len(boxes) == 1 for boxes in images.values())
    assert {(d.image, d.action) for d in result.rejects} == {("images/2.png", "dropped"), ("images/3.png", "dropped")}


@pytest.mark.parametrize("values", [{"bbox": [10**400, 1, 1, 1]}, {"bbox": [1, 1, True, 1]}, {"bbox": [1, 1, "2", 1]}])
def test_coco_numbers_beyond_all_bounds_are_findings(tmp_path, values):
    images, result = placed(coco(tmp_path / "set", annotations={5: values}), rejects="drop")
    assert len(images) == 7 and "images/5.png" not in images
    assert [d.kind for d in result.rejects] == ["incomplete annotation"]


def test_a_coco_annotation_id_of_any_size_only_names_the_annotation(tmp_path):
    images, result = placed(coco(tmp_path / "set", annotations={5: {"id": 10**30}}))
    assert len(images) == 8 and result.rejects == ()


@pytest.mark.parametrize("value", ["[" * 100_000, "9" * 5000])
def test_json_that_python_refuses_is_refused_by_name(tmp_path, value):
    root = coco(tmp_path / "set")
    (root / "all.json").write_text('{"images": [{"id": ' + value)
    with pytest.raises(InvalidInput) as caught:
        split_dataset(str(root))
    assert "not JSON at character 12" in caught.value.found and caught.value.where.endswith("/all.json")


def zipped(root):
    """A YOLO set whose labels lie in a zip; its path and its bytes."""
    write_yolo(root, clips(4, 1))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted((root / "labels").iterdir()):
            archive.writestr(f"labels/{path.name}", LINE * 50)
            path.unlink()
    (root / "labels").rmdir()
    return root / "labels.zip", bytearray(packed.getvalue())


def _in_headers(data, local, central, value):
    """Change a field in every header of a zip, which stands at another place in local and central ones."""
    for mark, at in ((b"PK\x03\x04", local), (b"PK\x01\x02", central)):
        for found in re.finditer(mark, bytes(data)):
            data[found.start() + at] = value


def _flipped(data):
    start = 30 + struct.unpack("<H", data[26:28])[0]
    data[start : start + 4] = b"\xff\xff\xff\xff"


@pytest.mark.parametrize(
    "damage",
    [
        _flipped,
        lambda data: _in_headers(data, 6, 8, 1),  # a password
        lambda data: _in_headers(data, 8, 10, 99),  # a method of the future
        lambda data: data.__delitem__(slice(len(data) // 2, None)),
    ],
)
def test_a_damaged_zip_is_an_input_error_wherever_the_damage_lies(tmp_path, damage):
    path, data = zipped(tmp_path / "set")
    damage(data)
    path.write_bytes(data)
    with pytest.raises(InvalidInput) as caught:
        split_dataset(str(tmp_path / "set"))
    assert caught.value.where.endswith("labels.zip")


@pytest.mark.parametrize("damage", ["none", "flipped", "cut", "no-gzip"])
@pytest.mark.parametrize("format", ["auto", "coco"])
def test_a_damaged_gzip_is_an_input_error_wherever_the_damage_lies(tmp_path, damage, format):
    root = coco(tmp_path / "set")
    data = bytearray(gzip.compress((root / "all.json").read_bytes()))
    (root / "all.json").unlink()
    if damage == "flipped":
        data[20:24] = b"\xff\xff\xff\xff"
    data = {"cut": data[:-20], "no-gzip": b"no gzip at all"}.get(damage, data)
    (root / "all.json.gz").write_bytes(data)
    if damage == "none":
        assert len(placed(root, format=format)[0]) == 8
        return
    with pytest.raises(InvalidInput) as caught:
        split_dataset(str(root), format=format)
    assert "broken archive" in caught.value.found and caught.value.where.endswith("all.json.gz")


def test_a_lone_carriage_return_moves_no_box_to_the_next_image(tmp_path):
    """The row too many of one file and the empty line of the next added up to the number that was expected."""
    root = write_yolo(tmp_path / "set", clips(4, 1))
    first, second, *_ = sorted((root / "labels").iterdir())
    first.write_bytes(b"0 0.5 0.5 0.25 0.25\r0 0.25 0.25 0.25 0.25\n")
    second.write_bytes(b"\n")
    with pytest.raises(InvalidInput, match="1 x not five numbers") as caught:
        split_dataset(str(root))
    assert caught.value.problems[0].where == f"labels/{first.name}:1"
    first.write_bytes(b"\xef\xbb\xbf0 0.5 0.5 0.25 0.25\r\n\r\n0\t0.25 0.25\t0.25 0.25 \r\n")
    images, result = placed(root)
    assert result.rejects == ()
    boxes = {name.rpartition("/")[2].rpartition(".")[0]: found for name, found in images.items()}
    assert boxes[first.stem] == [[0, 0.25, 0.25, 0.25, 0.25], [0, 0.5, 0.5, 0.25, 0.25]] and boxes[second.stem] == []


def test_file_names_in_another_encoding_are_refused_together(tmp_path):
    root = write_yolo(tmp_path / "set", clips(4, 1))
    image, label = sorted((root / "images").iterdir())[0], sorted((root / "labels").iterdir())[0]
    image.rename(image.with_name(os.fsdecode(b"caf\xe9.png")))
    label.rename(label.with_name(os.fsdecode(b"caf\xe9.txt")))
    with pytest.raises(InvalidInput, match="2 file names that are not UTF-8") as caught:
        split_dataset(str(root))
    str(caught.value).encode()  # the message itself can be written


def test_a_stray_file_in_another_encoding_is_nobodys_business(tmp_path):
    root = write_yolo(tmp_path / "set", clips(4, 1))
    (root / "x").write_text("")
    (root / "x").rename(root / os.fsdecode(b"caf\xe9.pdf"))
    assert len(placed(root)[0]) == 4


def _chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _turned(format):
    """A picture of 80 x 40 whose orientation stands where only Pillow looks."""
    image, out = Image.new("RGB", (80, 40), "red"), io.BytesIO()
    if format == "PNG":
        info = PngInfo()
        info.add_itxt("XML:com.adobe.xmp", XMP)
        image.save(out, format, pnginfo=info)
    elif format == "PNG text":
        image.save(out, "PNG")
        exif = Image.Exif()
        exif[0x0112] = 6
        text = b"\nexif\n%8d\n" % len(exif.tobytes()) + exif.tobytes().hex().encode() + b"\n"
        chunk = _chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(text))
        return out.getvalue()[:33] + chunk + out.getvalue()[33:]
    else:
        image.save(out, format, xmp=XMP.encode())
    return out.getvalue()


def _decoded(data):
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)
    return None if image is None else (image.shape[1], image.shape[0])


def _saved(image, format, **options):
    out = io.BytesIO()
    image.save(out, format, **options)
    return out.getvalue()


def _exif(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 5, 6, 8])
def test_an_image_has_the_size_that_the_detector_will_see(format, orientation):
    data = _saved(Image.new("RGB", (80, 40), "red"), format, exif=_exif(orientation))
    seen = look_at(data)
    assert (seen.width, seen.height) == _decoded(data)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "PNG text", "WEBP"])
def test_an_orientation_that_only_pillow_finds_turns_nothing(format):
    data = _turned(format)
    seen = look_at(data)
    assert seen.error == "" and (seen.width, seen.height) == _decoded(data) == (80, 40)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF"])
def test_what_the_split_takes_the_detector_can_read(mode, format):
    grey = np.arange(3200, dtype=np.uint16).reshape(40, 80)
    image = Image.fromarray(grey) if mode == "I;16" else Image.fromarray((grey // 13).astype(np.uint8)).convert(mode)
    try:
        data = _saved(image, format)
    except (OSError, ValueError):
        return  # the format has no such mode
    seen = look_at(data)
    assert seen.error == "" and (seen.width, seen.height) == _decoded(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (_saved(Image.fromarray(np.ones((40, 80), np.float32)), "TIFF"), "32-bit samples"),
        (_saved(Image.fromarray(np.ones((40, 80), np.int32)), "TIFF"), "32-bit samples"),
        (_saved(Image.new("RGB", (80, 40)), "TIFF", compression="zstd"), "compressed with zstd"),
        (_saved(Image.new("RGB", (80, 40)), "TIFF", compression="lzma"), "compressed with lzma"),
        (_saved(Image.new("RGB", (80, 40)), "PNG")[:-12], "before its last chunk"),
        (_saved(Image.new("RGB", (80, 40)), "PCX"), "not an image file"),
        (_saved(Image.new("RGB", (80, 40)), "EPS"), "not an image file"),  # Pillow would start another program
    ],
)
def test_what_only_pillow_can_read_is_refused_by_the_split(data, reason):
    assert _decoded(data) is None and reason in look_at(data).error


@pytest.mark.parametrize(
    "name", ["del \x7f", "nel \x85", "line \u2028 end", "\ufeffbom", "tab\t", "\x01", "'\"%: #", "\U0001f6a7"]
)
def test_any_class_name_survives_the_yaml_that_training_reads(tmp_path, name):
    root = coco(tmp_path / "set")
    text = json.loads((root / "all.json").read_text())
    text["categories"] = [{"id": 1, "name": name}]
    (root / "all.json").write_text(json.dumps(text))
    manifests = placed(root)[1].manifests
    made = materialize(manifests, tmp_path / "local")
    assert yaml.safe_load(made.data_yaml.read_text(encoding="utf-8"))["names"] == {0: name}


def test_half_a_character_is_refused_in_a_class_and_listed_in_a_file_name(tmp_path):
    root = coco(tmp_path / "set", images={2: {"file_name": "\ud800.png"}, 3: {"file_name": "a\0.png"}})
    images, _ = placed(root, rejects="drop", rejects_file=tmp_path / "rejects.csv")
    assert len(images) == 6 and "\\ud800.png" in (tmp_path / "rejects.csv").read_text(encoding="utf-8")
    text = json.loads((root / "all.json").read_text())
    (root / "all.json").write_text(json.dumps(text | {"categories": [{"id": 1, "name": "a\ud800"}]}))
    with pytest.raises(InvalidInput, match="class name"):
        split_dataset(str(root), rejects="drop")


def test_a_table_that_puts_an_image_into_two_groups_divides_neither(tmp_path):
    """The last row won, and the other group of the image could go to another split."""
    root = write_yolo(tmp_path / "set", clips(4, 1))
    names = sorted(path.name for path in (root / "images").iterdir())
    rows = [f"{name},{i}" for i, name in enumerate(names)]
    (root / "groups.csv").write_text("\n".join(["image,site", *rows, rows[0], f"{names[0]},1"]))
    with pytest.raises(InvalidInput, match="1 rows that give an image another group") as caught:
        split_dataset(str(root), group_rule="csv:groups.csv:site")
    assert [p.where for p in caught.value.problems] == ["line 7"]
    (root / "groups.csv").write_text("image,site\nx," + "y" * 200_000)
    with pytest.raises(InvalidInput, match="no table"):
        split_dataset(str(root), group_rule="csv:groups.csv:site")
    with pytest.raises(InvalidInput, match="near-duplicates"):
        split_dataset(str(root), group_rule="near-duplicates:²")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<annotation><size><width>1e999</width><height>48</height></size></annotation>", "incomplete annotation"),
        ("<annotation><size><width>1e300</width><height>48</height></size></annotation>", "incomplete annotation"),
        ('<?xml version="1.0" encoding="bogus"?><annotation/>', "unreadable label file"),
        ('<?xml version="1.0" encoding="shift-jis"?><annotation/>', "unreadable label file"),
        (
            '<!DOCTYPE x [<!ENTITY e SYSTEM "file:///etc/passwd">]><annotation><object><name>&e;</name><bndbox>'
            "<xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox></object>"
            "<size><width>64</width><height>48</height></size></annotation>",
            "incomplete annotation",
        ),
    ],
)
def test_xml_that_is_out_of_bounds_is_a_finding(tmp_path, text, kind):
    for folder in ("JPEGImages", "Annotations"):
        (tmp_path / "set" / folder).mkdir(parents=True)
    for i in range(6):
        picture(i).save(tmp_path / f"set/JPEGImages/{i}.png")
        size = "<size><width>64</width><height>48</height></size>"
        (tmp_path / f"set/Annotations/{i}.xml").write_text(f"<annotation>{size}</annotation>")
    (tmp_path / "set/Annotations/3.xml").write_text(text)
    images, result = placed(tmp_path / "set", rejects="drop")
    assert "JPEGImages/3.png" not in images and len(images) == 5
    assert [(d.kind, d.image) for d in result.rejects if d.kind == kind] == [(kind, "JPEGImages/3.png")]


@pytest.fixture
def manifest(tmp_path):
    split_to_folder(str(write_yolo(tmp_path / "set", clips(8, 1))), tmp_path / "out", group_rule="none")
    return tmp_path / "out" / "train.parquet"


def test_any_damaged_byte_of_a_manifest_is_noticed_or_harmless(manifest):
    digest, data = read_manifest(manifest).digest, manifest.read_bytes()
    refusals = 0
    for at in range(0, len(data), 31):
        manifest.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            assert read_manifest(manifest).digest == digest
        except InvalidInput:
            refusals += 1
    assert refusals > len(data) / 31 / 2


def _rewritten(path, change):
    table = pq.read_table(path)
    facts = json.loads(table.schema.metadata[b"kfp_gate.manifest"])
    table, facts = change(table, facts)
    pq.write_table(table.replace_schema_metadata({b"kfp_gate.manifest": json.dumps(facts).encode()}), path)


@pytest.mark.parametrize(
    "change",
    [
        lambda table, facts: (table, []),
        lambda table, facts: (table, {k: v for k, v in facts.items() if k != "classes"}),
        lambda table, facts: (table, facts | {"version": "new"}),
        lambda table, facts: (table, facts | {"digest": None}),
        *(lambda table, facts, c=c: (table.drop_columns([c]), facts) for c in ("image", "phash", "boxes", "crowd")),
        lambda table, facts: (table.set_column(0, "image", pa.nulls(len(table), pa.string())), facts),
    ],
)
def test_a_rewritten_manifest_is_an_input_error(manifest, change):
    _rewritten(manifest, change)
    with pytest.raises(InvalidInput) as caught:
        read_manifest(manifest)
    assert caught.value.where == str(manifest)


@pytest.mark.parametrize("image", ["../secret.png", "/etc/hostname", "images/../../secret.png", ".."])
def test_a_manifest_leads_nowhere_outside_its_source(tmp_path, manifest, image):
    """With a right digest: linked and read, whatever lies there."""
    good = read_manifest(manifest)
    names = [image, *good.table["image"].to_pylist()[1:]]
    forged = replace(good, table=good.table.set_column(0, good.table.schema.field(0), pa.array(names)))
    write_manifest(forged, tmp_path / "forged.parquet")
    with pytest.raises(InvalidInput, match="image '") as caught:
        read_manifest(tmp_path / "forged.parquet")
    assert repr(image) in caught.value.found


def test_names_with_dots_are_names(tmp_path, manifest):
    good = read_manifest(manifest)
    names = ["a..b/..c.png", *good.table["image"].to_pylist()[1:]]
    write_manifest(replace(good, table=good.table.set_column(0, good.table.schema.field(0), pa.array(names))), manifest)
    assert len(read_manifest(manifest)) == len(good)


def test_a_whole_seed_is_the_same_seed_however_json_writes_it(tmp_path):
    root = write_yolo(tmp_path / "set", clips(12, 1))
    one, other = (split_dataset(str(root), seed=seed, min_instances=seed).manifests for seed in (5, 5.0))
    assert [m.digest for m in one.values()] == [m.digest for m in other.values()]
    assert {type(m.seed) for m in other.values()} == {int}
    for options in ({"seed": 5.5}, {"seed": float("nan")}, {"seed": True}, {"min_instances": float("inf")}):
        with pytest.raises(InvalidInput, match="a whole number"):
            split_dataset(str(root), **options)
