"""The dataset manifest: one Parquet file per split that says exactly which images and boxes it holds.

Contract for readers: columns may be added, never renamed or reinterpreted; unknown columns and metadata keys are to be
ignored. Paths are relative to `source_uri`; a manifest never holds a path of the machine that wrote it.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kfp_gate.data.annotations import Bools, Floats
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import open_store

VERSION = 1
_KEY = b"kfp_gate.manifest"


@dataclass(frozen=True)
class ImageRow:
    """One image: path relative to the source, pixels, sha256 (hex), 64-bit perceptual hash, group.

    Attributes:
        boxes: class, cx, cy, w, h; centre and size as shares of the image, shape (n, 5).
        crowd: True where a box surrounds a crowd, shape (n,).
        bytes: size of the file.
    """

    image: str
    width: int
    height: int
    sha256: str
    phash: int
    group: str
    boxes: Floats
    crowd: Bools
    bytes: int = 0


@dataclass(frozen=True)
class Manifest:
    """The images of one split with their boxes.

    Attributes:
        table: pyarrow Table, sorted by image, with the columns image, bytes, width, height, sha256, phash, group,
            boxes (list of class, cx, cy, w, h) and crowd (list, one flag per box).
        classes: class names; a box's class is an index into them.
        split: `train`, `val` or `test`.
        source_uri: where the images lie; `image` is relative to it.
        seed, rule, revision: how the split was made.
        tool_version: of kfp-gate.
    """

    table: Any
    classes: tuple[str, ...]
    split: str
    source_uri: str
    seed: int
    rule: str
    tool_version: str
    revision: str = ""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    @cached_property
    def digest(self) -> str:
        """sha256 of classes, images and boxes; neither row order, nor place, nor the way it was split has a part."""
        return _digest(self.table, self.classes)

    def rows(self) -> Iterator[ImageRow]:
        """The images in the table's order."""
        for batch in self.table.to_batches(max_chunksize=4096):
            offsets, flat, crowd = box_columns(batch)
            plain = [
                batch.column(c).to_pylist() for c in ("image", "width", "height", "sha256", "phash", "group", "bytes")
            ]
            for i, (image, width, height, sha256, phash, group, size) in enumerate(zip(*plain, strict=True)):
                part = slice(offsets[i], offsets[i + 1])
                yield ImageRow(image, width, height, sha256, phash, group, flat[part], crowd[part], size)


def schema() -> Any:
    """The Arrow schema of a manifest's table."""
    import pyarrow as pa

    box = pa.struct([("class", pa.int32()), *((name, pa.float64()) for name in ("cx", "cy", "w", "h"))])
    return pa.schema(
        [
            pa.field(name, kind, nullable=False)
            for name, kind in (
                ("image", pa.string()), ("bytes", pa.int64()), ("width", pa.int32()), ("height", pa.int32()),
                ("sha256", pa.string()), ("phash", pa.uint64()), ("group", pa.string()), ("boxes", pa.list_(box)),
                ("crowd", pa.list_(pa.bool_())),
            )
        ]
    )  # fmt: skip


def box_columns(table: Any) -> tuple[NDArray[np.int64], Floats, Bools]:
    """Offsets (n + 1,), rows class, cx, cy, w, h (m, 5) and crowd flags (m,) of a table or batch."""
    import pyarrow as pa

    boxes, crowd = table.column("boxes"), table.column("crowd")
    if isinstance(boxes, pa.ChunkedArray):
        boxes, crowd = boxes.combine_chunks(), crowd.combine_chunks()
    offsets = np.concatenate([[0], np.cumsum(boxes.value_lengths().to_numpy(zero_copy_only=False))]).astype(np.int64)
    flat = boxes.flatten()
    columns = [flat.field(i).to_numpy(zero_copy_only=False) for i in range(5)]
    rows = np.column_stack(columns).astype(np.float64) if len(flat) else np.empty((0, 5))
    return offsets, rows, crowd.flatten().to_numpy(zero_copy_only=False).astype(bool)


def build_table(columns: dict[str, Any], offsets: NDArray[np.int64], boxes: Floats, crowd: Bools) -> Any:
    """A manifest's table, sorted by image, with the boxes of each image in a canonical order.

    Args:
        columns: image, bytes, width, height, sha256, phash, group, each of length n.
        offsets: shape (n + 1,).
        boxes: class, cx, cy, w, h, shape (m, 5).
        crowd: shape (m,).
    """
    import pyarrow as pa

    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    order = np.lexsort((crowd, *boxes.T[::-1], owner))
    boxes, crowd = boxes[order], crowd[order]
    form = schema()
    box = form.field("boxes").type.value_type
    values = [
        pa.array(boxes[:, 0].astype(np.int32)),
        *(pa.array(np.ascontiguousarray(boxes[:, i])) for i in range(1, 5)),
    ]
    lists = pa.ListArray.from_arrays(
        pa.array(offsets, pa.int32()), pa.StructArray.from_arrays(values, fields=list(box))
    )
    flags = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(crowd))
    arrays = [pa.array(columns[f.name], f.type) for f in form if f.name in columns]
    return pa.Table.from_arrays([*arrays, lists, flags], schema=form).sort_by("image")


