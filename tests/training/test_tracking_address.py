"""A training sends neither values nor credentials to a host that a pipeline parameter made up."""

from pathlib import Path

import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.launching.worker_pod import SECRET_KEYS
from kfp_gate.tracking_address import HOSTS_VARIABLE
from kfp_gate.training import api
from kfp_gate.training.delivery import deliver_spool
from kfp_gate.training.tracking import Tracker, address_of


@pytest.fixture(autouse=True)
def _own_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_RUN_ID", "injected")
    monkeypatch.delenv(HOSTS_VARIABLE, raising=False)


def test_every_door_refuses_a_host_that_nobody_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "https://evil.example"
    with pytest.raises(InvalidInput, match=r"tracking host 'evil\.example'"):
        Tracker(uri=evil, experiment="e", spool=tmp_path / "spool")
    with pytest.raises(InvalidInput, match="tracking host"), api.start(epochs=1, folder=tmp_path, tracking_uri=evil):
        pass
    (tmp_path / "kept").write_text("")
    with pytest.raises(InvalidInput, match="tracking host"):
        deliver_spool(tmp_path / "kept", uri=evil, experiment="e")
    monkeypatch.setenv(HOSTS_VARIABLE, "*.example")
    assert address_of(evil) is not None


def test_a_password_in_the_address_is_refused_and_not_repeated() -> None:
    # It would travel in the job's manifest.
    with pytest.raises(InvalidInput) as caught:
        address_of("http://user:hunter22@127.0.0.1:5000")
    assert "hunter22" not in str(caught.value)


def test_the_run_that_kfp_opened_is_a_parent_on_its_own_server_alone(tmp_path: Path) -> None:
    own = Tracker(uri="", experiment="e", spool=tmp_path / "a")
    other = Tracker(uri="http://127.0.0.1:10", experiment="e", spool=tmp_path / "b")
    assert own._parent("0") == {"mlflow.parentRunId": "injected"}
    assert other._parent("0") == {}
    for tracker in (own, other):
        tracker._done.set()


def test_ranks_in_pods_get_the_list_from_the_secret() -> None:
    assert HOSTS_VARIABLE in SECRET_KEYS


def test_no_address_is_no_tracking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    assert address_of("") is None
