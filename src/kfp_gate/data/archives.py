"""Annotations inside gzip and zip files, shown as if they had been unpacked in place."""

import gzip
import io
import posixpath
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from kfp_gate.errors import InvalidInput
from kfp_gate.storage import LocalStore, Readable

MEMBERS = (".json", ".xml", ".txt", ".yaml", ".yml", ".csv", ".names")
"""What is looked for in an archive. Images are read unpacked only."""


class UnpackedStore:
    """A store whose archived annotations can be read by the names they would have if unpacked.

    `labels.zip` with `labels/a.txt` or with `a.txt` gives `labels/a.txt`; `x.json.gz` gives `x.json`. A file that
    exists unpacked hides its archived twin.
    """

    def __init__(self, store: Readable, listing: dict[str, int]) -> None:
        self.store, self.uri = store, store.uri
        self.listing = dict(listing)
        self._members: dict[str, tuple[str, str]] = {}
        self._zips: dict[str, zipfile.ZipFile] = {}
        self.archived_images = 0
        for key in sorted(listing):
            if key.lower().endswith(".gz") and key[:-3].lower().endswith(MEMBERS):
                self._add(key[:-3], key, "", listing[key])
            elif key.lower().endswith(".zip"):
                self._open(key)

    def _open(self, key: str) -> None:
        try:
            archive = zipfile.ZipFile(self._seekable(key))
        except (zipfile.BadZipFile, OSError) as error:
            raise InvalidInput(
                f"not a zip file: {error}", expected="a complete zip file", where=f"{self.uri}/{key}",
                next_step="copy the file again, or remove it",
            ) from None  # fmt: skip
        infos = [i for i in archive.infolist() if not i.is_dir() and "__MACOSX/" not in i.filename]
        stem = posixpath.splitext(posixpath.basename(key))[0]
        # `unzip labels.zip` makes labels/ itself or pours out what belongs there.
        inside = "" if all(i.filename.startswith(f"{stem}/") for i in infos) else stem
        for info in infos:
            if info.filename.lower().endswith(MEMBERS):
                path = posixpath.normpath(posixpath.join(posixpath.dirname(key), inside, info.filename))
                self._add(path, key, info.filename, info.file_size)
            elif info.filename.lower().endswith((".jpg", ".jpeg", ".png")):
                self.archived_images += 1
        self._zips[key] = archive

    def _seekable(self, key: str) -> BinaryIO:
        if self.root is not None:
            return (self.root / key).open("rb")
        spool = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - lives as long as the store
        with self.store.open(key) as remote:
            while piece := remote.read(1 << 20):
                spool.write(piece)
        return spool

    def _add(self, path: str, archive: str, member: str, size: int) -> None:
        if path not in self.listing and not path.startswith(("../", "/")):
            self._members[path] = (archive, member)
            self.listing[path] = size

    @property
    def root(self) -> Path | None:
        """The folder, if this is one."""
        return self.store.root if isinstance(self.store, LocalStore) else None

    def open(self, key: str) -> BinaryIO:
        if key not in self._members:
            return self.store.open(key)
        archive, member = self._members[key]
        where = f"{self.uri}/{archive}"
        with _damage(where):
            inner = self._zips[archive].open(member) if member else gzip.GzipFile(fileobj=self.store.open(archive))
        return cast(BinaryIO, io.BufferedReader(_Member(inner, where), 1 << 20))

    def read(self, key: str) -> bytes:
        if key not in self._members:
            return self.store.read(key)
        with self.open(key) as handle:
            return handle.read()


class _Member(io.RawIOBase):
    """A file within an archive, whose damage shows while it is read, wherever it is read."""

    def __init__(self, inner: Any, where: str) -> None:
        self._inner, self._where = inner, where

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _damage(self._where):
            data = self._inner.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        self._inner.close()
        super().close()


@contextmanager
def _damage(where: str) -> Iterator[None]:
    """What the readers of archives raise, as one error. RuntimeError: a password, or a method they do not know."""
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise InvalidInput(
            f"broken archive: {error}", expected="a complete archive without a password", where=where,
            next_step="copy the file again, or unpack it",
        ) from None  # fmt: skip
