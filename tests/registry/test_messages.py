"""What a reader is told, word for word.

`KFP_GATE_RENEW=1 pytest tests/registry/test_messages.py` writes the texts anew, on purpose.
"""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_gate.errors import KfpGateError
from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.registry.alias import rollback
from kfp_gate.registry.answers import explain
from kfp_gate.registry.fetch import fetch_model
from kfp_gate.registry.outcome import RunOutcome, note
from kfp_gate.registry.register import register_model
from kfp_gate.registry.tracking import connect
from kfp_gate.tracking_address import resolve

RENEW = bool(os.environ.get("KFP_GATE_RENEW"))
SNAPSHOT = Path(__file__).parent / "snapshots" / "messages.txt"
Make = Callable[..., Path]


class RefusalError(Exception):
    def __init__(self, status: int, text: str = "x") -> None:
        super().__init__(text)
        self.response = type("Answer", (), {"status_code": status})


def test_messages(tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path) -> None:
    model, other = make_model(), make_model(b"other", "other")
    where = {"name": "det", "tracking_uri": tracking_uri}
    told: list[tuple[str, str]] = []

    def tell(title: str, call: Callable[[], object]) -> None:
        with pytest.raises(KfpGateError) as caught:
            call()
        told.append((title, str(caught.value)))

    def explained(error: Exception) -> object:
        raise explain(error, doing="creating the version", where="https://mlflow.example") from None

    tell("a verdict that refused", lambda: register_model(model, make_verdict(model, passed=False), **where))
    tell("a verdict on another model", lambda: register_model(model, make_verdict(other), **where))
    tell("a verdict without criteria", lambda: register_model(model, make_verdict(model, entries=()), **where))
    tell("bad names", lambda: register_model(model, make_verdict(model), name="a/b", alias="latest"))
    register_model(model, make_verdict(model), **where)
    tell("an alias that was moved", lambda: register_model(other, make_verdict(other), **where))
    sha = read_card(other).sha256
    tell("an alias elsewhere", lambda: register_model(other, make_verdict(other, champion=sha), **where))
    tell("a rollback to nowhere", lambda: rollback(connect(tracking_uri), "det", "champion"))
    tell("a rollback of nothing", lambda: rollback(connect(tracking_uri), "dot", "champion"))
    for uri in ("models:/det@best", "models:/dot@champion", "models:/det/9", "models:/det/Production", str(tmp_path)):
        tell(f"fetch {uri}", lambda uri=uri: fetch_model(uri, tmp_path / "got", tracking_uri=tracking_uri))
    for uri in ("", "https://evil.example", "./mlruns", "https://u:hunter2@mlflow.example"):
        tell(f"tracking_uri {uri!r}", lambda uri=uri: resolve(uri, {}))
    host_check = RefusalError(403, "Invalid Host header - possible DNS rebinding attack detected")
    for title, error in {
        "host check": host_check,
        "bad password": RefusalError(401),
        "no permission": RefusalError(403, "Permission denied"),
        "full": OSError(28, "No space left on device"),
        "down": ConnectionRefusedError("Connection refused"),
        "not MLflow": RefusalError(404),
        "certificate": OSError("CERTIFICATE_VERIFY_FAILED"),
        "odd": RefusalError(400, "odd"),
    }.items():
        tell(title, lambda error=error: explained(error))
    told.append(
        ("a note", note(RunOutcome("broken", "launch_training", "found: x", links={"MLflow run": "https://m"})))
    )

    text = "\n\n".join(f"== {title}\n{message}" for title, message in told) + "\n"
    text = re.sub(r"\b[0-9a-f]{64}\b", "<sha256>", text.replace(str(tmp_path), "<folder>"))
    if RENEW:
        SNAPSHOT.parent.mkdir(exist_ok=True)
        SNAPSHOT.write_text(text, encoding="utf-8")
    assert SNAPSHOT.read_text(encoding="utf-8") == text
