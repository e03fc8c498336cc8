"""A connection to an MLflow server: bounded patience, our errors, and the one run of a pipeline.

MLflow's own client retries a dead server for a quarter of an hour (7 retries of 120 s). Here every call has the
connection's patience: enough for a server that restarts, short where nothing depends on the answer.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from tenacity import RetryError, Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from kfp_gate.errors import InvalidInput, hide_secrets
from kfp_gate.registry.answers import code_of, explain, is_passing
from kfp_gate.tracking_address import Address, resolve

log = logging.getLogger(__name__)

PATIENCE = 90.0
"""Seconds that a call may be repeated: an MLflow server needs up to a minute to restart."""

REQUEST_TIMEOUT = 30
"""Seconds until a request without an answer counts as failed, unless MLFLOW_HTTP_REQUEST_TIMEOUT is set."""

PIPELINE_RUN_TAG = "kfp_gate.pipeline_run"
"""On every MLflow run of a pipeline run: the pipeline run's id."""

ROLE_TAG = "kfp_gate.role"
"""What an MLflow run stands for: `pipeline` (the parent), `training`, `gate`, `registration`."""

DEFAULT_EXPERIMENT = "kfp-gate"

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Tracking:
    """A connected client. `call` is the only way in which this room talks to MLflow."""

    address: Address
    client: Any
    experiment_id: str
    patience: float = PATIENCE

    @property
    def where(self) -> str:
        """The server, for messages: without credentials or query."""
        return shown(self.address.uri)

    def call(self, doing: str, function: Callable[..., Answer], *args: Any, **options: Any) -> Answer:
        """Call `function`, again while the server is away, and translate what it raises.

        Args:
            doing: what the call is for, in words that follow "while", for instance "creating the version".

        Raises:
            Unavailable: no proper answer within the patience.
            InvalidInput: credentials, permission, or a host name that the server refuses.
            Broken: MLflow refused the request itself.
        """
        return calling(self.patience, doing, self.where, function, *args, **options)

    def attempt(
        self, doing: str, ignore: str, function: Callable[..., Answer], *args: Any, **options: Any
    ) -> Answer | None:
        """As `call`, but None where MLflow answers with the error code `ignore`."""

        def guarded() -> Answer | None:
            try:
                return function(*args, **options)
            except Exception as error:
                if code_of(error) == ignore:
                    return None
                raise

        return self.call(doing, guarded)


def connect(
    tracking_uri: str = "", *, experiment: str = "", patience: float = PATIENCE, create: bool = True
) -> Tracking:
    """A connection whose server has answered and whose experiment exists.

    Args:
        tracking_uri: http(s)://host or sqlite:////file; empty: `MLFLOW_TRACKING_URI`.
        experiment: the experiment's name. Where the KFP backend injected a run of its own, that run's experiment
            is used instead, so that all of a pipeline run lies in one place.
        patience: seconds that a call to a silent server is repeated.
        create: make the experiment if it does not exist.

    Raises:
        InvalidInput: an address that is not allowed, refused credentials, a deleted or (with `create=False`) unknown
            experiment.
        Unavailable: the server does not answer.
    """
    address, client = open_client(tracking_uri)
    where = shown(address.uri)
    if address.injected_run:
        run = calling(patience, "reading the run that KFP opened", where, client.get_run, address.injected_run)
        return Tracking(address, client, run.info.experiment_id, patience)
    if not experiment and address.experiment_id:
        return Tracking(address, client, address.experiment_id, patience)
    name = experiment or address.experiment_name or DEFAULT_EXPERIMENT
    return Tracking(address, client, _experiment_id(client, address, name, patience, where, create), patience)


def open_client(tracking_uri: str = "") -> tuple[Address, Any]:
    """The address behind a `tracking_uri` parameter and an MLflow client for it; nothing is asked of the server.

    Raises:
        InvalidInput: see `tracking_address.resolve`.
    """
    address = resolve(tracking_uri)
    return address, _client(address)


