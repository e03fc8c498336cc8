"""COCO detection json, one file or several, streamed: ids of any kind, crowds, annotations without `area`."""

import posixpath
import re
import sys
from array import array
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Annotations, Ints
from kfp_gate.data.collector import Collector
from kfp_gate.data.defects import Defect
from kfp_gate.data.image_paths import ImagePaths
from kfp_gate.data.json_stream import stream_items
from kfp_gate.data.progress import Meter, Reporter
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import Readable

_BY_ID = "\0"
"""Before an image id in a defect found before the image's path is known."""

_LARGEST_SIDE, _LARGEST_ID = 2**31 - 1, 2**63 - 1

_SPLIT = re.compile(r"(?:^|[^a-z])(train|valid|val|test)")


@dataclass
class _File:
    """One json while it is read. Ids become row numbers at first sight, since arrays come in any order."""

    rows: dict[str, int] = field(default_factory=dict)
    images: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    categories: dict[str, str] = field(default_factory=dict)
    category_codes: dict[str, int] = field(default_factory=dict)
    ann_image: "array[int]" = field(default_factory=lambda: array("q"))
    ann_category: "array[int]" = field(default_factory=lambda: array("q"))
    ann_id: "array[int]" = field(default_factory=lambda: array("q"))
    ann_crowd: "array[int]" = field(default_factory=lambda: array("b"))
    ann_box: "array[float]" = field(default_factory=lambda: array("d"))
    keys: set[str] = field(default_factory=set)


def find_coco_files(store: Readable, listing: dict[str, int], named: str = "") -> tuple[list[str], list[str]]:
    """The json files that hold detections, and notes on those left aside."""
    if named:
        return [named.removesuffix(".gz")], []
    files = sorted(k for k in listing if k.lower().endswith(".json") and _looks_like_coco(store, k))
    instances = [f for f in files if posixpath.basename(f).startswith("instances_")]
    if instances and len(instances) < len(files):
        aside = sorted(set(files) - set(instances))
        return instances, [f"only instances_*.json were read, not {', '.join(aside[:5])}"]
    return files, []


def read_coco(
    store: Readable, listing: dict[str, int], *, named: str = "", reporter: Reporter | None = None
) -> Annotations:
    """Read COCO annotations.

    Boxes are x, y, width, height in pixels from the upper left corner; they are divided by the stated size of the
    image, which is later compared with the file's.

    Raises:
        InvalidInput: no json with images, annotations and categories, or one that is not JSON.
    """
    files, notes = find_coco_files(store, listing, named)
    if not files:
        raise InvalidInput(
            "no COCO json", expected="a json with `images`, `annotations` and `categories`", where=store.uri,
            next_step="check the dataset's location, or name the json itself as the dataset",
        )  # fmt: skip
    collector = Collector(notes=notes)
    paths = ImagePaths(listing)
    classes: list[str] = []
    meter = Meter("reading annotations", sum(listing.get(f, 0) for f in files), reporter)
    for file in files:
        read = _read_file(store, file, paths, collector.defects)
        meter.add(listing.get(file, 0))
        index = _classes(read, classes, f"{store.uri}/{file}")
        split = _SPLIT.search(file.lower())
        code = SPLITS.index({"valid": "val"}.get(split[1], split[1])) if split else NO_SPLIT
        rows = np.full(len(read.rows), -1, np.int64)
        for row, (name, width, height) in read.images.items():
            image, problem = paths.find(name, file)
            if problem:
                collector.defects.append(Defect("missing image", file, 0, f"{name!r}: {problem}", name))
            rows[row] = collector.image(image or name, file, width, height, code)
        _add_boxes(read, rows, index, file, collector)
    unlisted = len(paths.images - set(collector.images))
    if unlisted:
        notes.append(f"{unlisted} image files are in no json and were not used")
    if not collector.images:
        raise InvalidInput(
            f"no image in {', '.join(files)}", expected="a json that lists images", where=store.uri,
            next_step="check the json",
        )  # fmt: skip
    return collector.finish(listing, classes)


def _looks_like_coco(store: Readable, key: str) -> bool:
    """The first bytes show a COCO key; package.json and the like do not."""
    with store.open(key) as handle:
        head = handle.read(1 << 16)
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{" and any(
        f'"{name}"'.encode() in head for name in ("images", "annotations", "categories")
    )


def _read_file(store: Readable, file: str, paths: ImagePaths, defects: list[Defect]) -> _File:
    read = _File()
    with store.open(file) as handle:
        for key, index, item in stream_items(handle, f"{store.uri}/{file}"):
            read.keys.add(key)
            if key == "annotations" and index >= 0:
                _take_annotation(read, item, index, file, defects)
            elif key == "images" and index >= 0:
                _take_image(read, item, index, file, paths, defects)
            elif key == "categories" and index >= 0 and isinstance(item, dict) and "id" in item and item.get("name"):
                read.categories[_id(item["id"])] = str(item["name"])
    missing = sorted({"images", "annotations", "categories"} - read.keys)
    if missing:
        raise InvalidInput(
            f"a json without {' and '.join(missing)}", expected="`images`, `annotations` and `categories`",
            where=f"{store.uri}/{file}", next_step="export the detections as COCO again, or name another json",
        )  # fmt: skip
    return read


