"""Pascal VOC: one xml per image, box corners in pixels counted from 1, both inclusive."""

import posixpath
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from xml.parsers import expat

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Annotations
from kfp_gate.data.collector import Collector
from kfp_gate.data.defects import Defect
from kfp_gate.data.image_paths import ImagePaths
from kfp_gate.data.progress import Meter, Reporter
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import Readable

CLASS_LISTS = ("classes.txt", "labels.txt", "labelmap.txt")
_CHUNK = 2048


@dataclass
class _Object:
    line: int
    values: dict[str, str] = field(default_factory=dict)


@dataclass
class _Xml:
    values: dict[str, str] = field(default_factory=dict)
    objects: list[_Object] = field(default_factory=list)


@dataclass
class _Boxes:
    owners: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    corners: list[tuple[float, float, float, float]] = field(default_factory=list)
    difficult: list[bool] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    zeros: int = 0

    def add(self, row: int, name: str, corners: list[float], one: _Object) -> None:
        # Edges, not pixels: the first pixel begins one before its number. A 0 shows a writer that counts from 0.
        self.zeros += 0 in corners[:2]
        left, top = (c - 1 if c >= 1 or c < 0 else 0.0 for c in corners[:2])
        self.owners.append(row)
        self.names.append(name)
        self.corners.append((left, top, corners[2] - left, corners[3] - top))
        self.difficult.append(one.values.get("difficult", "") == "1")
        self.lines.append(one.line)


def read_voc(store: Readable, listing: dict[str, int], *, reporter: Reporter | None = None) -> Annotations:
    """Read VOC annotations.

    A box covers the pixels xmin..xmax, so its edges are xmin - 1 and xmax. Objects marked `difficult` are not judged
    in VOC; they are taken as crowds.

    Raises:
        InvalidInput: no xml, or no image for any.
    """
    files = sorted(k for k in listing if k.lower().endswith(".xml"))
    if not files:
        raise InvalidInput(
            "no xml file", expected="Annotations/*.xml beside JPEGImages", where=store.uri,
            next_step="check the dataset's location",
        )  # fmt: skip
    collector = Collector()
    paths = ImagePaths(listing)
    listed = _class_list(store, listing)
    splits = _image_sets(store, listing)
    boxes = _Boxes()
    meter = Meter("reading annotations", len(files), reporter)
    with ThreadPoolExecutor(16) as pool:
        for start in range(0, len(files), _CHUNK):
            part = files[start : start + _CHUNK]
            for file, data in zip(part, pool.map(store.read, part), strict=True):
                _take(file, data, paths, listed, splits, collector, boxes)
                meter.add()
    if not collector.images:
        raise InvalidInput(
            f"{len(files)} xml files and no image for any", expected="JPEGImages beside Annotations", where=store.uri,
            next_step="point the dataset at the folder that holds both",
        )  # fmt: skip
    classes = listed or sorted(set(boxes.names))
    if not listed:
        collector.notes.append(
            f"no {CLASS_LISTS[0]}: the classes are the {len(classes)} names found, in alphabetical order"
        )
    if boxes.zeros:
        collector.notes.append(
            f"{boxes.zeros} boxes start at pixel 0 although VOC counts from 1: boxes may be a pixel too wide"
        )
    if any(boxes.difficult):
        collector.notes.append(f"{sum(boxes.difficult)} objects are marked difficult and are not judged")
    unlisted = len(paths.images - set(collector.images))
    if unlisted:
        collector.notes.append(f"{unlisted} image files have no xml and were not used")
    index = {name: i for i, name in enumerate(classes)}
    collector.pixel_boxes(
        np.array(boxes.owners, np.int64), np.array([index[n] for n in boxes.names], np.int64),
        np.array(boxes.corners, np.float64).reshape(-1, 4), boxes.difficult, np.array(boxes.lines, np.int64),
    )  # fmt: skip
    return collector.finish(listing, classes)