def calling(
    patience: float, doing: str, where: str, function: Callable[..., Answer], *args: Any, **options: Any
) -> Answer:
    """`function` with retries while the failure may pass, and with our errors."""
    retrying = Retrying(
        stop=stop_after_delay(patience),
        # Many pipelines may wait for one server: random waits keep them from coming back in step.
        wait=wait_random_exponential(multiplier=0.5, max=8),
        retry=retry_if_exception(is_passing),
        reraise=True,
    )
    try:
        return retrying(function, *args, **options)
    except RetryError as error:  # pragma: no cover - reraise=True hands out the cause
        raise explain(error, doing=doing, where=where) from None
    except Exception as error:
        raise explain(error, doing=doing, where=where) from error


def shown(uri: str) -> str:
    """A URI as messages may show it."""
    return hide_secrets(uri.split("?")[0])


def quoted(value: str) -> str:
    """A string literal of MLflow's search language.

    Raises:
        InvalidInput: it holds both kinds of quotes, which that language cannot express.
    """
    if "'" not in value:
        return f"'{value}'"
    if '"' not in value:
        return f'"{value}"'
    raise InvalidInput(
        f"a name with both kinds of quotes: {value!r}", expected="at most one kind", where="MLflow search",
        next_step="rename it",
    )  # fmt: skip


def _client(address: Address) -> Any:
    """An MLflow client whose library was told to be brief, and to send no usage statistics to its makers."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # `calling` repeats, and knows for how long
        "MLFLOW_HTTP_REQUEST_TIMEOUT": str(REQUEST_TIMEOUT),
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    }.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    # A sqlite file needs sqlalchemy and alembic, which are in `mlflow` and not in `mlflow-skinny`.
    if not address.is_server:
        path = Path(address.uri.removeprefix("sqlite:///"))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            import sqlalchemy  # noqa: F401
        except OSError as error:
            raise InvalidInput(
                f"no folder for the tracking file ({error.strerror})", expected="a folder that can be written",
                where=str(path), next_step="choose another folder in tracking_uri",
            ) from error  # fmt: skip
        except ImportError as error:
            raise InvalidInput(
                "a sqlite tracking file, but only mlflow-skinny is installed", expected="the package mlflow",
                where="parameter tracking_uri", next_step="install kfp-gate[local], or name a tracking server",
            ) from error  # fmt: skip
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.WARNING)
        logging.getLogger("alembic").setLevel(logging.WARNING)
    return calling(0, "opening the tracking store", shown(address.uri), MlflowClient, address.uri, address.uri)


def _experiment_id(client: Any, address: Address, name: str, patience: float, where: str, create: bool) -> str:
    found = calling(patience, f"reading experiment {name!r}", where, client.get_experiment_by_name, name)
    if found is None and create:
        # Beside a sqlite file MLflow would put artifacts into the current folder of whichever step came first.
        options = {} if address.is_server else {"artifact_location": _artifacts_beside(address.uri, name)}

        def make() -> str:
            try:
                return str(client.create_experiment(name, **options))
            except Exception as error:
                # Another step was faster, or our own first request did arrive although its answer did not.
                if code_of(error) == "RESOURCE_ALREADY_EXISTS":
                    return str(client.get_experiment_by_name(name).experiment_id)
                raise

        return calling(patience, f"creating experiment {name!r}", where, make)
    if found is None:
        raise InvalidInput(
            f"experiment {name!r} does not exist", expected="an existing experiment", where=where,
            next_step="check the parameter experiment",
        )  # fmt: skip
    if found.lifecycle_stage == "deleted":
        raise InvalidInput(
            f"experiment {name!r} was deleted", expected="an active experiment", where=where,
            next_step="restore it in MLflow, or choose another name",
        )  # fmt: skip
    return str(found.experiment_id)


def _artifacts_beside(uri: str, name: str) -> str:
    folder = Path(uri.removeprefix("sqlite:///")).resolve().parent / "mlflow-artifacts"
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in name)
    return (folder / safe).as_uri()