def _id(value: Any) -> str:
    """Ids as text: 7, 7.0 and "7" are one id, since exporters mix them between the arrays."""
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _take_image(read: _File, item: Any, index: int, file: str, paths: ImagePaths, defects: list[Defect]) -> None:
    if not isinstance(item, dict) or "id" not in item or not isinstance(item.get("file_name"), str):
        defects.append(Defect("incomplete annotation", file, 0, f"images[{index}] has no `id` or no `file_name`"))
        return
    row = read.rows.setdefault(_id(item["id"]), len(read.rows))
    name = item["file_name"]
    # A defect names the file, as the collector will: an image that is to leave is found by its path.
    path = paths.find(name, file)[0] or name
    if row in read.images:
        first = read.images[row][0]
        # Nobody knows which of the two an annotation with this id means, so neither keeps its boxes.
        for image in dict.fromkeys((paths.find(first, file)[0] or first, path)):
            found = f"id {item['id']!r} is {first!r} and {name!r}"
            defects.append(Defect("image listed twice", file, 0, found, image))
        return
    sides = [item.get("width"), item.get("height")]
    width, height = (int(v) if isinstance(v, int | float) and 1 <= v <= _LARGEST_SIDE else 0 for v in sides)
    if not width or not height:
        found = f"images[{index}] {name!r} states width {sides[0]!r} and height {sides[1]!r}"
        defects.append(Defect("incomplete annotation", file, 0, found[:160], path))
    read.images[row] = (name, width, height)


def _take_annotation(read: _File, item: Any, index: int, file: str, defects: list[Defect]) -> None:
    box = item.get("bbox") if isinstance(item, dict) else None
    usable = (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(v, int | float) and not isinstance(v, bool) and abs(v) <= sys.float_info.max for v in box)
    )
    number = item.get("id", index) if isinstance(item, dict) else index
    number = number if isinstance(number, int) and abs(number) <= _LARGEST_ID else index
    if box is None or not usable or "image_id" not in item or "category_id" not in item:
        what = f"bbox {box!r}" if isinstance(item, dict) and not usable else "no `image_id` or `category_id`"
        # The image is unknown only if the annotation does not even name it; else it must not lose a box silently.
        name = _id(item["image_id"]) if isinstance(item, dict) and "image_id" in item else ""
        defects.append(
            Defect("incomplete annotation", file, number, f"annotations[{index}] has {what}"[:160], _BY_ID + name)
        )
        if name:
            read.rows.setdefault(name, len(read.rows))
        return
    read.ann_image.append(read.rows.setdefault(_id(item["image_id"]), len(read.rows)))
    read.ann_category.append(read.category_codes.setdefault(_id(item["category_id"]), len(read.category_codes)))
    read.ann_id.append(number)
    read.ann_crowd.append(1 if item.get("iscrowd") else 0)
    read.ann_box.extend(box)


def _classes(read: _File, classes: list[str], where: str) -> dict[str, int]:
    """Class index of each category id of a file; new names are appended, in the order of numeric ids."""
    names = list(read.categories.values())
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InvalidInput(
            f"category {twice[0]!r} has {names.count(twice[0])} ids", expected="each category name once", where=where,
            next_step="rename or merge the categories: results are reported by name",
        )  # fmt: skip
    ids = list(read.categories)
    if all(i.lstrip("-").isdigit() for i in ids):
        ids.sort(key=int)
    for category in ids:
        if read.categories[category] not in classes:
            classes.append(read.categories[category])
    return {category: classes.index(read.categories[category]) for category in ids}


def _add_boxes(read: _File, rows: Ints, index: dict[str, int], file: str, collector: Collector) -> None:
    """Hand the usable annotations of one file over; the others are defects."""
    images, defects = collector.images, collector.defects
    row_of_id = {text: int(rows[row]) for text, row in read.rows.items()}
    for k, defect in enumerate(defects):
        if defect.file == file and defect.image.startswith(_BY_ID):
            row = row_of_id.get(defect.image[1:], -1)
            defects[k] = replace(defect, image=images[row] if row >= 0 else "")
    owner = rows[np.frombuffer(read.ann_image, np.int64)] if read.ann_image else np.empty(0, np.int64)
    category = np.frombuffer(read.ann_category, np.int64)
    ids = np.frombuffer(read.ann_id, np.int64)
    category_ids = list(read.category_codes)
    class_of = np.array([index.get(c, -1) for c in category_ids], np.int64)
    box_class = class_of[category] if len(category) else category
    strangers = {row: text for text, row in read.rows.items() if row not in read.images}
    for k in np.flatnonzero(owner < 0).tolist():
        found = f"image_id {strangers[read.ann_image[k]]} is no image"
        defects.append(Defect("label without image", file, int(ids[k]), found))
    for k in np.flatnonzero((box_class < 0) & (owner >= 0)).tolist():
        found = f"category_id {category_ids[category[k]]} is no category"
        defects.append(Defect("unknown class", file, int(ids[k]), found, images[int(owner[k])]))
    keep = (owner >= 0) & (box_class >= 0)
    pixels = np.frombuffer(read.ann_box, np.float64).reshape(-1, 4)
    crowd = np.frombuffer(read.ann_crowd, np.int8).astype(bool)
    collector.pixel_boxes(owner[keep], box_class[keep], pixels[keep], crowd[keep], ids[keep])
