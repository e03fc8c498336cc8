"""The tracking server and the registry: reached, of a usable version, writable, and with names that they take."""

import logging
import uuid
from pathlib import Path
from tempfile import TemporaryDirectory

from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.preflight.checks import Check, error, from_error, guarded, ok, warning
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.registry.artifacts import get_run_file, put_run_file
from kfp_gate.registry.fetch import find_version
from kfp_gate.registry.names import alias_problems, name_problems
from kfp_gate.registry.pipeline_run import parent_run
from kfp_gate.registry.tracking import Tracking, connect
from kfp_gate.registry.versions import aliases, get_version
from kfp_gate.tracking_address import URI_VARIABLE, resolve

log = logging.getLogger(__name__)

PATIENCE = 15.0
"""Seconds: a server that is just restarting should not stop a pipeline, a dead one should."""

OLDEST = (3, 0)
"""Logged models came with MLflow 3."""


def check_tracking(request: PreflightRequest) -> list[Check]:
    """Everything about MLflow that training, gate and registration will rely on."""
    checks = _names(request)
    try:
        resolve(request.tracking_uri)
    except InvalidInput as problem:
        if problem.found == "no tracking server" and not request.registered_model:
            why, cure = "no metric, verdict or outcome is kept in MLflow", f"set tracking_uri or {URI_VARIABLE}"
            return [*checks, warning("no tracking server is named", why=why, cure=cure)]
        return checks + from_error(problem, why="nothing can be registered, and no step may talk to this server")
    why = "training would lose its metrics, and the registration after it would fail"
    try:
        tracking = connect(request.tracking_uri, experiment=request.experiment, patience=PATIENCE)
    except KfpGateError as problem:
        return checks + from_error(problem, why=why)
    checks += guarded(lambda: [_version(tracking)], why=why)
    checks += guarded(lambda: [_writable(tracking, request.run_id)], why=why)
    if request.registered_model and not name_problems(request.registered_model):
        name = request.registered_model
        checks += guarded(lambda: [_registry(tracking, name)], why="the model could not be registered")
        if request.alias and not alias_problems(request.alias):
            checks += guarded(
                lambda: [_alias(tracking, request)], why="the registration could not move the alias after the training"
            )
    if request.gate.champion.startswith("models:"):
        checks += guarded(lambda: [_champion(tracking, request)], why="the gate could not compare with the champion")
    return checks


def _names(request: PreflightRequest) -> list[Check]:
    if not request.registered_model:
        return [ok("nothing is registered: registered_model is empty")]
    problems = name_problems(request.registered_model) + alias_problems(request.alias)
    return [
        error(f"{p.where}: {p.found}", why="MLflow would refuse it after the training", cure="choose another name")
        for p in problems
    ]


def _version(tracking: Tracking) -> Check:
    """What the server says it is. A server that says nothing is no error: proxies may hide the address."""
    if not tracking.address.is_server:
        from mlflow.version import VERSION

        return ok(f"tracking file {tracking.where}, MLflow {VERSION}")
    from mlflow.tracking._tracking_service.utils import get_default_host_creds
    from mlflow.utils.rest_utils import http_request

    answer = tracking.call(
        "asking for the server's version", http_request, get_default_host_creds(tracking.address.uri), "/version", "GET"
    )
    said = answer.text.strip()[:40] if answer.status_code == 200 else ""
    numbers = said.split(".")[:2]
    if len(numbers) < 2 or not all(n.isdigit() for n in numbers):
        return warning(
            f"the tracking server at {tracking.where} does not tell its version",
            why="registration needs MLflow 3", cure="ask its operator, or call /version past the proxy",
        )  # fmt: skip
    if tuple(map(int, numbers)) < OLDEST:
        return error(
            f"the tracking server at {tracking.where} is MLflow {said}",
            why="it has no logged models, in which the registration keeps weights, verdict and report",
            cure="upgrade the server to MLflow 3",
        )
    return ok(f"tracking server {tracking.where}, MLflow {said}")


def _writable(tracking: Tracking, run_id: str) -> Check:
    """Write a tag and a file as the later steps will, and read the file back."""
    client = tracking.client
    temporary = not run_id
    if temporary:
        made = tracking.call("opening a run", client.create_run, tracking.experiment_id, run_name="preflight probe")
        run = str(made.info.run_id)
    else:
        run = parent_run(tracking, run_id)
    try:
        tracking.call("writing a tag", client.set_tag, run, "kfp_gate.preflight", "probed")
        content = uuid.uuid4().hex
        with TemporaryDirectory(prefix="kfp-gate-") as folder:
            path = Path(folder, "probe.txt")
            Path(folder, "back").mkdir()
            path.write_text(content, encoding="utf-8")
            put_run_file(tracking, run, path, "preflight")
            back = get_run_file(tracking, run, "preflight/probe.txt", Path(folder, "back")).read_text(encoding="utf-8")
            if back != content:
                return error(
                    f"a file written to {tracking.where} came back with {len(back)} other bytes",
                    why="a registered model would not be the one that was judged",
                    cure="check the artifact store and the proxies before it",
                )
    finally:
        if temporary:
            tracking.call("removing the probe's run", client.delete_run, run)
    return ok(f"runs and artifacts can be written to {tracking.where}")


def _registry(tracking: Tracking, name: str) -> Check:
    """Whether versions of `name` may be made. What exists is touched by one tag, what does not exist is not made."""
    client = tracking.client
    if aliases(tracking, name) is not None:
        tracking.call(
            "writing a tag to the registered model",
            client.set_registered_model_tag,
            name,
            "kfp_gate.preflight",
            "probed",
        )
        return ok(f"the registered model {name!r} exists and can be written to")
    probe = f"kfp-gate-probe-{uuid.uuid4().hex[:12]}"
    tracking.attempt("creating a registered model", "RESOURCE_ALREADY_EXISTS", client.create_registered_model, probe)
    tracking.attempt("removing it again", "RESOURCE_DOES_NOT_EXIST", client.delete_registered_model, probe)
    return ok(f"registered models can be made; {name!r} does not exist yet")


def _alias(tracking: Tracking, request: PreflightRequest) -> Check:
    name, alias = request.registered_model, request.alias
    at = (aliases(tracking, name) or {}).get(alias)
    if at is None:
        return ok(f"alias {alias!r} of {name!r} is not set yet: the first model that passes gets it")
    if request.gate.champion.startswith("models:"):
        try:
            compared = find_version(tracking, request.gate.champion)
        except InvalidInput:
            compared = None  # told by the check of the champion
        if compared is None or (compared.name == name and compared.number == at):
            return ok(f"alias {alias!r} of {name!r} stands at version {at}, which the gate compares with")
        found = f"{compared.name}, version {compared.number}"
    else:
        found = request.gate.champion or "nothing"
    return error(
        f"alias {alias!r} of {name!r} stands at version {at}, and the gate compares with {found}",
        why="the alias is moved only from the version that the gate compared with: the registration would stop",
        cure=f"set champion to models:/{name}@{alias}, or alias to an empty text",
    )


def _champion(tracking: Tracking, request: PreflightRequest) -> Check:
    try:
        version = find_version(tracking, request.gate.champion)
    except InvalidInput as problem:
        if problem.found.startswith(("no alias", "no registered model")):
            return ok(f"there is no champion {request.gate.champion} yet: nothing is compared with")
        raise
    if not get_version(tracking, version.name, version.number).sha256:
        return error(
            f"the champion {version.uri} has no sha256 tag",
            why="it was registered by other means and cannot be verified",
            cure="register it through gate_existing_model first",
        )  # fmt: skip
    return ok(f"the champion is {version.uri}")