def write_manifest(manifest: Manifest, path: Path | str) -> None:
    """Write one Parquet file, to a path or a URI. Equal manifests give equal bytes with one version of pyarrow."""
    import pyarrow.parquet as pq

    facts = {
        "version": VERSION, "classes": list(manifest.classes), "split": manifest.split,
        "source_uri": manifest.source_uri, "seed": manifest.seed, "rule": manifest.rule, "revision": manifest.revision,
        "tool_version": manifest.tool_version, "digest": manifest.digest,
    }  # fmt: skip
    out = io.BytesIO()
    table = manifest.table.replace_schema_metadata({_KEY: json.dumps(facts, ensure_ascii=False).encode()})
    pq.write_table(table, out, compression="zstd", use_dictionary=["group"])
    folder, _, name = str(path).rpartition("/")
    open_store(folder or ("/" if str(path).startswith("/") else ".")).write(name, out.getvalue())


def read_manifest(path: Path | str) -> Manifest:
    """Read a manifest from a path or a URI and check it against its digest.

    Raises:
        InvalidInput: no such file, not a manifest, written by a newer major version, or changed since it was written.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    where = str(path)
    folder, _, name = where.rpartition("/")
    data = open_store(folder or ("/" if where.startswith("/") else ".")).read(name)
    # OSError: pyarrow's word for damage within a file.
    try:
        # In this thread: Arrow's readers of their own can abort a process that ends soon after.
        table = pq.ParquetFile(io.BytesIO(data), pre_buffer=False).read(use_threads=False)
        facts = json.loads((table.schema.metadata or {})[_KEY])
        if int(facts["version"]) > VERSION:
            raise InvalidInput(
                f"manifest version {facts['version']}", expected=f"version {VERSION} or older", where=where,
                next_step="use a newer kfp-gate",
            )  # fmt: skip
        manifest = Manifest(
            table.replace_schema_metadata(None), tuple(facts["classes"]), facts["split"], facts["source_uri"],
            facts["seed"], facts["rule"], facts["tool_version"], facts["revision"],
        )  # fmt: skip
        digest, stated = manifest.digest, str(facts["digest"])
    except (
        pa.ArrowException, OSError, KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError,
    ) as error:  # fmt: skip
        raise InvalidInput(
            f"no dataset manifest: {type(error).__name__}", expected="a Parquet file written by `kfp-gate split`",
            where=where, next_step="pass the train, val or test output of split_dataset",
        ) from None  # fmt: skip
    if digest != stated:
        raise InvalidInput(
            f"content with digest {digest[:16]}", expected=f"the digest it was written with, {stated[:16]}",
            where=where, next_step="the file was changed: make it again with `kfp-gate split`",
        )  # fmt: skip
    _refuse_outside(table, where)
    return manifest


def _refuse_outside(table: Any, where: str) -> None:
    """A path that leads out of the source would link or fetch whatever lies there."""
    import pyarrow.compute as pc

    outside = pc.match_substring_regex(table.column("image"), r"^/|(^|/)\.\.(/|$)")
    if pc.any(outside).as_py():
        first = table.column("image").filter(outside)[0].as_py()
        raise InvalidInput(
            f"image {first!r}", expected="paths inside the source", where=where,
            next_step="make the manifest again with `kfp-gate split`",
        )  # fmt: skip


def _digest(table: Any, classes: tuple[str, ...]) -> str:
    """Hash of the columns of the sorted table: raw little-endian values, texts with their lengths.

    Columns are hashed whole: at a million images that takes a second, and hashing row by row twenty.
    """
    import pyarrow.compute as pc

    table = table.sort_by("image").combine_chunks()
    total = hashlib.sha256()

    def add(name: str, data: bytes | memoryview) -> None:
        total.update(f"{name}:{len(data)};".encode())
        total.update(data)

    add("classes", json.dumps(list(classes)).encode())
    for name in ("image", "sha256", "group"):
        column = table.column(name)
        add(f"{name} lengths", pc.binary_length(column).to_numpy().astype("<i8").tobytes())
        add(name, "".join(column.to_pylist()).encode())
    for name in ("bytes", "width", "height"):
        add(name, table.column(name).to_numpy().astype("<i8").tobytes())
    add("phash", table.column("phash").to_numpy().astype("<u8").tobytes())
    offsets, boxes, crowd = box_columns(table)
    add("offsets", offsets.astype("<i8").tobytes())
    add("boxes", boxes.astype("<f8").tobytes())
    add("crowd", crowd.astype("u1").tobytes())
    return total.hexdigest()
