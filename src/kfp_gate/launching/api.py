"""One door to the Kubernetes API: plain objects in, plain objects out, faults told apart once and for all.

Built on the low-level call of the `kubernetes` client: its typed models drop fields that they do not know, its
log call knows no `sinceTime`, and its watch neither reads bookmarks nor survives a quiet network. What it does
not wrap (a dead server is a urllib3 error, not an `ApiException`) is wrapped here.
"""

import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput, Unavailable

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
READ_SECONDS = 30.0
OUTAGE_SECONDS = 1800.0
"""How long the API server may be away before a step gives up; the job runs on, and a retry attaches to it."""

MERGE_PATCH = "application/merge-patch+json"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

Object = dict[str, Any]


@dataclass
class Refused(Exception):  # noqa: N818  # an answer, not an error of ours; never leaves the room
    """The server answered, and the answer is no. `status` is the HTTP code, `body` the Status object."""

    status: int
    reason: str
    message: str
    body: Object

    def __str__(self) -> str:
        return f"{self.status} {self.reason}: {self.message}"


@dataclass
class Away(Exception):  # noqa: N818  # a state of the server; never leaves the room
    """No usable answer now: no connection, a timeout, 429 or a 5xx. The same request may work later."""

    what: str
    retry_after: float = 0.0

    def __str__(self) -> str:
        return self.what


class Api:
    """A connection to one cluster. Safe for use by several threads.

    Args:
        client: a configured `kubernetes.client.ApiClient`.
        outage_seconds: how long `call` keeps trying.
    """

    def __init__(self, client: Any, outage_seconds: float = OUTAGE_SECONDS) -> None:
        self.client = client
        self.outage = outage_seconds
        self.last_answer = time.monotonic()

    def once(
        self, method: str, path: str, *, query: Mapping[str, object] | None = None, body: Object | None = None,
        content_type: str = "application/json", read_seconds: float = READ_SECONDS,
    ) -> Object:  # fmt: skip
        """One request.

        Raises:
            Refused: the server said no.
            Away: no usable answer.
        """
        response = self.open(method, path, query=query, body=body, content_type=content_type, read_seconds=read_seconds)
        try:
            data = response.data
        except Exception as error:
            raise _away(error) from error
        finally:
            response.release_conn()
        if not data:
            return {}
        try:
            value = json.loads(data)
        except ValueError as error:  # a proxy's page, or an answer cut in the middle
            raise Away(f"an answer that is not JSON ({len(data)} bytes)") from error
        return value if isinstance(value, dict) else {"value": value}

    def open(
        self, method: str, path: str, *, query: Mapping[str, object] | None = None, body: Object | None = None,
        content_type: str = "application/json", read_seconds: float = READ_SECONDS,
    ) -> Any:  # fmt: skip
        """One request whose body is not read yet: the urllib3 response, for streams. Raises as `once`."""
        from kubernetes.client import ApiException

        try:
            response = self.client.call_api(
                path, method, query_params=[(key, str(value)) for key, value in (query or {}).items()],
                header_params={"Accept": "application/json, */*", "Content-Type": content_type}, body=body,
                auth_settings=["BearerToken"], _return_http_data_only=True, _preload_content=False,
                _request_timeout=(CONNECT_SECONDS, read_seconds),
            )  # fmt: skip
        except ApiException as error:
            raise _from_api_exception(error) from None
        except Exception as error:
            raise _away(error) from error
        self.last_answer = time.monotonic()
        return response

    def call(
        self, method: str, path: str, *, query: Mapping[str, object] | None = None, body: Object | None = None,
        content_type: str = "application/json", while_waiting: Callable[[], None] | None = None,
    ) -> Object:  # fmt: skip
        """`once`, repeated with growing pauses while the server is away.

        Raises:
            Refused: the server said no.
            Unavailable: the server was away for `outage_seconds`.
        """
        began = time.monotonic()
        pause = 0.2
        while True:
            try:
                return self.once(method, path, query=query, body=body, content_type=content_type)
            except Away as away:
                if time.monotonic() - began > self.outage:
                    raise unavailable(path, away) from away
                log.info("kubernetes API away (%s), trying again", away)
                wait_seconds = max(pause, min(away.retry_after, 30.0))
            if while_waiting is not None:
                while_waiting()
            # Jitter: after a restart of the server not every follower knocks at once.
            time.sleep(wait_seconds * random.uniform(0.5, 1.0))  # noqa: S311  # not a secret
            pause = min(pause * 2, 5.0)

    def find(self, path: str) -> Object | None:
        """The object at `path`, or None if there is none."""
        try:
            return self.call("GET", path)
        except Refused as refused:
            if refused.status == 404:
                return None
            raise


