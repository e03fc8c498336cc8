"""Versions of a registered model: found by the digest of their weights, read back, told apart from rivals.

MLflow's registry checks nothing: it makes a second version on every retry and takes sources that do not exist. What
holds here: a version is made only after its files were read back and hashed, and for one digest the
lowest such version is the one; whoever finds a lower one removes their own.
"""

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfp_gate.errors import Broken, InvalidInput, KfpGateError, Unavailable
from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.registry.artifacts import get_folder
from kfp_gate.registry.tracking import Tracking, quoted

log = logging.getLogger(__name__)

SHA_TAG = "sha256"
MODEL_ID_TAG = "kfp_gate.model_id"
TOKEN_TAG = "kfp_gate.registration"  # noqa: S105  # the name of a tag
UNVERIFIED_TAG = "kfp_gate.unverified"


@dataclass(frozen=True)
class Version:
    """One version of a registered model, as MLflow tells it."""

    name: str
    number: int
    source: str
    tags: dict[str, str]
    ready: bool = True

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.number}"

    @property
    def sha256(self) -> str:
        return self.tags.get(SHA_TAG, "")

    @property
    def model_id(self) -> str:
        return self.tags.get(MODEL_ID_TAG, "") or (self.source[8:] if self.source.startswith("models:/m-") else "")


def all_versions(tracking: Tracking, name: str, sha256: str = "") -> list[Version]:
    """Versions of a model, the lowest first; with `sha256` only those of these weights."""
    wanted = f"name = {quoted(name)}" + (f" and tags.`{SHA_TAG}` = {quoted(sha256)}" if sha256 else "")
    found: list[Version] = []
    token = None
    while True:
        page = tracking.call(
            "looking for versions", tracking.client.search_model_versions, wanted, max_results=1000, page_token=token
        )
        found += [_version(v) for v in page]
        token = page.token
        if not token:
            return sorted(found, key=lambda v: v.number)


def get_version(tracking: Tracking, name: str, number: int | str) -> Version:
    """One version.

    Raises:
        InvalidInput: there is no such version.
    """
    found = tracking.attempt(
        "reading the version", "RESOURCE_DOES_NOT_EXIST", tracking.client.get_model_version, name, str(number)
    )
    if found is None:
        raise InvalidInput(
            f"no version {number} of model {name!r}", expected="an existing version", where=tracking.where,
            next_step="look up the versions in MLflow's model registry",
        )  # fmt: skip
    return _version(found)


def aliases(tracking: Tracking, name: str) -> dict[str, int] | None:
    """Alias to version number of a registered model; None if there is no such model.

    Read from the model: for an alias that is not set MLflow answers INVALID_PARAMETER_VALUE, as for a bad name.
    """
    model = tracking.attempt(
        "reading the model's aliases", "RESOURCE_DOES_NOT_EXIST", tracking.client.get_registered_model, name
    )
    return None if model is None else {alias: int(number) for alias, number in model.aliases.items()}


def location(tracking: Tracking, version: Version) -> str:
    """Where a version's files lie.

    Raises:
        Broken: the logged model behind the version was deleted.
    """
    if not version.model_id:
        uri = tracking.call(
            "finding the version's files",
            tracking.client.get_model_version_download_uri,
            version.name,
            str(version.number),
        )
        return str(uri)
    model = tracking.attempt(
        "reading the logged model", "RESOURCE_DOES_NOT_EXIST", tracking.client.get_logged_model, version.model_id
    )
    if model is None:
        raise Broken(
            f"logged model {version.model_id} was deleted", expected="the model that the version stands for",
            where=version.uri, next_step="register the model again from its pipeline",
        )  # fmt: skip
    return str(model.artifact_location)


def verify(tracking: Tracking, version: Version, keep: Path | None = None) -> None:
    """Read a version's files back and compare the weights with its sha256 tag.

    Args:
        keep: folder that the files go to once they are verified, replaced if it exists; None: they are removed.

    Raises:
        Broken: files are missing or are not those that were registered.
        InvalidInput: the version has no sha256 tag, or holds no model folder of ours.
        Unavailable: the store does not answer.
    """
    if not version.sha256:
        raise InvalidInput(
            "a version without a sha256 tag", expected="a version registered by kfp-gate", where=version.uri,
            next_step="register the model through register_model: a version made by other means cannot be verified",
        )  # fmt: skip
    if keep is not None:
        keep.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".part-", dir=keep and keep.parent) as part:
        folder = get_folder(tracking, location(tracking, version), Path(part, "model"))
        card = read_card(folder)
        if card.sha256 != version.sha256:
            raise Broken(
                f"weights with sha256 {card.sha256}", expected=version.sha256, where=version.uri,
                next_step="the stored files were replaced: do not use this version; register the model again",
            )  # fmt: skip
        if keep is not None:
            shutil.rmtree(keep, ignore_errors=True)
            folder.rename(keep)


def first_verified(tracking: Tracking, name: str, sha256: str) -> Version | None:
    """The lowest version of these weights whose files are still what they were; damaged ones are marked, and skipped.

    Raises:
        Unavailable: the store does not answer, so that nothing can be said.
    """
    for version in all_versions(tracking, name, sha256):
        if UNVERIFIED_TAG in version.tags or not version.ready:
            continue
        try:
            verify(tracking, version)
        except Unavailable:
            raise
        except KfpGateError as error:
            log.warning("version %d of %s cannot be used: %s", version.number, name, error.found)
            tracking.call(
                "marking a damaged version", tracking.client.set_model_version_tag,
                name, str(version.number), UNVERIFIED_TAG, error.found[:1000],
            )  # fmt: skip
            continue
        return version
    return None


def settle(tracking: Tracking, name: str, sha256: str) -> Version:
    """Agree with rivals on one version of these weights, the lowest, and remove the others that registrations made.

    Doubles come from registrations at the same time, from requests repeated because their answer was lost, and from
    steps that died before they came here. All were verified before they were made, so that any could stay; whoever
    looks keeps the lowest. A version that an alias stands at, or that was made by other means, is left alone.

    Raises:
        Broken: there is none.
    """
    found = [v for v in all_versions(tracking, name, sha256) if UNVERIFIED_TAG not in v.tags]
    if not found:
        raise Broken(
            "the version just made is not in the registry", expected="a version with these weights",
            where=tracking.where, next_step="see who deletes versions of this model, then run again",
        )  # fmt: skip
    first, doubles = found[0], [v for v in found[1:] if TOKEN_TAG in v.tags]
    standing = set((aliases(tracking, name) or {}).values()) if doubles else set()
    for version in doubles:
        if version.number in standing:
            continue
        gone = "RESOURCE_DOES_NOT_EXIST"  # a rival may remove it first
        tracking.attempt(
            "removing a doubled version", gone, tracking.client.delete_model_version, name, str(version.number)
        )
        if version.model_id and version.model_id not in {v.model_id for v in found if v is not version}:
            tracking.attempt("removing its logged model", gone, tracking.client.delete_logged_model, version.model_id)
    return first


def _version(found: Any) -> Version:
    return Version(found.name, int(found.version), str(found.source), dict(found.tags), str(found.status) == "READY")
