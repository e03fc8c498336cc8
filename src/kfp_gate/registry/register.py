"""Registration: a model that passed, once, with its files read back before anything points at them.

The order makes every interruption harmless. Files go up as a logged model, are read back and hashed, and only
then a version is made; the alias moves last. A step killed anywhere leaves at most files that nothing points at.
"""

import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfp_gate.errors import Broken, InvalidInput, KfpGateError
from kfp_gate.evaluation.model_folder import ModelCard, read_card, refuse_probe
from kfp_gate.gate.verdict import Verdict, read_verdict
from kfp_gate.metric_names import parse, to_mlflow
from kfp_gate.registry.alias import move_alias
from kfp_gate.registry.artifacts import digests, get_folder, put_folder
from kfp_gate.registry.names import check_names
from kfp_gate.registry.pipeline_run import REGISTRATION, child_run
from kfp_gate.registry.tracking import PATIENCE, PIPELINE_RUN_TAG, Tracking, connect
from kfp_gate.registry.versions import (
    MODEL_ID_TAG,
    SHA_TAG,
    TOKEN_TAG,
    Version,
    first_verified,
    settle,
)
from kfp_gate.tracking_address import URI_VARIABLE

log = logging.getLogger(__name__)

VERDICT_FILE, REPORT_FILE = "verdict.json", "report.html"
VERDICT_TAG = "kfp_gate.verdict_id"
ULTRALYTICS_LICENCE = "AGPL-3.0"
"""What Ultralytics claims for weights trained with it; a commercial licence of theirs replaces it."""


@dataclass(frozen=True)
class Registration:
    """A verified version in the registry.

    Attributes:
        name, version: as in `models:/name/version`.
        sha256: digest of the weights, read back from the registry.
        alias: the alias that stands at it; "" if none was asked for.
        previous: where the alias stood before; None if nowhere.
        created: False if a version of these weights was there already.
        verdict_id: digest of the verdict that let it pass.
    """

    name: str
    version: int
    sha256: str
    alias: str = ""
    previous: int | None = None
    created: bool = True
    verdict_id: str = ""
    model_id: str = ""
    run_id: str = ""

    @property
    def uri(self) -> str:
        return f"models:/{self.name}/{self.version}"


def register_model(
    model_folder: Path,
    verdict_path: Path,
    *,
    name: str,
    alias: str = "champion",
    tracking_uri: str = "",
    experiment: str = "",
    run_id: str = "",
    report: Path | None = None,
    licence: str = "",
    patience: float = PATIENCE,
) -> Registration:
    """Put a model that passed into the MLflow registry: once, verified, with its alias.

    A second call with the same weights, from a retry or from another pipeline, finds the first one's version.

    Args:
        model_folder: the model artifact of training.
        verdict_path: the gate's verdict on exactly these weights.
        name: of the registered model.
        alias: moved to the version if it stands where the gate saw it; "" leaves all aliases alone.
        tracking_uri, experiment: see `tracking.connect`.
        run_id: the pipeline run's id; "" makes no MLflow run.
        report: the gate's HTML report, kept beside the weights.
        licence: of the weights; "" says AGPL-3.0 for those trained with Ultralytics.
        patience: seconds to wait for a server that is away.

    Raises:
        InvalidInput: the verdict refused the model or judged another one; a bad name; an alias that was moved since the
            gate looked. In all but the last case nothing was written.
        Broken: the files read back are not those that were sent.
        Unavailable: the server is away. Running again registers nothing twice.
    """
    check_names(name, alias)
    card = read_card(model_folder)
    refuse_probe(card, str(model_folder))
    verdict = read_verdict(verdict_path)
    check_verdict(verdict, card, str(verdict_path))
    verdict_id = sha256(verdict_path.read_bytes()).hexdigest()[:16]
    tracking = connect(tracking_uri, experiment=experiment, patience=patience)
    own_run = child_run(tracking, run_id, REGISTRATION, f"register {name}") if run_id else ""
    tags = _tags(card, verdict, verdict_id, run_id, own_run, licence)

    tracking.attempt(
        "creating the registered model", "RESOURCE_ALREADY_EXISTS", tracking.client.create_registered_model, name
    )
    version = first_verified(tracking, name, card.sha256)
    created = False
    if version is None:
        with _bundle(model_folder, card, verdict_path, report) as bundle:
            version, created = _make(tracking, name, card, tags, bundle)
    else:
        version = settle(tracking, name, card.sha256)
    previous = None
    if alias:
        previous = move_alias(tracking, version, alias, seen_sha256=verdict.champion.sha256).previous
    registration = Registration(
        name, version.number, card.sha256, alias, previous, created, verdict_id, version.model_id, own_run
    )
    if own_run:
        _close_run(tracking, own_run, registration)
    log.info("%s is %s, sha256 %s", "registered" if created else "already registered", registration.uri, card.sha256)
    return registration


