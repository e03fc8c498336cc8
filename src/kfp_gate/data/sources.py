"""Opens a dataset, whatever its format: lists it once, finds the format, reads the annotations."""

import logging
import posixpath
from collections.abc import Callable
from dataclasses import replace

from kfp_gate.data.annotations import Annotations
from kfp_gate.data.archives import MEMBERS, UnpackedStore
from kfp_gate.data.coco import find_coco_files, read_coco
from kfp_gate.data.images import SUFFIXES
from kfp_gate.data.progress import Reporter
from kfp_gate.data.voc import read_voc
from kfp_gate.data.yolo import read_yolo
from kfp_gate.data.yolo_header import CLASS_LISTS, YAML_NAMES
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import LocalStore, Readable, Store, open_store

log = logging.getLogger(__name__)

FORMATS = ("auto", "yolo", "coco", "voc")


def open_dataset(source_uri: str) -> tuple[Store, str, dict[str, int], str]:
    """List a dataset.

    Args:
        source_uri: its folder or prefix, or one file in it (a data.yaml, a COCO json) that is to be used.

    Returns:
        The store, the URI of its root, size in bytes of every file by path, and the file that was named or "".

    Raises:
        InvalidInput: it does not exist or is empty.
    """
    root, named = source_uri, ""
    folder, _, name = source_uri.rstrip("/").rpartition("/")
    if name.lower().endswith((".yaml", ".yml", ".json", ".json.gz", ".zip")):
        store = open_store(folder or "/")
        if store.exists(name):
            root, named = folder or "/", name
    store = open_store(root)
    if isinstance(store, LocalStore) and not store.root.is_dir():
        raise InvalidInput(
            f"dataset {source_uri!r} does not exist", expected="a folder or an s3:// prefix", where="dataset",
            next_step="check the spelling; inside a pod, check that the volume is mounted",
        )  # fmt: skip
    listing = {entry.key: entry.size for entry in store.list() if not _hidden(entry.key)}
    if not listing:
        raise InvalidInput(
            f"dataset {source_uri!r} is empty", expected="images and labels", where="dataset",
            next_step="check the location",
        )  # fmt: skip
    _refuse_unwritable(listing, root)
    log.info("%s: %d files", root, len(listing))
    return store, root, listing, named


def _refuse_unwritable(listing: dict[str, int], root: str) -> None:
    """Names in another encoding than UTF-8, as unpacking an old zip leaves them, fit into no manifest."""
    endings = (*SUFFIXES, *MEMBERS)
    # Such bytes come as lone surrogates, which no encoder takes; one attempt for all, as there are rarely any.
    try:
        "".join(listing).encode()
    except UnicodeEncodeError:
        names = [k for k in listing if k.lower().endswith(endings) and any("\ud800" <= c <= "\udfff" for c in k)]
        if names:
            raise InvalidInput(
                f"{len(names)} file names that are not UTF-8", expected="names in UTF-8", where=root,
                next_step="rename the files, for instance with convmv, and the annotations that name them",
                problems=[Problem(repr(name)[1:-1], "not UTF-8") for name in names],
            ) from None  # fmt: skip


def _refuse_halves(classes: tuple[str, ...], root: str) -> None:
    """Half a character, as a cut escape in JSON or YAML leaves it, can be written nowhere."""
    for name in classes:
        if any("\ud800" <= c <= "\udfff" for c in name):
            raise InvalidInput(
                f"class name {name!r}", expected="a name that can be written in UTF-8", where=root,
                next_step="correct the name in the annotations",
            )  # fmt: skip


def read_annotations(
    store: Readable, listing: dict[str, int], *, format: str = "auto", named: str = "", reporter: Reporter | None = None
) -> Annotations:
    """Read the annotations of an opened dataset.

    Raises:
        InvalidInput: an unknown format, or none or several formats found by `auto`.
    """
    if format not in FORMATS:
        raise InvalidInput(
            f"format {format!r}", expected=f"one of {', '.join(FORMATS)}", where="dataset_format",
            next_step="correct the parameter",
        )  # fmt: skip
    store, listing, images_packed = _unpack(store, listing)
    if format == "auto":
        format = _find_format(store, listing, named)
    readers: dict[str, Callable[[], Annotations]] = {
        "yolo": lambda: read_yolo(store, listing, yaml_file=named, reporter=reporter),
        "coco": lambda: read_coco(store, listing, named=named, reporter=reporter),
        "voc": lambda: read_voc(store, listing, reporter=reporter),
    }
    annotations = readers[format]()
    _refuse_halves(annotations.classes, store.uri)
    if images_packed:
        note = f"{images_packed} images lie in archives and were not used: only annotations are read from archives"
        annotations = replace(annotations, notes=(*annotations.notes, note))
    return annotations


def _unpack(store: Readable, listing: dict[str, int]) -> tuple[Readable, dict[str, int], int]:
    if not any(k.lower().endswith((".zip", ".gz")) for k in listing):
        return store, listing, 0
    unpacked = UnpackedStore(store, listing)
    return unpacked, unpacked.listing, unpacked.archived_images


def _hidden(key: str) -> bool:
    return key.startswith((".", "__MACOSX/")) or "/." in key


def _find_format(store: Readable, listing: dict[str, int], named: str) -> str:
    if named:
        return "yolo" if named.lower().endswith((".yaml", ".yml")) else "coco"
    top = [k for k in listing if "/" not in k]
    found = []
    if any(k in listing for k in YAML_NAMES) or any(k.endswith((".yaml", ".yml")) for k in top):
        found.append("yolo")
    if find_coco_files(store, listing)[0]:
        found.append("coco")
    if any(k.lower().endswith(".xml") for k in listing):
        found.append("voc")
    images = {_stem(k) for k in listing if k.lower().endswith(SUFFIXES)}
    if not found and (images or any(k in listing for k in CLASS_LISTS)):
        found.append("yolo")  # whose reader says what is missing
    if len(found) == 1:
        return found[0]
    if found:
        raise InvalidInput(
            f"annotations in {len(found)} formats: {', '.join(found)}", expected="one, or a choice", where=store.uri,
            next_step="name the one to use with dataset_format",
        )  # fmt: skip
    raise InvalidInput(
        f"{len(listing)} files that are no known dataset, such as {min(listing)!r}",
        expected="images with a data.yaml and labels (yolo), a COCO json or Pascal VOC xml files", where=store.uri,
        next_step="check the dataset's location, or name its dataset_format",
    )  # fmt: skip


def _stem(key: str) -> str:
    return posixpath.splitext(key)[0].rpartition("/")[2]
