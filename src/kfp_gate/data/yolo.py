"""The YOLO layout: `data.yaml` with class names, and one text file per image.

Read as Ultralytics reads it, so that a dataset that trains there loads here: the last folder `images` of a path
becomes `labels` (else the label lies beside the image); `train`, `val` and `test` of the yaml name a folder, a
list file, or several; `path` is tried and `../x` is retried as `x`. What Ultralytics skips with a warning is a
defect here.
"""

import posixpath
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Annotations, Bools, Floats, Ints
from kfp_gate.data.archives import UnpackedStore
from kfp_gate.data.defects import Defect
from kfp_gate.data.images import SUFFIXES
from kfp_gate.data.label_processes import CHUNK, parse_files
from kfp_gate.data.label_text import ParsedLabels, parse_labels
from kfp_gate.data.progress import Meter, Reporter
from kfp_gate.data.yolo_header import CLASS_LISTS, SPLIT_KEYS, YoloHeader, read_header
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import LocalStore, Readable


def label_path(image: str) -> str:
    """The label file of an image.

    >>> label_path("images/train/a.jpg"), label_path("flat/a.jpg")
    ('labels/train/a.txt', 'flat/a.txt')
    """
    folders, name = posixpath.split(image)
    parts = folders.split("/")
    if "images" in parts:
        parts[len(parts) - 1 - parts[::-1].index("images")] = "labels"
    return posixpath.join("/".join(parts), posixpath.splitext(name)[0] + ".txt")


def read_yolo(
    store: Readable, listing: dict[str, int], *, yaml_file: str = "", reporter: Reporter | None = None
) -> Annotations:
    """Read a YOLO dataset.

    Args:
        store: the dataset's root.
        listing: size in bytes of every file under it.
        yaml_file: the yaml to use, "" to look for one of `YAML_NAMES`.

    Raises:
        InvalidInput: no usable data.yaml, no images, or no labels at all.
    """
    header = read_header(store, listing, yaml_file)
    images, fixed, notes = _choose_images(store, listing, header)
    names = [label_path(image) for image in images]
    label_files = [name if name in listing else "" for name in names]
    if not any(label_files):
        raise InvalidInput(
            f"{len(images)} images and no label file", expected=f"for instance {names[0]!r} for {images[0]!r}",
            where=store.uri,
            next_step="put the labels in a folder `labels` parallel to `images`, or point the dataset at the folder "
            "that holds both",
        )  # fmt: skip
    defects = _shared_labels(images, label_files)
    defects += _orphans(listing, label_files, images, pooled=not header.splits)
    parsed, text_defects = _read_labels(store, images, label_files, reporter)
    empty = label_files.count("")
    if empty:
        notes.append(f"{empty} of {len(images)} images have no label file and count as images without objects")
    counts = parsed.counts
    classes, class_defects = _class_column(parsed, images, label_files, len(header.classes))
    return Annotations(
        images=images,
        sizes=np.array([listing[i] for i in images], np.int64),
        classes=header.classes,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        box_class=classes,
        boxes=parsed.rows[:, 1:],
        crowd=np.zeros(len(parsed.rows), bool),
        lines=parsed.lines,
        label_files=label_files,
        declared=np.zeros((len(images), 2), np.int64),
        fixed=fixed,
        defects=tuple(defects + text_defects + class_defects),
        notes=tuple(notes),
    )


def _choose_images(store: Readable, listing: dict[str, int], header: YoloHeader) -> tuple[list[str], Ints, list[str]]:
    """The images, the split that the source itself gives each, and notes."""
    every = sorted(k for k in listing if k.lower().endswith(SUFFIXES))
    notes: list[str] = []
    if not every:
        raise InvalidInput(
            f"no image among {len(listing)} files", expected=f"files ending in {', '.join(SUFFIXES)}",
            where=store.uri, next_step="check the dataset's location",
        )  # fmt: skip
    members: dict[str, set[str]] = {}
    missing: list[Problem] = []
    for split, entries in header.splits.items():
        for entry in entries:
            found = _entry_images(store, listing, every, header, entry)
            if found is None:
                missing.append(Problem(split, repr(entry)))
            else:
                members.setdefault(split, set()).update(found)
    # A yaml often names a test set that was not shipped; that is no reason to refuse the rest.
    if missing and not any(members.values()):
        raise InvalidInput(
            "no split of the yaml leads to an image", expected="folders or list files inside the dataset",
            where=f"{store.uri}/{header.file}", problems=missing,
            next_step="correct `path` and the splits, or remove them to use every image under the dataset",
        )  # fmt: skip
    notes += [f"{header.file} names {p.where}: {p.found}, where no image is" for p in missing]
    images = sorted(set().union(*members.values())) if members else every
    if len(images) < len(every):
        notes.append(f"{len(every) - len(images)} image files are in no split of {header.file} and were not used")
    codes = np.full(len(images), NO_SPLIT, np.int64)
    index = {image: i for i, image in enumerate(images)}
    for image in images if not members else ():
        codes[index[image]] = _split_of_path(image)
    several = 0
    for code, split in enumerate(SPLITS):
        for image in sorted(members.get(split, ())):
            several += codes[index[image]] != NO_SPLIT
            codes[index[image]] = code
    if several:
        notes.append(f"{header.file} puts {several} images into more than one split")
        for image in images:
            if sum(image in held for held in members.values()) > 1:
                codes[index[image]] = NO_SPLIT
    return images, codes, notes


def _split_of_path(image: str) -> int:
    for part in image.split("/")[:-1]:
        if part.lower() in SPLIT_KEYS:
            return SPLITS.index(SPLIT_KEYS[part.lower()])
    return NO_SPLIT


