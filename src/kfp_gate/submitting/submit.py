"""A compiled pipeline sent to a cluster: everything that can be wrong is said before, and nothing is sent twice.

The client is handed in (the command line makes a `kfp.Client`), so that this module needs no kfp.
"""

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential

from kfp_gate.errors import InvalidInput, Unavailable, hide_secrets
from kfp_gate.submitting.guessing import difference
from kfp_gate.submitting.parameters import Parameter, check, declared_in, pipeline_spec
from kfp_gate.submitting.values import check_values

ANSWER_SECONDS = 60.0
"""How long one call may take: the generated client has no timeout of its own and would wait for ever."""

Answer = TypeVar("Answer")


class Client(Protocol):
    """What is used of `kfp.Client`."""

    def create_experiment(self, name: str, description: Any = None, namespace: Any = None) -> Any:
        """Find an experiment by its name, or make it."""

    def run_pipeline(self, experiment_id: str, job_name: str, **how: Any) -> Any:
        """Create a run."""

    def get_run(self, run_id: str) -> Any:
        """State and tasks of a run."""


@dataclass(frozen=True)
class Submission:
    """What will be sent.

    Attributes:
        file: the compiled pipeline.
        spec: the same, read.
        arguments: by name, in the declared types; what is left out has its default.
        notes: what the sender should know although nothing is wrong.
    """

    file: Path
    spec: Mapping[str, Any]
    arguments: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def pipeline(self) -> str:
        """The pipeline's name."""
        return str(self.spec["pipelineInfo"]["name"])


@dataclass(frozen=True)
class RunOptions:
    """How a run is created.

    Attributes:
        experiment: the experiment of Kubeflow Pipelines that the run belongs to; made if absent.
        name: of the run; empty: the pipeline's name and the time.
        namespace: of the user in a multi-user installation; empty: the one of kfp's context.
        service_account, pipeline_root: empty: the installation's.
        caching: None leaves to the pipeline what is cached; False turns it off for all steps.
    """

    experiment: str = "kfp-gate"
    name: str = ""
    namespace: str = ""
    service_account: str = ""
    pipeline_root: str = ""
    caching: bool | None = None


def prepare(file: Path, given: Mapping[str, str], *, complete: bool = True) -> Submission:
    """Check names, types and values against the YAML, and against each other where the library knows them.

    Args:
        file: a compiled pipeline.
        given: text by parameter name. `@FILE` for a list or a dict reads the JSON from a file.
        complete: False reads the pipeline alone, for a run that was sent before.

    Raises:
        InvalidInput: with all problems of one kind at once.
    """
    text = _read(file, "the pipeline's YAML")
    spec = pipeline_spec(text, str(file))
    parameters = declared_in(spec)
    if not complete:
        return Submission(file, spec, {})
    texts = {name: _resolve(name, value, parameters) for name, value in given.items()}
    arguments = check(parameters, texts)
    defaults = {p.name: p.default for p in parameters.values() if not p.required}
    check_values(arguments, {**defaults, **arguments})
    return Submission(file, spec, arguments, tuple(_notes(spec, texts, parameters)))


def connected(make: Callable[[], Answer], where: str, *, seconds: float = ANSWER_SECONDS) -> Answer:
    """What `make` returns; its errors as ours.

    Raises:
        InvalidInput: the server refused the login.
        Unavailable: no answer.
    """
    try:
        return within(seconds, make)
    except Exception as error:
        raise explained(error, f"connecting to {where}") from error


def create(client: Client, submission: Submission, options: RunOptions, *, patience: float = 30.0) -> str:
    """Create the run and return its id.

    A call that surely did not arrive (connection refused, the gateway's 503) is repeated for `patience` seconds.
    A call that may have arrived is not: two runs would train, and the second might register.

    Raises:
        InvalidInput: the server refused it; the message is the server's.
        Unavailable: no answer.
    """
    retrying = Retrying(
        retry=retry_if_exception(_surely_not_done), stop=stop_after_delay(patience),
        wait=wait_exponential(multiplier=0.5, max=10), reraise=True,
    )  # fmt: skip
    name = options.name or f"{submission.pipeline} {time.strftime('%Y-%m-%d %H:%M:%S')}"
    step = "finding or making the experiment"
    try:
        experiment = retrying(
            within, ANSWER_SECONDS, client.create_experiment, name=options.experiment,
            namespace=options.namespace or None,
        )  # fmt: skip
        step = f"creating the run {name!r}"
        run = retrying(
            within, ANSWER_SECONDS, client.run_pipeline,
            experiment_id=experiment.experiment_id, job_name=name, pipeline_package_path=str(submission.file),
            params=dict(submission.arguments), pipeline_root=options.pipeline_root or None,
            enable_caching=options.caching, service_account=options.service_account or None,
        )  # fmt: skip
    except Exception as error:
        raise explained(error, step, may_exist=step.startswith("creating") and not _surely_not_done(error)) from error
    return str(run.run_id)


