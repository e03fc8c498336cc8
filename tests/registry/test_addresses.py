"""No token goes to a host that a pipeline parameter made up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.errors import InvalidInput
from kfp_gate.registry.answers import explain, is_passing
from kfp_gate.registry.tracking import connect, quoted
from kfp_gate.tracking_address import resolve

HOSTS = {
    "KFP_GATE_TRACKING_HOSTS": "mlflow.kubeflow.svc, *.corp.example, mlflow.one:5000, [2001:db8::1]:80, 2001:db8::2"
}


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////tmp/mlflow.db",
        "sqlite:///relative.db",
        "http://localhost:5000",
        "http://127.0.0.1:5000",
        "http://127.9.9.9",
        "http://[::1]:5000",
        "https://mlflow.kubeflow.svc",
        "http://MLflow.Kubeflow.SVC:8080/prefix",
        "https://mlflow.kubeflow.svc.",
        "https://a.corp.example",
        "https://a.b.corp.example:443",
        "http://mlflow.one:5000",
        "http://[2001:db8::1]",
        "http://[2001:db8::2]:7777",
    ],
)
def test_this_machine_and_listed_hosts_are_accepted(uri: str) -> None:
    assert resolve(uri, HOSTS).uri == uri


@pytest.mark.parametrize(
    "uri",
    [
        "https://evil.example",
        "https://mlflow.kubeflow.svc.evil.example",
        "https://evil-corp.example",
        "https://corp.example",
        "https://corp.example.evil",
        "http://mlflow.one:5001",
        "http://mlflow.one",
        "http://localhost.evil.example",
        "http://127.0.0.1.evil.example",
        "http://0.0.0.0:5000",
        "http://169.254.169.254",
        "http://2130706433",
    ],
)
def test_all_other_hosts_are_refused(uri: str) -> None:
    with pytest.raises(InvalidInput, match="tracking host") as caught:
        resolve(uri, HOSTS)
    assert "KFP_GATE_TRACKING_HOSTS" in str(caught.value)


@pytest.mark.parametrize(
    "uri",
    ["./mlruns", "mlruns", "file:///mlruns", "databricks", "ftp://mlflow.kubeflow.svc", "sqlite:///", "http://", "http://[",
     "https://mlflow.kubeflow.svc:port", "postgresql://mlflow.kubeflow.svc/db", "http:mlflow.kubeflow.svc"],
)  # fmt: skip
def test_other_forms_are_refused(uri: str) -> None:
    with pytest.raises(InvalidInput, match="tracking URI"):
        resolve(uri, HOSTS)


@pytest.mark.parametrize(
    "uri",
    [
        "https://user:hunter2@mlflow.kubeflow.svc",
        "http://hunter2@localhost:5000",
        "https://evil.example@mlflow.kubeflow.svc",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(InvalidInput, match="with credentials in it") as caught:
        resolve(uri, HOSTS)
    assert "hunter2" not in str(caught.value)


@settings(deadline=None)
@given(st.text(alphabet="abc.:@/\\[]#?%-_\t é", max_size=30))
def test_whatever_is_accepted_goes_to_a_listed_host(tail: str) -> None:
    """What is checked and what the HTTP client connects to must be one host, however odd the URI."""
    from requests import PreparedRequest
    from requests.exceptions import RequestException

    try:
        address = resolve(f"http://mlflow.kubeflow.svc{tail}", HOSTS)
    except InvalidInput:
        return
    request = PreparedRequest()
    try:
        request.prepare_url(address.uri, None)
    except RequestException:
        return
    assert request.url is not None
    from urllib3.util import parse_url

    host = (parse_url(request.url).host or "").rstrip(".")
    assert host == "mlflow.kubeflow.svc" or host.endswith(".corp.example")


def test_the_environments_own_server_needs_no_list_and_brings_its_run() -> None:
    own = {
        "MLFLOW_TRACKING_URI": "https://any.example/mlflow/", "MLFLOW_RUN_ID": "r", "MLFLOW_EXPERIMENT_ID": "7",
    }  # fmt: skip
    for uri in ("", " ", "https://any.example/mlflow"):
        address = resolve(uri, own)
        assert (address.injected_run, address.experiment_id) == ("r", "7")
    # Another server does not know that run.
    assert resolve("http://localhost:5000", own).injected_run == ""
    with pytest.raises(InvalidInput):
        resolve("https://any.example.evil/mlflow", own)
    with pytest.raises(InvalidInput, match="no tracking server"):
        resolve("", {})


def test_a_refused_host_is_not_even_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def looked_up(*_: object, **__: object) -> None:
        raise AssertionError("a name was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "token-secret")
    with pytest.raises(InvalidInput, match="tracking host"):
        connect("https://evil.example")


def test_search_literals_cannot_be_broken_out_of() -> None:
    assert quoted("a") == "'a'"
    assert quoted("it's") == '"it\'s"'
    with pytest.raises(InvalidInput):
        quoted("'\"")


class Answer:
    def __init__(self, status: int) -> None:
        self.status_code = status


def failure(status: int | None = None, text: str = "x", cause: Exception | None = None) -> Exception:
    error = Exception(text)
    if status is not None:
        error.response = Answer(status)  # type: ignore[attr-defined]
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "passing", "kind", "said"),
    [
        (failure(503), True, "Unavailable", "did not answer as it should"),
        (failure(429), True, "Unavailable", "did not answer as it should"),
        (failure(401), False, "InvalidInput", "does not accept the credentials"),
        (failure(403), False, "InvalidInput", "forbids it"),
        (failure(403, "Invalid Host header - possible DNS rebinding"), False, "InvalidInput", "this host name"),
        (failure(404), False, "InvalidInput", "not as MLflow"),
        (failure(400, "bad thing"), False, "Broken", "bad thing"),
        (
            failure(None, "y", ConnectionResetError("Connection reset by peer")),
            True,
            "Unavailable",
            "connection was cut",
        ),
        (failure(None, "y", OSError(28, "No space left on device")), False, "Unavailable", "no space left"),
        (failure(None, "certificate: CERTIFICATE_VERIFY_FAILED"), False, "InvalidInput", "certificate is not trusted"),
    ],
)
def test_a_failure_says_who_has_to_act(error: Exception, passing: bool, kind: str, said: str) -> None:
    assert is_passing(error) is passing
    told = explain(error, doing="trying", where="http://x")
    assert type(told).__name__ == kind
    assert said in told.found
    assert "while trying" in told.found