def connect() -> tuple[Api, str]:
    """The cluster of this pod, or else of the kubeconfig, and the namespace we are in.

    Raises:
        InvalidInput: there is neither.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    namespace = "default"
    try:
        config.load_incluster_config(client_configuration=configuration)
        namespace = (SERVICE_ACCOUNT / "namespace").read_text().strip() or namespace
    except (config.ConfigException, OSError):
        try:
            # The client reads KUBECONFIG once, when it is imported; we read it now.
            path = os.environ.get("KUBECONFIG")
            config.load_kube_config(config_file=path, client_configuration=configuration)
            _, active = config.list_kube_config_contexts(config_file=path)
            namespace = active.get("context", {}).get("namespace") or namespace
        except (config.ConfigException, OSError, TypeError) as error:
            raise InvalidInput(
                f"no cluster: {error}", expected="a pod's service account, or a kubeconfig", where="KUBECONFIG",
                next_step="run inside the cluster, or set KUBECONFIG; backend='processes' needs no cluster",
            ) from None  # fmt: skip
    # The client's own retries are blind (three at once, no pause); ours see the answer. One connection a follower.
    configuration.retries = False
    configuration.connection_pool_maxsize = 256
    return Api(client.ApiClient(configuration)), namespace


def unavailable(where: str, cause: object) -> Unavailable:
    """The error for an API server that stays away."""
    return Unavailable(
        f"the Kubernetes API does not answer: {cause}", expected="an answer", where=where,
        next_step="check the cluster, then run again: a job that runs is found and followed further",
    )  # fmt: skip


def denied(refused: Refused, doing: str, where: str) -> InvalidInput:
    """The error for a refusal that only the caller, or an administrator, can change."""
    cures = {
        401: "renew the credentials: the token was refused",
        403: "apply deploy/ (docs/cluster.md): the service account lacks this permission",
        404: "create what is missing; docs/cluster.md lists what a namespace needs",
    }
    return InvalidInput(
        f"{doing} was refused: {refused}", expected="a cluster that allows it", where=where,
        next_step=cures.get(refused.status, "correct what the server names, then run again"),
    )  # fmt: skip


def _from_api_exception(error: Any) -> Exception:
    status = int(error.status or 0)
    text = error.body.decode("utf-8", "replace") if isinstance(error.body, bytes) else str(error.body or "")
    try:
        body = json.loads(text)
    except ValueError:
        body = {"message": text.strip()}
    if not isinstance(body, dict):
        body = {"message": text.strip()}
    message = str(body.get("message") or error.reason or "")
    if status in (0, 408, 429) or status >= 500:
        after = (error.headers or {}).get("Retry-After", "")
        return Away(f"{status or 'TLS'}: {message}", float(after) if after.isdigit() else 0.0)
    return Refused(status, str(body.get("reason") or error.reason or ""), message, body)


def _away(error: Exception) -> Exception:
    from urllib3.exceptions import HTTPError

    if isinstance(error, HTTPError | OSError):
        return Away(f"{type(error).__name__}: {str(error)[:200]}")
    return error
