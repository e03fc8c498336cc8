"""One small door to files: a local folder or an S3 prefix, with atomic writes.

URIs: a plain path, `file:///path`, or `s3://bucket/prefix`. Credentials come from the environment or a
mounted file (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, web identity), never from
a URI. The endpoint is `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`; TLS is on unless that says `http://`.
"""

import io
import os
import random
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, Protocol, TypeVar, cast
from urllib.parse import unquote, urlsplit

from kfp_gate.errors import InvalidInput, Unavailable

PIECE = 1 << 20
"""Bytes a streamed download holds in memory at a time."""

ATTEMPTS = 5
"""How often an operation, or the continuation of a cut download, is tried before the store counts as unavailable."""

FIRST_DELAY_S = 0.2
"""Wait before the second attempt; doubled each time, with up to as much again at random."""

CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 5.0, 60.0
"""A store that is down is noticed in seconds; one that is slow to send is waited for."""

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One stored object: key relative to the store's root, size in bytes, and an opaque version mark."""

    key: str
    size: int
    etag: str


class Readable(Protocol):
    """What a reader of datasets needs of a store."""

    uri: str

    def read(self, key: str) -> bytes: ...
    def open(self, key: str) -> BinaryIO: ...


class Store(Protocol):
    """A folder or prefix. Keys are relative, with forward slashes.

    Every method raises `InvalidInput` for a missing key or bucket and for refused credentials, and
    `Unavailable` when the service does not answer after retries.
    """

    uri: str

    def list(self, prefix: str = "") -> Iterator[Entry]: ...
    def exists(self, key: str) -> bool: ...
    def read(self, key: str) -> bytes: ...
    def open(self, key: str) -> BinaryIO: ...
    def write(self, key: str, data: bytes) -> None: ...
    def download(self, key: str, path: Path) -> None: ...
    def upload(self, path: Path, key: str) -> None: ...
    def delete(self, key: str) -> None: ...


def open_store(uri: str) -> Store:
    """The store behind a URI.

    Raises:
        InvalidInput: the scheme is not one of path, file:// or s3://, or the URI carries credentials.
    """
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme == "s3":
        parts = urlsplit(uri)
        if "@" in parts.netloc:
            raise InvalidInput(
                "an s3:// URI with credentials in it", expected="s3://bucket/prefix", where="URI",
                next_step="put the credentials into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
            )  # fmt: skip
        return S3Store(parts.netloc, uri.removeprefix(f"s3://{parts.netloc}").strip("/"))
    if scheme in ("", "file"):
        return LocalStore(local_path(uri))
    raise InvalidInput(
        f"URI {uri!r}", expected="a path, file:///path or s3://bucket/prefix", where="URI",
        next_step="write the location in one of these forms",
    )  # fmt: skip


def local_path(uri: str) -> Path:
    """The path of a plain or file:// URI."""
    return Path(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri).expanduser()


def local_folder(uri: str, scratch: Path) -> Path:
    """The folder behind a URI on this machine: itself if it is local, else downloaded into `scratch`.

    Raises:
        InvalidInput: nothing lies there.
    """
    store = open_store(uri)
    if isinstance(store, LocalStore):
        return store.root
    keys = [entry.key for entry in store.list()]
    if not keys:
        raise _missing(uri)
    targets = [path_within(scratch, key, uri) for key in keys]
    for key, target in zip(keys, targets, strict=True):
        store.download(key, target)
    return scratch


def path_within(folder: Path, key: str, where: str) -> Path:
    """The path of an object in a folder that it is to be copied to.

    Raises:
        InvalidInput: the key would leave the folder. Any text is a key: `prefix//etc/x` lists as `/etc/x`.
    """
    if key.startswith("/") or ".." in key.split("/"):
        raise InvalidInput(
            f"object {key!r}", expected="keys that are paths inside a folder", where=where,
            next_step="remove or rename the object",
        )  # fmt: skip
    return folder / key


