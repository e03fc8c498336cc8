"""A folder's way into an MLflow artifact location and back, with or without a proxying server.

A server that proxies artifacts takes them over http and needs no storage credentials here. Otherwise the location is
`s3://...`, for which MLflow would need boto3; the S3 client that this library uses everywhere does it instead.
"""

import shutil
from hashlib import file_digest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfp_gate.errors import Broken
from kfp_gate.registry.tracking import Tracking
from kfp_gate.storage import open_store, path_within


def put_folder(tracking: Tracking, model: Any, folder: Path) -> None:
    """Upload the files of `folder` to the location of a logged model.

    Raises:
        Unavailable: the store does not answer, or is full.
    """
    location = str(model.artifact_location)
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        key = path.relative_to(folder)
        if location.startswith("s3://"):
            open_store(location).upload(path, key.as_posix())
            continue
        within = key.parent.as_posix() if key.parent != Path() else None
        tracking.call(
            f"uploading {key.as_posix()}", tracking.client.log_model_artifact, model.model_id, str(path), within
        )


def get_folder(tracking: Tracking, location: str, folder: Path) -> Path:
    """Download everything at an artifact location into `folder`, which appears only when complete.

    Args:
        location: of a logged model or version, as MLflow names it: `mlflow-artifacts:/...`, `file:///...`, `s3://...`.

    Raises:
        Unavailable: the store does not answer.
        Broken: there is nothing at the location.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        target = Path(part, "files")
        target.mkdir()
        if location.startswith("s3://"):
            store = open_store(location)
            for entry in store.list():
                store.download(entry.key, path_within(target, entry.key, location))
        else:
            _download(tracking, location, target)
        if not any(p.is_file() for p in target.rglob("*")):
            raise Broken(
                "nothing is stored there", expected="the files of a model", where=location,
                next_step="the artifacts were deleted: register the model again from its pipeline",
            )  # fmt: skip
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    return folder


def put_run_file(tracking: Tracking, run: str, path: Path, within: str = "") -> None:
    """Upload one file beside an MLflow run, into the folder `within`.

    Raises:
        Unavailable: the store does not answer, or is full.
    """
    uri = _run_location(tracking, run)
    if uri.startswith("s3://"):
        open_store(uri).upload(path, f"{within}/{path.name}" if within else path.name)
        return
    tracking.call(f"uploading {path.name}", tracking.client.log_artifact, run, str(path), within or None)


def get_run_file(tracking: Tracking, run: str, key: str, folder: Path) -> Path:
    """Download one file of an MLflow run into `folder`; returns its path there."""
    uri = _run_location(tracking, run)
    if uri.startswith("s3://"):
        open_store(uri).download(key, folder / key)
        return folder / key
    return Path(tracking.call(f"downloading {key}", tracking.client.download_artifacts, run, key, str(folder)))


def digests(folder: Path) -> dict[str, str]:
    """Relative path to sha256 of every file below `folder`."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as handle:
            found[path.relative_to(folder).as_posix()] = file_digest(handle, "sha256").hexdigest()
    return found


def _run_location(tracking: Tracking, run: str) -> str:
    return str(tracking.call("reading the run", tracking.client.get_run, run).info.artifact_uri)


def _download(tracking: Tracking, location: str, target: Path) -> None:
    from mlflow.artifacts import download_artifacts

    def fetch() -> None:
        with TemporaryDirectory(dir=target.parent) as attempt:
            # A fresh folder per attempt: what a cut connection left behind must not count as downloaded.
            got = Path(
                download_artifacts(artifact_uri=location, dst_path=attempt, tracking_uri=tracking.address.uri)
            ).resolve()
            if Path(attempt).resolve() in (got, *got.parents):
                shutil.copytree(got, target, dirs_exist_ok=True, copy_function=shutil.move)
            else:  # a local store is read in place
                shutil.copytree(got, target, dirs_exist_ok=True)

    tracking.call("downloading the model", fetch)
