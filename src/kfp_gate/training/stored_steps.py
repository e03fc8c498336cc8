"""The complete checkpoints that a store holds, and their files; `kfp_gate.training.checkpoints` writes them."""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.model_folder import sha256_of
from kfp_gate.storage import Store, open_store

log = logging.getLogger(__name__)

POINTER, MANIFEST, STATE, RECORD = "latest.json", "manifest.json", "state.pt", "record.json"


@dataclass(frozen=True)
class Stored:
    """A file of a checkpoint: its key in the store, digest and size in bytes."""

    key: str
    sha256: str
    bytes: int


@dataclass(frozen=True)
class Step:
    """A complete checkpoint in a store."""

    key: str
    epoch: int
    files: Mapping[str, Stored]
    finished: bool = False
    run: str = ""


def find_latest(uri: str, *, run: str = "") -> Step | None:
    """The newest complete step at a URI; None if there is none. `run` as for `find_steps`.

    Raises:
        Unavailable: the store does not answer.
    """
    return next(find_steps(uri, run=run), None)


def find_steps(uri: str, *, run: str = "") -> Iterator[Step]:
    """All complete steps at a URI, the one to resume from first, then older ones.

    Args:
        uri: of the store.
        run: a pipeline run: the steps of other runs are left out. Empty: all. Several runs may be given one URI, and
            none may take another's finished training for its own.

    Raises:
        Unavailable: the store does not answer.
    """
    store = open_store(uri)
    pointed = _pointed(store)
    if pointed is not None and _is_of(pointed, run):
        yield pointed
    # The pointer may be missing or ahead of what is left: any step with a manifest is complete.
    manifests = sorted((e.key for e in store.list("steps/") if e.key.endswith(f"/{MANIFEST}")), reverse=True)
    for key in manifests:
        step = _step(store, key.removesuffix(f"/{MANIFEST}"), None)
        if step is not None and _is_of(step, run) and (pointed is None or step.key != pointed.key):
            yield step


def _is_of(step: Step, run: str) -> bool:
    return not run or step.run in ("", run)


def fetch(uri: str, step: Step, names: list[str], folder: Path) -> dict[str, Path]:
    """Download files of a step and compare their digests.

    Raises:
        Broken: a file is missing or is not the one that the manifest describes.
        Unavailable: the store does not answer.
    """
    store = open_store(uri)
    found = {}
    for name in names:
        stored = step.files.get(name)
        target = folder / name
        problem = "is not in the manifest" if stored is None else ""
        if stored is not None:
            try:
                store.download(stored.key, target)
            except InvalidInput as error:
                problem = error.found
            else:
                if sha256_of(target) != stored.sha256:
                    problem = "has another sha256 than the manifest says"
        if problem:
            raise Broken(
                f"{name} {problem}", expected="the file that the checkpoint's manifest describes",
                where=f"{uri}/{step.key}", next_step="resume from another checkpoint: this one is damaged",
            )  # fmt: skip
        found[name] = target
    return found


def _pointed(store: Store) -> Step | None:
    try:
        pointer = json.loads(store.read(POINTER))
        return _step(store, str(pointer["step"]), str(pointer["manifest_sha256"]))
    except InvalidInput:
        return None
    except (ValueError, KeyError, TypeError):
        log.warning("%s/%s is not readable; looking for the newest complete step instead", store.uri, POINTER)
        return None


def _step(store: Store, key: str, digest: str | None) -> Step | None:
    try:
        raw = store.read(f"{key}/{MANIFEST}")
        if digest is not None and sha256(raw).hexdigest() != digest:
            log.warning("%s/%s is not the manifest that the pointer means", store.uri, key)
            return None
        values: dict[str, Any] = json.loads(raw)
        files = {name: Stored(**stored) for name, stored in values["files"].items()}
        return Step(key, int(values["epoch"]), files, bool(values["finished"]), str(values.get("run", "")))
    except (InvalidInput, ValueError, KeyError, TypeError):
        return None