class LocalStore:
    """A folder. Writes go to a temporary name first: readers see the old content or the new, never a half."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        yield from _walk(str(self.root), "", prefix, ())

    def exists(self, key: str) -> bool:
        return (self.root / key).is_file()

    def read(self, key: str) -> bytes:
        try:
            with open(f"{self.root}/{key}", "rb", buffering=0) as handle:  # noqa: PTH123 - 2x faster for small files
                return handle.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise _missing(f"{self.uri}/{key}") from None
        except OSError as error:
            raise _unreadable(f"{self.uri}/{key}", error) from None

    def open(self, key: str) -> BinaryIO:
        return self._existing(key).open("rb")

    def write(self, key: str, data: bytes) -> None:
        with self._replacing(key) as part:
            part.write_bytes(data)

    def download(self, key: str, path: Path) -> None:
        source = self._existing(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".part-{os.getpid()}-{path.name}")
        try:
            shutil.copyfile(source, part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def upload(self, path: Path, key: str) -> None:
        with self._replacing(key) as part:
            shutil.copyfile(path, part)

    def delete(self, key: str) -> None:
        (self.root / key).unlink(missing_ok=True)

    def _existing(self, key: str) -> Path:
        path = self.root / key
        if not path.is_file():
            raise _missing(f"{self.uri}/{key}")
        return path

    def _replacing(self, key: str) -> "_Replacing":
        return _Replacing(self.root / key)


class _Replacing:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".part-", dir=self.target.parent)
        os.close(handle)
        self.part = Path(name)
        return self.part

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            with self.part.open("rb") as handle:
                os.fsync(handle.fileno())
            self.part.replace(self.target)
        else:
            self.part.unlink(missing_ok=True)


def _walk(root: str, base: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[Entry]:
    """Files in the order of their names, folder by folder; a link to a folder further up is not followed again."""
    try:
        with os.scandir(f"{root}/{base}") as found:
            items = sorted(found, key=lambda item: item.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise _unreadable(f"{root}/{base}", error) from None
    for item in items:
        key = base + item.name
        if item.is_dir():
            if key.startswith(prefix) or prefix.startswith(f"{key}/"):
                stat = item.stat()
                here = (stat.st_dev, stat.st_ino)
                if here not in above:
                    yield from _walk(root, f"{key}/", prefix, (*above, here))
        elif key.startswith(prefix) and not item.name.startswith(".part-"):
            try:
                stat = item.stat()
            except OSError:  # a dangling link, or a file removed meanwhile
                continue
            if not S_ISREG(stat.st_mode):  # a pipe among images would be read for ever
                continue
            yield Entry(key, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}")


class S3Store:
    """A prefix of a bucket on any S3-compatible service, through the minio client.

    Every operation is tried `ATTEMPTS` times with growing pauses. A download that is cut goes on at the byte where it
    stopped, on the condition that the object is still the same one.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.client = _s3_client()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        last = ""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with _S3Errors(f"{self.uri}/{prefix}"):
                    # After a cut the listing goes on behind the last key it gave.
                    for item in self.client.list_objects(
                        self.bucket, prefix=self.prefix + prefix, recursive=True, start_after=last or None
                    ):
                        last = item.object_name
                        if not item.is_dir and not last.endswith("/"):
                            yield Entry(last.removeprefix(self.prefix), item.size, item.etag.strip('"'))
                return
            except Unavailable:
                if attempt == ATTEMPTS:
                    raise
                _pause(attempt)

    def exists(self, key: str) -> bool:
        try:
            self._call(key, lambda: self.client.stat_object(self.bucket, self.prefix + key))
        except InvalidInput as error:
            if error.found == MISSING:
                return False
            raise
        return True

    def read(self, key: str) -> bytes:
        with self.open(key) as handle:
            return handle.read()

    def open(self, key: str) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_S3Reader(self, key), PIECE))

    def write(self, key: str, data: bytes) -> None:
        self._call(key, lambda: self.client.put_object(self.bucket, self.prefix + key, io.BytesIO(data), len(data)))

    def download(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".part-{os.getpid()}-{path.name}")
        try:
            with _S3Reader(self, key) as source, part.open("wb") as target:
                buffer = memoryview(bytearray(PIECE))
                while count := source.readinto(buffer):
                    target.write(buffer[:count])
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def upload(self, path: Path, key: str) -> None:
        self._call(key, lambda: self.client.fput_object(self.bucket, self.prefix + key, str(path)))

    def delete(self, key: str) -> None:
        self._call(key, lambda: self.client.remove_object(self.bucket, self.prefix + key))

    def _call(self, key: str, operation: Callable[[], T]) -> T:
        """The minio client does not repeat POST requests (which complete a multipart upload): so this does."""
        attempt = 1
        while True:
            try:
                with _S3Errors(f"{self.uri}/{key}"):
                    return operation()
            except Unavailable:
                if attempt == ATTEMPTS:
                    raise
                _pause(attempt)
                attempt += 1