def _entry_images(
    store: Readable, listing: dict[str, int], every: Sequence[str], header: YoloHeader, entry: str
) -> list[str] | None:
    """The images under one entry of the yaml, or None if it leads nowhere inside the dataset."""
    base = posixpath.dirname(header.file)
    for candidate in _candidates(store, base, header.path, entry):
        if candidate in listing and candidate.endswith(".txt"):
            return _list_file(store, listing, candidate)
        prefix = "" if candidate in ("", ".") else candidate + "/"
        found = [image for image in every if image.startswith(prefix)]
        if found:
            return found
    return None


def _candidates(store: Readable, base: str, path: str, entry: str) -> Iterable[str]:
    entry = entry.removeprefix("./")
    retried = entry[3:] if entry.startswith("../") else entry
    for root in dict.fromkeys((posixpath.join(base, path), base)):
        for name in dict.fromkeys((entry, retried)):
            full = posixpath.join(root, name)
            folder = _folder(store)
            if full.startswith("/") and folder is not None:
                top = folder.resolve().as_posix()
                full = posixpath.normpath(full)
                if full != top and not full.startswith(top + "/"):
                    continue
                full = full[len(top) + 1 :]
            yield posixpath.normpath(full) if full else ""


def _folder(store: Readable) -> Path | None:
    return store.root if isinstance(store, LocalStore | UnpackedStore) else None


def _list_file(store: Readable, listing: dict[str, int], file: str) -> list[str] | None:
    """Images named in a list file, relative to the dataset or to the file's folder, as `./x` too."""
    folder = posixpath.dirname(file)
    local = _folder(store)
    top = local.resolve().as_posix() + "/" if local is not None else ""
    images, missing = [], []
    for number, line in enumerate(store.read(file).decode("utf-8-sig", "replace").splitlines(), 1):
        name = line.strip()
        if not name:
            continue
        inside = name.removeprefix(top) if top and name.startswith(top) else name
        tries = [posixpath.normpath(posixpath.join(folder, inside)), posixpath.normpath(inside)]
        match = next((t for t in tries if t in listing), None)
        if match is None:
            missing.append(Problem(f"{file}:{number}", repr(name)))
        else:
            images.append(match)
    if missing:
        raise InvalidInput(
            f"{len(missing)} listed images do not exist in the dataset", expected="paths inside the dataset",
            where=f"{store.uri}/{file}", next_step="correct the list file", problems=missing,
        )  # fmt: skip
    return images


def _shared_labels(images: Sequence[str], label_files: Sequence[str]) -> list[Defect]:
    owners: dict[str, list[str]] = {}
    for image, label in zip(images, label_files, strict=True):
        if label:
            owners.setdefault(label, []).append(image)
    # Nobody knows whose it is, so none of them keeps it.
    return [
        Defect("ambiguous label", label, 0, f"belongs to {' and to '.join(map(repr, sharing))}", image)
        for label, sharing in owners.items()
        if len(sharing) > 1
        for image in sharing
    ]


def _orphans(
    listing: dict[str, int], label_files: Sequence[str], images: Sequence[str], *, pooled: bool
) -> list[Defect]:
    """Label files without an image, in the folders where the labels of the chosen images lie."""
    folders = {posixpath.dirname(label) for label in label_files if label}
    used = {label_path(key) for key in listing if key.lower().endswith(SUFFIXES)}
    beside = {posixpath.dirname(image) for image in images}
    defects = []
    for key in sorted(listing):
        folder, name = posixpath.split(key)
        if not name.endswith(".txt") or key in used or folder not in folders or name in CLASS_LISTS:
            continue
        if folder in beside and not pooled:
            continue  # list files may lie beside images
        defects.append(Defect("label without image", key, 0, "no image has this name"))
    return defects


def _read_labels(
    store: Readable, images: Sequence[str], label_files: Sequence[str], reporter: Reporter | None
) -> tuple[ParsedLabels, list[Defect]]:
    meter = Meter("reading labels", len(images), reporter)
    if isinstance(store, LocalStore):
        parts = parse_files(store.root, label_files, meter)
    else:
        parts = []
        with ThreadPoolExecutor(16) as pool:
            for start in range(0, len(images), CHUNK):
                files = label_files[start : start + CHUNK]
                parts.append(parse_labels(list(pool.map(lambda name: store.read(name) if name else b"", files))))
                meter.add(len(files))
    defects = [
        Defect(kind, label_files[k * CHUNK + i], line, found, images[k * CHUNK + i])
        for k, part in enumerate(parts)
        for i, line, kind, found in part.problems
    ]
    return ParsedLabels(
        np.concatenate([p.counts for p in parts]),
        np.concatenate([p.rows for p in parts]),
        np.concatenate([p.lines for p in parts]),
        [],
    ), defects


def _class_column(
    parsed: ParsedLabels, images: Sequence[str], label_files: Sequence[str], classes: int
) -> tuple[Ints, list[Defect]]:
    """Class indexes; a fraction is reported here, an index beyond the names by the box checks."""
    values: Floats = parsed.rows[:, 0]
    broken: Bools = (values != np.floor(values)) | (np.abs(values) > 1e9)
    owner = np.repeat(np.arange(len(images)), parsed.counts)
    defects = [
        Defect(
            "unknown class", label_files[owner[b]], int(parsed.lines[b]),
            f"class {values[b]:g} is no index from 0 to {classes - 1}", images[owner[b]],
        )
        for b in np.flatnonzero(broken).tolist()
    ]  # fmt: skip
    return np.where(broken, 0, values).astype(np.int64), defects
