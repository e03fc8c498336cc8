"""What a tracking server's failure means: whether to ask again, and what the reader has to do.

MLflow raises one exception class for a wrong password, a full disk and a name that exists already. Here the
answer is read from the HTTP status, the error code and, where there is nothing else, the text.
"""

from collections.abc import Iterator

from kfp_gate.errors import Broken, InvalidInput, KfpGateError, Unavailable

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses after which the same request may succeed."""

HOST_REFUSED = "Invalid Host header"
"""The text of MLflow's host check (3.5 and later), which leaves `/health` green."""


def is_passing(error: BaseException) -> bool:
    """Whether the same call may succeed a little later."""
    if isinstance(error, KfpGateError) or is_full(error) or _is_certificate(error):
        return False
    status = status_of(error)
    if status is not None:
        return status in PASSING
    return _is_network(error)


def code_of(error: BaseException) -> str:
    """MLflow's error code, for instance RESOURCE_ALREADY_EXISTS; "" for another exception."""
    return str(getattr(error, "error_code", "") or "")


def status_of(error: BaseException) -> int | None:
    """The HTTP status behind an exception, where one is known."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if response is not None and getattr(response, "status_code", None):
            return int(response.status_code)
    if _is_network(error):
        return None
    reader = getattr(error, "get_http_status_code", None)
    return int(reader()) if callable(reader) else None


def is_full(error: BaseException) -> bool:
    """Whether a store said that it has no room left."""
    return any(
        getattr(cause, "errno", None) in (28, 122) or "No space left on device" in str(cause) for cause in _chain(error)
    )


def explain(error: BaseException, *, doing: str, where: str) -> KfpGateError:
    """The error of ours for what MLflow raised while `doing`."""
    if isinstance(error, KfpGateError):
        return error
    status, text = status_of(error), _first_line(error)
    if HOST_REFUSED in str(error):
        return InvalidInput(
            f"the tracking server refuses to be called by this host name (403, {HOST_REFUSED!r}) while {doing}",
            expected="a server that accepts the name by which pipeline pods call it", where=where,
            next_step="start it with `mlflow server --allowed-hosts 'HOST,HOST:*,localhost:*'` (or "
            "MLFLOW_SERVER_ALLOWED_HOSTS), HOST being the name in the URI: the flag replaces the defaults, the port "
            "counts, and /health answers 200 all the while",
        )  # fmt: skip
    if status == 401 or code_of(error) in ("UNAUTHENTICATED", "CUSTOMER_UNAUTHORIZED"):
        return InvalidInput(
            f"the tracking server does not accept the credentials (401) while {doing}",
            expected="a user and password, or a token that has not expired", where=where,
            next_step="renew MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the "
            "Secret",
        )  # fmt: skip
    if status == 403 or code_of(error) == "PERMISSION_DENIED":
        return InvalidInput(
            f"the tracking server forbids it (403) while {doing}: {text}", expected="a user who may write here",
            where=where,
            next_step="grant the user EDIT on the experiment and on the registered model, or use another user",
        )  # fmt: skip
    if _is_certificate(error):
        return InvalidInput(
            f"the tracking server's certificate is not trusted while {doing}",
            expected="a certificate that this machine's authorities signed", where=where,
            next_step="mount the authority's certificate and name it in MLFLOW_TRACKING_SERVER_CERT_PATH",
        )  # fmt: skip
    if is_full(error):
        return Unavailable(
            f"no space left in the artifact store while {doing}", expected="room for the model", where=where,
            next_step="free space in the artifact store, then run again: the model is kept in the pipeline's artifacts",
        )  # fmt: skip
    if status is None or status in PASSING:
        return Unavailable(
            f"the tracking server did not answer as it should while {doing}: {text}",
            expected="an MLflow server that answers", where=where,
            next_step="check that the server runs and is reachable from here, then run again: nothing is registered "
            "twice",
        )  # fmt: skip
    if status == 404 and not code_of(error):
        return InvalidInput(
            f"the address answers, but not as MLflow (404) while {doing}", expected="an MLflow 3 server", where=where,
            next_step="check the host, the port and a path prefix such as /mlflow in the tracking URI",
        )  # fmt: skip
    return Broken(
        f"MLflow refused ({code_of(error) or status}) while {doing}: {text}", expected="a request that MLflow accepts",
        where=where, next_step="read the server's log; if its version is older than 3.0, upgrade it",
    )  # fmt: skip


def _is_network(error: BaseException) -> bool:
    """Whether no answer arrived at all: refused, reset, timed out, name not found, or cut in the middle."""
    names = {c.__name__ for cause in _chain(error) for c in type(cause).__mro__}
    if names & {"ConnectionError", "Timeout", "ChunkedEncodingError", "TimeoutError", "ProtocolError"}:
        return True
    # MLflow drops the cause of all but timeouts and leaves only this text.
    return "API request to " in str(error) and "failed with" in str(error) and "error code" not in str(error)


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _is_certificate(error: BaseException) -> bool:
    return any("CERTIFICATE_VERIFY_FAILED" in str(cause) for cause in _chain(error))


_NETWORK = {
    "Connection refused": "connection refused: nothing listens there",
    "Failed to resolve": "its host name is not known here",
    "Name or service not known": "its host name is not known here",
    "timed out": "no answer in time",
    "Connection reset": "the connection was cut",
    "Remote end closed connection": "the connection was cut",
    "Connection aborted": "the connection was cut",
    "No route to host": "no route to its host",
    "Network is unreachable": "the network is unreachable",
}
"""What the layers below say, in words: their own texts run over three lines."""


def _first_line(error: BaseException) -> str:
    for said, words in _NETWORK.items():
        if any(said in str(cause) for cause in _chain(error)):
            return words
    text = str(error).strip().split("\n")[0]
    return text if len(text) <= 300 else f"{text[:300]}..."
