"""Manifests to a local folder in the YOLO layout that trains on this machine, wherever the images lie."""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

from kfp_gate.data.annotations import Bools, Floats
from kfp_gate.data.manifest import Manifest
from kfp_gate.data.progress import Meter, Reporter
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import LocalStore, Store, open_store

log = logging.getLogger(__name__)

DOWNLOADS = 16
"""Downloads at once from a remote store. Each holds at most one piece of `storage.PIECE` bytes in memory."""

_MARK = "kfp-gate-dataset.json"
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True)
class LocalDataset:
    """A materialised dataset.

    Attributes:
        folder: holds images/<split>, labels/<split> and data.yaml.
        data_yaml: valid on this machine, for any current directory.
        images: paths per split, in the order of the manifest's rows.
    """

    folder: Path
    data_yaml: Path
    images: dict[str, list[Path]]


@dataclass(frozen=True)
class _Wanted:
    source: str
    target: Path
    bytes: int
    sha256: str


def materialize(
    manifests: Mapping[str, Manifest],
    folder: Path,
    *,
    source_uri: str | None = None,
    downloads: int = DOWNLOADS,
    verify_local: bool = False,
    reporter: Reporter | None = None,
) -> LocalDataset:
    """Make a local copy of the splits given: links for mounted images, verified downloads for s3://.

    May be called by several processes of one node for the same folder at once: one works, the others wait and find it
    done. Called again after an interruption it goes on where it stopped. Nothing is written beside the source.

    Args:
        manifests: by split name; any of train, val, test.
        folder: created if missing. Files in it that an earlier call made for other manifests are removed.
        source_uri: where the images lie, if no longer at the manifests' `source_uri`.
        downloads: how many at once; memory grows with it, not with the dataset.
        verify_local: check the sha256 of mounted images too, not only their size: reads each once.
        reporter: called with the progress; None logs it.

    Raises:
        InvalidInput: images are missing or changed since the manifest, the disk is too small, or the folder holds
            other files.
        Unavailable: the store stopped answering.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    roots = {source_uri or m.source_uri for m in manifests.values()}
    if len(roots) != 1 or len({m.classes for m in manifests.values()}) != 1:
        raise InvalidInput(
            f"manifests of {len(roots)} sources and {len({m.classes for m in manifests.values()})} class lists",
            expected="splits of one dataset", where="manifests", next_step="pass the outputs of one split_dataset run",
        )  # fmt: skip
    store = open_store(roots.pop())
    digests = {split: m.digest for split, m in sorted(manifests.items())}
    images: dict[str, list[Path]] = {}
    with _only_one(folder):
        _claim(folder, digests)
        wanted: list[_Wanted] = []
        for split, manifest in manifests.items():
            images[split] = _plan(folder, split, manifest, wanted)
        meter = Meter("preparing images", len(wanted), reporter)
        if isinstance(store, LocalStore):
            _link(store, wanted, meter, verify=verify_local)
        else:
            _download(store, wanted, folder, downloads, meter)
        for split, manifest in manifests.items():
            _write_labels(folder, split, manifest, images[split])
            _remove_others(folder, split, images[split])
        data_yaml = _write_yaml(folder, next(iter(manifests.values())).classes, list(manifests))
        _replace(folder / _MARK, json.dumps({"digests": digests, "complete": True}).encode())
    return LocalDataset(folder, data_yaml, images)


def local_name(image: str, sha256: str) -> str:
    """File name of an image in the flat folder of its split: readable, unique, safe on every filesystem.

    >>> local_name("site 1/images/원뿔 (소형).JPG", "0" * 64)
    '원뿔_소형-7ae2ac48b4.jpg'
    """
    stem, dot, suffix = image.rpartition("/")[2].rpartition(".")
    words = "".join(c if c.isalnum() or c in "-_" else " " for c in stem).split()
    short = "_".join(words).encode()[:80].decode(errors="ignore")
    key = hashlib.sha256(f"{image}\0{sha256}".encode()).hexdigest()[:10]
    return f"{short}-{key}.{suffix.lower()}" if dot else f"{short}-{key}"


def label_lines(boxes: Floats, crowd: Bools) -> str:
    """The text of a YOLO label file. Crowds are left out: YOLO has no way to say "do not judge here".

    Args:
        boxes: class, cx, cy, w, h, shape (n, 5).
        crowd: shape (n,).
    """
    return "".join(f"{int(c)} {x!r} {y!r} {w!r} {h!r}\n" for c, x, y, w, h in boxes[~crowd].tolist())


@contextlib.contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Holds a lock that the kernel drops when its process dies, however it dies."""
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _claim(folder: Path, digests: dict[str, str]) -> None:
    mark = folder / _MARK
    if not mark.exists():
        others = [p.name for p in folder.iterdir() if p.name != ".lock"]
        if others:
            raise InvalidInput(
                f"a folder with {len(others)} files that are not ours, such as {sorted(others)[0]!r}",
                expected="a new or empty folder, or one made by an earlier call", where=str(folder),
                next_step="choose another folder",
            )  # fmt: skip
    _replace(mark, json.dumps({"digests": digests, "complete": False}).encode())


def _plan(folder: Path, split: str, manifest: Manifest, wanted: list[_Wanted]) -> list[Path]:
    target = folder / "images" / split
    target.mkdir(parents=True, exist_ok=True)
    columns = [manifest.table.column(c).to_pylist() for c in ("image", "bytes", "sha256")]
    paths = []
    for image, size, sha256 in zip(*columns, strict=True):
        path = target / local_name(image, sha256)
        wanted.append(_Wanted(image, path, size, sha256))
        paths.append(path)
    return paths


