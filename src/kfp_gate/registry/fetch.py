"""A model by its URI, as a folder on this machine whose weights are what the registry says they are.

models:/NAME@champion   the version an alias stands at
models:/NAME/3          a version by its number
s3://bucket/prefix      a model folder, or a bare .pt or .onnx file
/path                   the same on this machine
"""

import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.model_folder import CARD, FINGERPRINTS, WEIGHTS, read_card
from kfp_gate.registry.tracking import PATIENCE, Tracking, open_client
from kfp_gate.registry.versions import Version, aliases, get_version, verify
from kfp_gate.storage import local_path, open_store

log = logging.getLogger(__name__)

_REGISTERED = re.compile(r"models:/(?P<name>[^/@:]+)(?:@(?P<alias>[^/@]+)|/(?P<number>\d+))")
_SUFFIXES = (".pt", ".onnx")


@dataclass(frozen=True)
class Champion:
    """The version that an alias stands at, fetched: what a candidate is compared with."""

    folder: Path
    uri: str
    version: int
    sha256: str


def fetch_model(uri: str, folder: Path, *, tracking_uri: str = "", patience: float = PATIENCE) -> Path:
    """Bring a model to this machine and verify it.

    Args:
        uri: see the head of this module.
        folder: where a remote model goes; replaced if it exists. A local model is used where it lies.
        tracking_uri: for `models:/`; see `tracking.connect`.

    Returns:
        The model folder; for a URI of a bare weights file, that file.

    Raises:
        InvalidInput: no such model, version or alias; or what lies there is no model.
        Broken: the weights are not those that were registered, or not those of their card.
        Unavailable: the registry or the store does not answer.
    """
    if uri.startswith("models:"):
        tracking = connect_for_reading(tracking_uri, patience)
        version = find_version(tracking, uri)
        verify(tracking, version, keep=folder)
        log.info("fetched %s (version %d), sha256 %s", uri, version.number, version.sha256)
        return folder
    if uri.startswith("s3://"):
        return _from_store(uri, folder)
    path = local_path(uri)
    if path.is_file() and path.suffix in _SUFFIXES:
        return path
    read_card(path)
    return path


def fetch_champion(
    name: str, alias: str, folder: Path, *, tracking_uri: str = "", patience: float = PATIENCE
) -> Champion | None:
    """The version that `alias` stands at; None where there is no champion yet, which is no error.

    Raises:
        InvalidInput, Broken, Unavailable: as `fetch_model`.
    """
    tracking = connect_for_reading(tracking_uri, patience)
    known = aliases(tracking, name) or {}
    if alias not in known:
        return None
    version = get_version(tracking, name, known[alias])
    verify(tracking, version, keep=folder)
    return Champion(folder, version.uri, version.number, version.sha256)


def champion_uri(champion: str, registered_model: str, alias: str) -> str:
    """The model to compare with, from the pipeline's parameters; "" for none.

    Args:
        champion: a model's location; "" is the version that `alias` of `registered_model` stands at, since the
            alias moves only from the version that the gate compared with; "none" compares with nothing.
    """
    if champion == "none":
        return ""
    return champion or (f"models:/{registered_model}@{alias}" if registered_model and alias else "")


def fetch_rival(uri: str, folder: Path, *, tracking_uri: str = "", patience: float = PATIENCE) -> Path | None:
    """As `fetch_model`, but None where the alias of a `models:/` URI stands nowhere yet: the first model ever."""
    match = _REGISTERED.fullmatch(uri)
    if match is None or not match["alias"]:
        return fetch_model(uri, folder, tracking_uri=tracking_uri, patience=patience)
    found = fetch_champion(match["name"], match["alias"], folder, tracking_uri=tracking_uri, patience=patience)
    return found.folder if found else None


def find_version(tracking: Tracking, uri: str) -> Version:
    """The version that a `models:/` URI names.

    Raises:
        InvalidInput: another form of URI, or no such model, alias or version; the message lists what there is.
    """
    match = _REGISTERED.fullmatch(uri)
    if match is None:
        raise InvalidInput(
            f"model URI {uri!r}", expected="models:/NAME@ALIAS or models:/NAME/NUMBER", where="model URI",
            next_step="write it in one of these forms; stages such as models:/NAME/Production are gone from MLflow 3",
        )  # fmt: skip
    name, alias, number = match["name"], match["alias"], match["number"]
    if number:
        return get_version(tracking, name, number)
    known = aliases(tracking, name)
    if known is None:
        raise InvalidInput(
            f"no registered model {name!r}", expected="an existing model", where=tracking.where,
            next_step="check the name, or register a model first",
        )  # fmt: skip
    if alias not in known:
        there = ", ".join(sorted(known)) or "it has none"
        raise InvalidInput(
            f"no alias {alias!r} on model {name!r}", expected=f"an existing alias ({there})", where=tracking.where,
            next_step="check the name, or register a model with this alias first",
        )  # fmt: skip
    return get_version(tracking, name, known[alias])


def connect_for_reading(tracking_uri: str, patience: float) -> Tracking:
    """A connection that makes no experiment: reading the registry must not leave traces."""
    return Tracking(*open_client(tracking_uri), "", patience)


def _from_store(uri: str, folder: Path) -> Path:
    base, _, last = uri.rstrip("/").rpartition("/")
    if last.endswith(_SUFFIXES):
        folder.mkdir(parents=True, exist_ok=True)
        open_store(base).download(last, folder / last)
        return folder / last
    store = open_store(uri)
    if not store.exists(CARD):
        raise InvalidInput(
            f"no {CARD} there", expected="a model folder, or a .pt or .onnx file", where=uri,
            next_step="give the prefix that holds model.json, or the weights file itself",
        )  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent, prefix=".part-") as part:
        target = Path(part, "model")
        store.download(CARD, target / CARD)
        for entry in store.list():
            # A checkpoint prefix may hold more than the model: only what belongs to a model folder is fetched.
            if entry.key == FINGERPRINTS or entry.key in WEIGHTS:
                store.download(entry.key, target / entry.key)
        read_card(target)
        if folder.exists():
            shutil.rmtree(folder)
        target.rename(folder)
    return folder