def check_verdict(verdict: Verdict, card: ModelCard, where: str) -> None:
    """Refuse a verdict that did not let exactly this model pass, whatever the pipeline's condition said.

    Raises:
        InvalidInput: it judged other weights, or it refused these.
        Broken: it says that it passed, and its own entries say otherwise.
    """
    judged = str(verdict.model.get("sha256", ""))
    if judged != card.sha256:
        raise InvalidInput(
            f"a verdict on the model with sha256 {judged or 'unknown'}", expected=f"a verdict on {card.sha256}",
            where=where, next_step="pass the model and the verdict of one and the same gate",
        )  # fmt: skip
    if not verdict.passed:
        raise InvalidInput(
            f"the gate refused this model ({verdict.headline})", expected="a verdict that passed", where=where,
            next_step="nothing was registered; read the gate's report. If this step ran all the same, the pipeline's "
            "condition does not test the gate's output",
        )  # fmt: skip
    if verdict.blocking or not verdict.entries:
        raise Broken(
            f"a verdict that passed with {len(verdict.blocking)} blocking of {len(verdict.entries)} criteria"
            if verdict.entries else "a verdict that passed without any criterion",
            expected="criteria, none of which blocks", where=where,
            next_step="nothing was registered; the verdict was edited or written by other code: run the gate again",
        )  # fmt: skip


def _make(
    tracking: Tracking, name: str, card: ModelCard, tags: Mapping[str, str], bundle: Path
) -> tuple[Version, bool]:
    """Upload, read back, make the version, agree with rivals. Whatever is not kept is removed again."""
    token = uuid.uuid4().hex
    model = tracking.call(
        "creating the logged model", tracking.client.create_logged_model, tracking.experiment_id,
        # A logged model's name has rules of its own, stricter than a registered model's; nothing is looked up by it.
        name=re.sub(r"""[/:.%"']""", "_", name)[:250],
        source_run_id=None, tags={**_logged_tags(tags), TOKEN_TAG: token}, params=_params(card), model_type="detector",
    )  # fmt: skip
    try:
        put_folder(tracking, model, bundle)
        with TemporaryDirectory(prefix="kfp-gate-") as part:
            _compare(digests(bundle), digests(get_folder(tracking, model.artifact_location, Path(part, "back"))), model)
        tracking.call("finishing the logged model", tracking.client.finalize_logged_model, model.model_id, "READY")
    except KfpGateError:
        _remove_unused(tracking, token, kept_id="")
        raise
    # From here on nothing is removed on failure: a request without an answer may still have made the version.
    tracking.call(
        "creating the version", _create_version, tracking, name, model.model_id,
        {**tags, MODEL_ID_TAG: model.model_id, TOKEN_TAG: token},
    )  # fmt: skip
    version = settle(tracking, name, card.sha256)
    ours = version.tags.get(TOKEN_TAG) == token
    _remove_unused(tracking, token, kept_id=model.model_id if ours else "")
    return version, ours


def _create_version(tracking: Tracking, name: str, model_id: str, tags: Mapping[str, str]) -> None:
    def create() -> None:
        # A server refuses a models:/ source whose id is not given beside it.
        tracking.client.create_model_version(name, f"models:/{model_id}", tags=dict(tags), model_id=model_id)

    if tracking.address.is_server:
        create()
        return
    # With a sqlite file MLflow looks the logged model up through its process-wide default, not through our client.
    from mlflow.tracking._tracking_service.utils import _use_tracking_uri

    own = os.environ.get(URI_VARIABLE)
    try:
        with _use_tracking_uri(tracking.address.uri):
            create()
    finally:
        # MLflow keeps its default in the environment, too, and empties it on the way back.
        os.environ.pop(URI_VARIABLE, None)
        if own is not None:
            os.environ[URI_VARIABLE] = own


