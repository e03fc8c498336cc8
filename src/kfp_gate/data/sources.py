"""Opens a dataset, whatever its format: lists it once, finds the format, reads the annotations."""

import logging
import posixpath
from collections.abc import Callable
from typing import Any

from kfp_gate.data.annotations import Annotations
from kfp_gate.data.images import SUFFIXES
from kfp_gate.data.progress import Reporter
from kfp_gate.data.yolo import CLASS_LISTS, YAML_NAMES, read_yolo
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import LocalStore, Store, open_store

log = logging.getLogger(__name__)

FORMATS = ("auto", "yolo")


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
    log.info("%s: %d files", root, len(listing))
    return store, root, listing, named


def read_annotations(
    store: Store, listing: dict[str, int], *, format: str = "auto", named: str = "", reporter: Reporter | None = None
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
    if format == "auto":
        format = _find_format(store, listing, named)
    readers: dict[str, Callable[[], Any]] = {
        "yolo": lambda: read_yolo(store, listing, yaml_file=named, reporter=reporter),
    }
    annotations: Annotations = readers[format]()
    return annotations


def _hidden(key: str) -> bool:
    return key.startswith((".", "__MACOSX/")) or "/." in key


def _find_format(store: Store, listing: dict[str, int], named: str) -> str:
    if named.lower().endswith((".yaml", ".yml")):
        return "yolo"
    top = [k for k in listing if "/" not in k]
    if any(k in listing for k in (*YAML_NAMES, *CLASS_LISTS)) or any(k.endswith((".yaml", ".yml")) for k in top):
        return "yolo"
    images = {posixpath.splitext(k)[0].rpartition("/")[2] for k in listing if k.lower().endswith(SUFFIXES)}
    texts = [k for k in listing if k.endswith(".txt") and posixpath.splitext(k)[0].rpartition("/")[2] in images]
    if texts or images:
        return "yolo"
    raise InvalidInput(
        f"{len(listing)} files that are no known dataset, such as {sorted(listing)[0]!r}",
        expected="images with a data.yaml and labels (yolo), a COCO json or Pascal VOC xml files", where=store.uri,
        next_step="check the dataset's location, or name its dataset_format",
    )  # fmt: skip
