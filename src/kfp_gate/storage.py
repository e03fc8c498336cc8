"""One small door to files: a local folder or an S3 prefix, with atomic writes.

URIs: a plain path, `file:///path`, or `s3://bucket/prefix`. Credentials come from the environment or a
mounted file (`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN`, web identity), never from
a URI. The endpoint is `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`; TLS is on unless that says `http://`.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from kfp_gate.errors import InvalidInput, Unavailable


@dataclass(frozen=True)
class Entry:
    """One stored object: key relative to the store's root, size in bytes, and an opaque version mark."""

    key: str
    size: int
    etag: str


class Store(Protocol):
    """A folder or prefix. Keys are relative, with forward slashes.

    Every method raises `InvalidInput` for a missing key or bucket and for refused credentials, and
    `Unavailable` when the service does not answer after retries.
    """

    uri: str

    def list(self, prefix: str = "") -> Iterator[Entry]: ...
    def exists(self, key: str) -> bool: ...
    def read(self, key: str) -> bytes: ...
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


class LocalStore:
    """A folder. Writes go to a temporary name first: readers see the old content or the new, never a half."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.uri = str(root)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        # os.walk with sorted names: a stable order, and no stat of anything but the files asked for.
        for folder, folders, files in os.walk(self.root, followlinks=True):
            folders.sort()
            for name in sorted(files):
                path = Path(folder, name)
                key = path.relative_to(self.root).as_posix()
                if key.startswith(prefix) and not name.startswith(".part-"):
                    stat = path.stat()
                    yield Entry(key, stat.st_size, f"{stat.st_size}-{stat.st_mtime_ns}")

    def exists(self, key: str) -> bool:
        return (self.root / key).is_file()

    def read(self, key: str) -> bytes:
        return self._existing(key).read_bytes()

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


class S3Store:
    """A prefix of a bucket on any S3-compatible service, through the minio client."""

    def __init__(self, bucket: str, prefix: str) -> None:
        self.bucket, self.prefix = bucket, f"{prefix}/" if prefix else ""
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self.client = _s3_client()

    def list(self, prefix: str = "") -> Iterator[Entry]:
        with _S3Errors(f"{self.uri}/{prefix}"):
            for item in self.client.list_objects(self.bucket, prefix=self.prefix + prefix, recursive=True):
                if not item.is_dir:
                    yield Entry(item.object_name.removeprefix(self.prefix), item.size, item.etag.strip('"'))

    def exists(self, key: str) -> bool:
        try:
            with _S3Errors(f"{self.uri}/{key}"):
                self.client.stat_object(self.bucket, self.prefix + key)
        except InvalidInput as error:
            if "does not exist" in error.found:
                return False
            raise
        return True

    def read(self, key: str) -> bytes:
        with _S3Errors(f"{self.uri}/{key}"):
            response = self.client.get_object(self.bucket, self.prefix + key)
            try:
                data: bytes = response.read()
            finally:
                response.close()
                response.release_conn()
        return data

    def write(self, key: str, data: bytes) -> None:
        import io

        with _S3Errors(f"{self.uri}/{key}"):
            self.client.put_object(self.bucket, self.prefix + key, io.BytesIO(data), len(data))

    def download(self, key: str, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _S3Errors(f"{self.uri}/{key}"):
            self.client.fget_object(self.bucket, self.prefix + key, str(path))

    def upload(self, path: Path, key: str) -> None:
        with _S3Errors(f"{self.uri}/{key}"):
            self.client.fput_object(self.bucket, self.prefix + key, str(path))

    def delete(self, key: str) -> None:
        with _S3Errors(f"{self.uri}/{key}"):
            self.client.remove_object(self.bucket, self.prefix + key)


def _s3_client() -> Any:
    from minio import Minio
    from minio.credentials.providers import AWSConfigProvider, ChainedProvider, EnvAWSProvider, IamAwsProvider

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or "https://s3.amazonaws.com"
    parts = urlsplit(endpoint if "://" in endpoint else f"https://{endpoint}")
    return Minio(
        endpoint=parts.netloc,
        secure=parts.scheme != "http",
        region=os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        credentials=ChainedProvider([EnvAWSProvider(), AWSConfigProvider(), IamAwsProvider()]),
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
            if error.code in ("NoSuchKey", "NoSuchBucket", "NoSuchObject"):
                raise _missing(self.where) from None
            if error.code in ("AccessDenied", "SignatureDoesNotMatch", "InvalidAccessKeyId", "ExpiredToken"):
                raise InvalidInput(
                    f"the store refused the credentials ({error.code})", expected="a key that may use this location",
                    where=self.where, next_step="check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and their permissions",
                ) from None  # fmt: skip
        if isinstance(error, MinioException | HTTPError | OSError):
            raise Unavailable(
                f"the store did not answer as expected: {type(error).__name__}: {error}",
                expected="an S3 service", where=self.where,
                next_step="check AWS_ENDPOINT_URL_S3 and the service, then run again",
            ) from error  # fmt: skip


def _missing(where: str) -> InvalidInput:
    return InvalidInput(
        "does not exist", expected="an existing file or object", where=where, next_step="check the location's spelling"
    )