def _compare(sent: Mapping[str, str], back: Mapping[str, str], model: Any) -> None:
    wrong = sorted(key for key in sent if back.get(key) != sent[key])
    if wrong:
        raise Broken(
            f"read back differently or not at all: {', '.join(wrong)}", expected="the bytes that were sent",
            where=str(model.artifact_location),
            next_step="nothing was registered; check the artifact store and proxies that may change or cut uploads",
        )  # fmt: skip


def _remove_unused(tracking: Tracking, token: str, kept_id: str) -> None:
    """Delete this registration's logged models that no version points at; what fails here is only told."""
    try:
        models = tracking.call(
            "looking for unused logged models", tracking.client.search_logged_models, [tracking.experiment_id],
            filter_string=f"tags.`{TOKEN_TAG}` = '{token}'",
        )  # fmt: skip
        for model in models:
            if model.model_id != kept_id:
                tracking.attempt(
                    "removing an unused logged model", "RESOURCE_DOES_NOT_EXIST",
                    tracking.client.delete_logged_model, model.model_id,
                )  # fmt: skip
    except KfpGateError as error:
        log.warning("logged models with tag %s=%s may be left over: %s", TOKEN_TAG, token, error.found)


class _bundle:  # noqa: N801  # reads as a context, like tempfile's functions
    """The folder that is uploaded: the model folder's files, the verdict, the report."""

    def __init__(self, folder: Path, card: ModelCard, verdict: Path, report: Path | None) -> None:
        self.parts = {"model.json": folder / "model.json", card.weights: folder / card.weights, VERDICT_FILE: verdict}
        if (folder / "fingerprints.parquet").is_file():
            self.parts["fingerprints.parquet"] = folder / "fingerprints.parquet"
        if report is not None and report.is_file():
            self.parts[REPORT_FILE] = report

    def __enter__(self) -> Path:
        self.temporary = TemporaryDirectory(prefix="kfp-gate-")
        folder = Path(self.temporary.name)
        for name, path in self.parts.items():
            try:
                (folder / name).hardlink_to(path.resolve())
            except OSError:  # another file system
                shutil.copyfile(path, folder / name)
        return folder

    def __exit__(self, *_: object) -> None:
        self.temporary.cleanup()


def _tags(
    card: ModelCard, verdict: Verdict, verdict_id: str, run_id: str, own_run: str, licence: str
) -> dict[str, str]:
    tags = {
        SHA_TAG: card.sha256,
        VERDICT_TAG: verdict_id,
        "kfp_gate.verdict": verdict.headline,
        "kfp_gate.separation": verdict.separation.state,
        "kfp_gate.test_digest": str(verdict.data.get("digest", "")),
        "kfp_gate.training_run": card.run_id,
        "kfp_gate.registration_run": own_run,
        "kfp_gate.image": card.image,
        "kfp_gate.versions": json.dumps(dict(card.versions), sort_keys=True),
        "kfp_gate.licence": licence or (ULTRALYTICS_LICENCE if "ultralytics" in card.versions else ""),
        PIPELINE_RUN_TAG: run_id,
        **{f"kfp_gate.manifest.{split}": digest for split, digest in card.manifests.items()},
        **metric_tags(verdict),
    }
    return {key: value for key, value in tags.items() if value}


def metric_tags(verdict: Verdict) -> dict[str, str]:
    """The judged values of the whole set as tags, `metric.<name>`; values per class are in the verdict beside."""
    return {
        f"metric.{to_mlflow(entry.metric)}": f"{entry.value:.6g}"
        for entry in verdict.entries
        if entry.value is not None and parse(entry.metric).class_name is None
    }


def _logged_tags(tags: Mapping[str, str]) -> dict[str, str]:
    # A logged model's tag holds less than a version's: 8000 characters.
    return {key: value for key, value in tags.items() if len(value) <= 5000}


def _params(card: ModelCard) -> dict[str, str]:
    return {
        "image_size": str(card.image_size),
        "classes": json.dumps(card.classes, ensure_ascii=False)[:5000],
        "class_count": str(len(card.classes)),
        "monitors": ",".join(card.monitors)[:5000],
        "chosen_by": card.chosen_by[:5000],
    }


def _close_run(tracking: Tracking, run: str, registration: Registration) -> None:
    for key, value in {
        "kfp_gate.registered": registration.uri,
        SHA_TAG: registration.sha256,
        VERDICT_TAG: registration.verdict_id,
    }.items():
        tracking.call("tagging the registration's run", tracking.client.set_tag, run, key, value)
    tracking.call("ending the registration's run", tracking.client.set_terminated, run, "FINISHED")