class _S3Reader(io.RawIOBase):
    """The bytes of one object; a cut connection is opened again at the byte where it broke."""

    def __init__(self, store: S3Store, key: str) -> None:
        self.store, self.key, self.where = store, key, f"{store.uri}/{key}"
        self.position, self.size, self.etag = 0, -1, ""
        self.response: Any = None
        self._again(lambda: None)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self.position == self.size:
            return 0
        count: int = self._again(lambda: self._take(memoryview(buffer)))
        return count

    def close(self) -> None:
        self._drop()
        super().close()

    def _take(self, buffer: memoryview) -> int:
        data = self.response.read(len(buffer))
        if not data:
            raise OSError(f"the connection ended at byte {self.position} of {self.size}")
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)

    def _again(self, step: Callable[[], Any]) -> Any:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with _S3Errors(self.where):
                    if self.response is None:
                        self._connect()
                    return step()
            except Unavailable:
                self._drop()
                if attempt == ATTEMPTS:
                    raise
                _pause(attempt)
        raise AssertionError("unreachable")

    def _connect(self) -> None:
        headers = {"If-Match": f'"{self.etag}"'} if self.etag else None
        self.response = self.store.client.get_object(
            self.store.bucket, self.store.prefix + self.key, offset=self.position, request_headers=headers
        )
        if not self.etag:
            self.etag = self.response.headers.get("ETag", "").strip('"')
            self.size = int(self.response.headers["Content-Length"])

    def _drop(self) -> None:
        if self.response is not None:
            self.response.close()
            self.response.release_conn()
            self.response = None


def _pause(attempt: int) -> None:
    time.sleep(FIRST_DELAY_S * 2 ** (attempt - 1) * (1 + random.random()))  # noqa: S311 - spreads retries, no secret


def _s3_client() -> Any:
    import certifi
    import urllib3
    from minio import Minio
    from minio.credentials.providers import AWSConfigProvider, ChainedProvider, EnvAWSProvider, IamAwsProvider

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    return Minio(
        endpoint=parts.netloc,
        secure=parts.scheme != "http",
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        credentials=ChainedProvider([EnvAWSProvider(), AWSConfigProvider(), IamAwsProvider()]),
        # The client's own would wait five minutes for a dead server; attempts are counted by the store alone.
        http_client=urllib3.PoolManager(
            timeout=urllib3.Timeout(connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S),
            maxsize=64,
            cert_reqs="CERT_REQUIRED",
            ca_certs=os.environ.get("AWS_CA_BUNDLE") or os.environ.get("SSL_CERT_FILE") or certifi.where(),
            retries=False,
        ),
    )


class _S3Errors:
    """Turns what the client raises into the two errors of ours that a caller can act on."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        from minio.error import MinioException, S3Error
        from urllib3.exceptions import HTTPError

        if isinstance(error, S3Error):
            if error.code == "NoSuchBucket":
                raise InvalidInput(
                    f"no bucket {error.bucket_name!r}", expected="an existing bucket", where=self.where,
                    next_step="check the URI's spelling and AWS_ENDPOINT_URL_S3",
                ) from None  # fmt: skip
            if error.code in ("NoSuchKey", "NoSuchObject"):
                raise _missing(self.where) from None
            if error.code in ("PreconditionFailed", "InvalidRange"):
                raise InvalidInput(
                    "the object was replaced while it was read", expected="an object that stays as it is",
                    where=self.where, next_step="run again when nothing writes to this location",
                ) from None  # fmt: skip
            if error.code in _REFUSALS or (error.response is not None and error.response.status == 403):
                raise InvalidInput(
                    f"the store refused the credentials ({error.code})", expected="a key that may use this location",
                    where=self.where, next_step="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their permissions",
                ) from None  # fmt: skip
        if isinstance(error, ValueError) and "credential" in str(error).lower():
            raise InvalidInput(
                "no credentials", expected="AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a shared file or an identity",
                where=self.where, next_step="set them, in a cluster by the Secret the pipeline names",
            ) from None  # fmt: skip
        if isinstance(error, ValueError) and re.search(r"(bucket|object) name", str(error)):
            raise InvalidInput(
                str(error), expected="s3://bucket/prefix, the bucket of 3 to 63 letters, digits, dots and hyphens",
                where=self.where, next_step="check the URI's spelling",
            ) from None  # fmt: skip
        if isinstance(error, MinioException | HTTPError | OSError):
            text = f"{error.code}" if isinstance(error, S3Error) else f"{type(error).__name__}: {error}"
            raise Unavailable(
                f"the store did not answer as expected: {text}",
                expected="an S3 service", where=self.where,
                next_step="check AWS_ENDPOINT_URL_S3 and the service, then run again",
            ) from error  # fmt: skip


_REFUSALS = ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken", "InvalidToken")

MISSING = "does not exist"


def _unreadable(where: str, error: OSError) -> InvalidInput:
    return InvalidInput(
        f"cannot be read: {error.strerror}", expected="a readable file or folder", where=where,
        next_step="check its permissions and the mount",
    )  # fmt: skip


def _missing(where: str) -> InvalidInput:
    return InvalidInput(
        MISSING, expected="an existing file or object", where=where, next_step="check the location's spelling"
    )