def _take(
    file: str, data: bytes, paths: ImagePaths, listed: list[str], splits: dict[str, int], collector: Collector,
    boxes: _Boxes,
) -> None:  # fmt: skip
    """Read one xml."""
    defects = collector.defects
    parsed = _parse(data)
    stated = parsed.values.get("filename", "") if isinstance(parsed, _Xml) else ""
    image = paths.by_stem(file, _folders(file)) or paths.find(stated, file)[0]
    if not image:
        defects.append(Defect("label without image", file, 0, f"no image for this file or for filename {stated!r}"))
        return
    split = splits.get(posixpath.splitext(posixpath.basename(image))[0], NO_SPLIT)
    if not isinstance(parsed, _Xml):
        collector.image(image, file, 0, 0, split)
        defects.append(Defect("unreadable label file", file, parsed[0], parsed[1], image))
        return
    sides = [_number(parsed.values.get(f"size/{side}", "")) for side in ("width", "height")]
    known = all(1 <= side < 2**31 for side in sides)
    row = collector.image(image, file, int(sides[0]) if known else 0, int(sides[1]) if known else 0, split)
    if not known:
        defects.append(Defect("incomplete annotation", file, 0, "no width and height in `size`", image))
    for one in parsed.objects:
        corners = [_number(one.values.get(f"bndbox/{c}", "")) for c in ("xmin", "ymin", "xmax", "ymax")]
        name = one.values.get("name", "")
        if not name or not np.isfinite(corners).all():
            found = f"object {name!r} with bndbox {_shown(one)}"
            defects.append(Defect("incomplete annotation", file, one.line, found, image))
        elif listed and name not in listed:
            found = f"{name!r} is not one of {len(listed)} names"
            defects.append(Defect("unknown class", file, one.line, found, image))
        else:
            boxes.add(row, name, corners, one)


def _folders(file: str) -> list[str]:
    """Where the image of an xml may lie: JPEGImages or images beside its folder, or its own folder."""
    folder = posixpath.dirname(file)
    parts = folder.split("/")
    out = [folder]
    for i, part in enumerate(parts):
        if part.lower() in ("annotations", "labels", "xml", "xmls"):
            out += ["/".join([*parts[:i], name, *parts[i + 1 :]]) for name in ("JPEGImages", "images", "Images")]
            out.append("/".join([*parts[:i], *parts[i + 1 :]]))
    return out


def _class_list(store: Readable, listing: dict[str, int]) -> list[str]:
    """Names of a class list; CVAT's labelmap.txt has `name:color:parts:actions` lines and a background."""
    file = next((name for name in CLASS_LISTS if name in listing), "")
    if not file:
        return []
    lines = [x.strip() for x in store.read(file).decode("utf-8-sig", "replace").splitlines()]
    names = [x.split(":")[0].strip() if file == "labelmap.txt" else x for x in lines if x and not x.startswith("#")]
    return [n for n in dict.fromkeys(names) if not (file == "labelmap.txt" and n == "background")]


def _image_sets(store: Readable, listing: dict[str, int]) -> dict[str, int]:
    """Splits by image stem, from ImageSets/Main/{train,val,test}.txt."""
    codes: dict[str, int] = {}
    for code, split in enumerate(SPLITS):
        for key in sorted(k for k in listing if f"/{k}".endswith(f"/ImageSets/Main/{split}.txt")):
            for line in store.read(key).decode("utf-8-sig", "replace").splitlines():
                if line.split():
                    codes[line.split()[0]] = code
    return codes


def _number(text: str) -> float:
    try:
        return float(text) if "_" not in text else float("nan")
    except ValueError:
        return float("nan")


def _shown(one: _Object) -> str:
    corners = (one.values.get(f"bndbox/{c}") for c in ("xmin", "ymin", "xmax", "ymax"))
    return " ".join("-" if c is None else c.strip()[:20] or "''" for c in corners)


def _parse(data: bytes) -> _Xml | tuple[int, str]:
    """The values below `annotation` by path, with the line of each object; or line and reason of what is no XML."""
    result = _Xml()
    stack: list[str] = []
    text: list[str] = []
    parser = expat.ParserCreate()

    def start(name: str, _: dict[str, str]) -> None:
        stack.append(name)
        text.clear()
        if stack[1:] == ["object"]:
            result.objects.append(_Object(parser.CurrentLineNumber))

    def end(_: str) -> None:
        value = "".join(text).strip()
        text.clear()
        path = stack[1:]
        stack.pop()
        if path and path[0] == "object":
            # VOC's person layout has boxes of parts inside an object: only the object's own counts.
            if path[1:2] != ["part"]:
                result.objects[-1].values["/".join(path[1:])] = value
        elif path:
            result.values["/".join(path)] = value

    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = text.append
    try:
        parser.Parse(data, True)
    except expat.ExpatError as error:
        return error.lineno, f"not XML: {expat.ErrorString(error.code)}"
    except (LookupError, ValueError) as error:  # an encoding that Python does not know, or expat cannot use
        return 1, f"not XML that can be read: {error}"
    return result