def within(seconds: float, call: Callable[..., Answer], *arguments: Any, **more: Any) -> Answer:
    """`call(...)`, or TimeoutError after `seconds`; the call itself is left to its fate in a daemon thread."""
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(call(*arguments, **more))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return answers[0]


def explained(error: Exception, step: str, *, may_exist: bool = False) -> Exception:
    """The client's error as one of ours: what the server said, and who has to act."""
    status, said = getattr(error, "status", None), server_message(error)
    if isinstance(status, int) and 400 <= status < 500 and status not in (408, 425, 429):
        cure = {
            401: "log in again, or give a valid token in KFP_EXISTING_TOKEN",
            403: "ask for the right to create runs in this namespace, or give another --namespace",
            404: "check --endpoint: it ends before /apis",
        }.get(status, "correct what the server names")
        return InvalidInput(
            f"the server answered {status}: {said}", expected="a request that it accepts", where=step, next_step=cure
        )
    cure = "try again later; nothing was created"
    if may_exist:
        cure = "the run may exist: look for it (`kfp run list`) before sending it again, and follow it with --follow"
    return Unavailable(
        f"no answer from Kubeflow Pipelines: {said}", expected="its API at --endpoint or KF_PIPELINES_ENDPOINT",
        where=step, next_step=cure,
    )  # fmt: skip


def server_message(error: BaseException) -> str:
    """One line: what the server wrote, or what went wrong on the way to it."""
    body = getattr(error, "body", None)
    try:
        answer = json.loads(body or "")
        text = answer.get("message") or answer.get("error") or body
    except (ValueError, AttributeError):
        reason = getattr(error, "reason", None)
        text = f"{getattr(error, 'status', '')} {reason}".strip() if reason else str(error) or type(error).__name__
    return hide_secrets(" ".join(str(text).split()))[:500]


def _surely_not_done(error: BaseException) -> bool:
    """Whether the server cannot have acted on the call."""
    if getattr(error, "status", None) in (429, 503):
        return True
    cause = getattr(error, "reason", None) or error.__cause__ or error
    return isinstance(cause, ConnectionRefusedError) or type(cause).__name__ in (
        "NewConnectionError", "NameResolutionError", "ConnectTimeoutError",
    )  # fmt: skip


def _read(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"{what} cannot be read: {error}", expected="a readable UTF-8 file", where=str(path),
            next_step="check the path; `kfp-gate compile` writes the pipelines to compiled/",
        ) from None  # fmt: skip


def _resolve(name: str, value: str, parameters: Mapping[str, Parameter]) -> str:
    structured = name in parameters and parameters[name].kind in ("LIST", "STRUCT")
    return _read(Path(value[1:]), f"the value of {name}") if structured and value.startswith("@") else value


def _notes(spec: Mapping[str, Any], texts: Mapping[str, str], parameters: Mapping[str, Parameter]) -> list[str]:
    notes = [note for name, text in texts.items() if (note := difference(name, text, parameters[name].kind))]
    images = {e.get("container", {}).get("image", "") for e in spec["deploymentSpec"].get("executors", {}).values()}
    # A registry has a dot or a port in its first part; without one, nodes ask Docker Hub.
    local = sorted(i for i in images if i and not re.match(r"^[^/]*[.:][^/]*/|^localhost/", i))
    if local:
        notes.append(
            f"images without a registry, for instance {local[0]}: nodes that do not hold them already ask Docker Hub; "
            "`kfp-gate compile --registry HOST/PATH` names yours"
        )
    return notes