def _link(store: LocalStore, wanted: list[_Wanted], meter: Meter, *, verify: bool) -> None:
    root = store.root.resolve()
    changed: list[Problem] = []
    for one in wanted:
        source = root / one.source
        try:
            size = source.stat().st_size
        except OSError:
            changed.append(Problem(one.source, "missing"))
            continue
        if size != one.bytes:
            changed.append(Problem(one.source, f"{size} bytes, the manifest says {one.bytes}"))
        elif verify and _sha256(source) != one.sha256:
            changed.append(Problem(one.source, "same size, other content"))
        elif not (one.target.is_symlink() and os.readlink(one.target) == str(source)):  # noqa: PTH115 - 3x faster here
            part = one.target.with_name(f".part-{one.target.name}")
            part.unlink(missing_ok=True)
            part.symlink_to(source)
            part.replace(one.target)
        meter.add()
    if changed:
        raise _changed(store, changed)


def _download(store: Store, wanted: list[_Wanted], folder: Path, downloads: int, meter: Meter) -> None:
    """Fetch what is not there yet. A file gets its final name only after its sha256 was verified."""
    todo = [one for one in wanted if not _complete(one)]
    meter.add(len(wanted) - len(todo))
    needed, free = sum(one.bytes for one in todo) + _SPARE_BYTES, shutil.disk_usage(folder).free
    if needed > free:
        raise InvalidInput(
            f"{free >> 20} MiB free for {needed >> 20} MiB of images", expected="enough disk", where=str(folder),
            next_step="give the pod a larger ephemeral volume, or mount the dataset",
        )  # fmt: skip
    changed: list[Problem] = []

    def fetch(one: _Wanted) -> None:
        found = _fetch(store, one)
        if found:
            changed.append(Problem(one.source, found))
        meter.add()

    with ThreadPoolExecutor(max(1, downloads)) as pool:
        for start in range(0, len(todo), 1024):  # a million futures at once would hold memory for nothing
            futures = [pool.submit(fetch, one) for one in todo[start : start + 1024]]
            done, waiting = wait(futures, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
            for future in done:
                future.result()
    if changed:
        raise _changed(store, sorted(changed, key=lambda p: p.where))


def _complete(one: _Wanted) -> bool:
    return one.target.is_file() and not one.target.is_symlink() and one.target.stat().st_size == one.bytes


def _fetch(store: Store, one: _Wanted) -> str:
    """Download, verify, rename. Returns what differs from the manifest, "" if nothing."""
    part = one.target.with_name(f".part-{one.target.name}")
    try:
        store.download(one.source, part)
    except InvalidInput as error:
        if error.found == "does not exist":
            return "missing"
        raise
    size = part.stat().st_size
    if size != one.bytes or _sha256(part) != one.sha256:
        part.unlink()
        return f"{size} bytes, the manifest says {one.bytes}" if size != one.bytes else "same size, other content"
    part.replace(one.target)
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _changed(store: Store, problems: list[Problem]) -> InvalidInput:
    return InvalidInput(
        f"{len(problems)} images are not what the manifest describes",
        expected="the files as they were when it was made", where=store.uri, problems=problems,
        next_step="restore them, or split again with another dataset_revision (which renews the cached step)",
    )  # fmt: skip


def _write_labels(folder: Path, split: str, manifest: Manifest, images: list[Path]) -> None:
    target = folder / "labels" / split
    target.mkdir(parents=True, exist_ok=True)
    for row, image in zip(manifest.rows(), images, strict=True):
        path = target / f"{image.stem}.txt"
        text = label_lines(row.boxes, row.crowd)
        # Labels are small and differ between manifests of the same images: written unless equal.
        if not path.is_file() or path.read_text() != text:
            _replace(path, text.encode())


def _remove_others(folder: Path, split: str, images: list[Path]) -> None:
    """An earlier manifest's images in the folder would be trained on; its cache would be believed."""
    kept = {p.name for p in images}
    labels = {f"{p.stem}.txt" for p in images}
    for target, names in ((folder / "images" / split, kept), (folder / "labels" / split, labels)):
        for path in target.iterdir():
            if path.name not in names:
                path.unlink()
    for other in ("images", "labels"):
        (folder / other / f"{split}.cache").unlink(missing_ok=True)


def _write_yaml(folder: Path, classes: tuple[str, ...], splits: list[str]) -> Path:
    """No `path` and no `download`: Ultralytics then takes the folder of the file as the root, on any machine.

    It demands `train` and `val` even for a validation alone, so a missing one names another split's folder.
    """
    lines = []
    for key in ("train", "val", "test"):
        if key in splits or key != "test":
            lines.append(f"{key}: images/{key if key in splits else splits[0]}")
    # A JSON string is a YAML string, once what ends a line in YAML alone, or is unprintable there, is written out.
    lines.append("names:")
    names = [_UNPRINTABLE.sub(lambda m: f"\\u{ord(m[0]):04x}", json.dumps(n, ensure_ascii=False)) for n in classes]
    lines += [f"  {i}: {name}" for i, name in enumerate(names)]
    path = folder / "data.yaml"
    _replace(path, ("\n".join(lines) + "\n").encode())
    return path


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".part-{os.getpid()}-{path.name}")
    part.write_bytes(data)
    part.replace(path)
