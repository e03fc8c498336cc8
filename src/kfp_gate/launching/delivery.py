"""The way of a folder from rank 0's pod to the launcher: object storage, with a list of files that comes last."""

import hashlib
import json
import shutil
from pathlib import Path, PurePosixPath

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.storage import open_store

LIST_KEY = "delivered.json"


def upload_folder(folder: Path, uri: str) -> None:
    """Upload a folder below `uri`; the list of its files comes last, as the mark of a whole.

    Raises:
        Broken: the folder is empty or missing, though the worker reported success.
        InvalidInput, Unavailable: from the store.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else []
    if not files:
        raise no_model(str(folder))
    store = open_store(uri)
    listed = {}
    for path in files:
        key = path.relative_to(folder).as_posix()
        store.upload(path, key)
        listed[key] = _sha256(path)
    store.write(LIST_KEY, json.dumps(listed, sort_keys=True).encode())


def download_folder(uri: str, out: Path) -> None:
    """Fetch a delivered folder into `out` (replaced), verified by sha256.

    Raises:
        Broken: nothing complete was delivered, or a file differs from its digest.
        InvalidInput, Unavailable: from the store.
    """
    store = open_store(uri)
    try:
        listed = json.loads(store.read(LIST_KEY))
    except InvalidInput as error:
        raise no_model(f"{uri}/{LIST_KEY}") from error
    part = out.with_name(f".part-{out.name}")
    shutil.rmtree(part, ignore_errors=True)
    for key, digest in listed.items():
        if PurePosixPath(key).is_absolute() or ".." in PurePosixPath(key).parts:
            raise Broken(
                f"the delivered model lists the file {key!r}", expected="paths inside the model folder",
                where=f"{uri}/{LIST_KEY}", next_step="delete what lies there and train again",
            )  # fmt: skip
        store.download(key, part / key)
        if _sha256(part / key) != digest:
            raise Broken(
                f"{key} differs from the digest it was delivered with", expected=f"sha256 {digest}",
                where=f"{uri}/{key}",
                next_step="check that no other run writes to this checkpoint_uri, then train again",
            )  # fmt: skip
    shutil.rmtree(out, ignore_errors=True)
    part.replace(out)


def no_model(where: str) -> Broken:
    """The error for a success without a model."""
    return Broken(
        "all ranks ended well but rank 0 left no model", expected="a model folder", where=where,
        next_step="read the log of rank 0; a custom command must write its model to {out}/model",
    )  # fmt: skip


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
