"""How a run ended is told from what its steps left, whatever broke and however early."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kfp_gate.errors import Unavailable
from kfp_gate.registry import step_tags
from kfp_gate.registry.gate_run import log_gate
from kfp_gate.registry.outcome import RunOutcome, decide, note, record_outcome
from kfp_gate.registry.pipeline_run import PIPELINE, find_runs, parent_run
from kfp_gate.registry.register import register_model
from kfp_gate.registry.step_tags import StepTag
from kfp_gate.registry.tracking import connect

Make = Callable[..., Path]


@pytest.fixture
def webhook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, object]]]:
    """A chat tool on this machine: what was posted to it."""
    posted: list[dict[str, object]] = []

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("KFP_GATE_WEBHOOK", f"http://127.0.0.1:{server.server_port}/services/T0/secret-part")
    yield posted
    server.shutdown()
    server.server_close()


def test_registered_refused_and_broken_are_told_apart(
    tracking_uri: str, make_model: Make, make_verdict: Make, webhook: list[dict[str, object]]
) -> None:
    where = {"tracking_uri": tracking_uri}
    model = make_model()

    passed = make_verdict(model)
    for step in ("split_dataset", "preflight", "launch_training", "validation_gate", "register_model"):
        step_tags.started(step, run_id="good", **where)
        if step == "validation_gate":
            log_gate(passed, {"map50": 0.75}, run_id="good", **where)
        if step == "register_model":
            register_model(model, passed, name="det", run_id="good", **where)
        step_tags.done(step, run_id="good", **where)
    good = record_outcome(run_id="good", pipeline_state="COMPLETE", **where)
    assert (good.state, good.model) == ("registered", "models:/det/1")

    refused = make_verdict(model, passed=False, name="refused")
    step_tags.started("validation_gate", run_id="weak", **where)
    log_gate(refused, {"map50": 0.25}, run_id="weak", **where)
    step_tags.done("validation_gate", run_id="weak", **where)
    weak = record_outcome(run_id="weak", pipeline_state="SUCCEEDED", **where)
    assert (weak.state, weak.reason) == ("refused", "Refused: of 2 criteria, 1 missed")
    # The link leads to the verdict.
    assert weak.links is not None
    assert (Path(weak.links["verdict and report"].removeprefix("file://")) / "refused.json").is_file()

    step_tags.started("launch_training", run_id="bad", **where)
    step_tags.failed("launch_training", "found: rank 1 was killed\nnext step: ...", run_id="bad", **where)
    bad = record_outcome(run_id="bad", pipeline_state="FAILED", **where)
    assert (bad.state, bad.step, bad.reason.splitlines()[0]) == (
        "broken",
        "launch_training",
        "found: rank 1 was killed",
    )

    early = record_outcome(run_id="early", pipeline_state="FAILED", **where)  # not even the first step wrote a tag
    assert (early.state, early.step) == ("broken", "split_dataset")

    tracking = connect(**where)
    for run_id, state in (("good", "registered"), ("weak", "refused"), ("bad", "broken"), ("early", "broken")):
        (run,) = find_runs(tracking, run_id, PIPELINE)
        assert run.data.tags["kfp_gate.outcome"] == state
        assert state in run.data.tags["mlflow.note.content"]
        assert run.info.status == ("FAILED" if state == "broken" else "FINISHED")
    assert [post["state"] for post in webhook] == ["registered", "refused", "broken", "broken"]
    assert "broken at launch_training" in str(webhook[2]["text"])


def test_every_end_of_a_run_has_one_reading() -> None:
    def tags(**states: str) -> list[StepTag]:
        return [StepTag(step, state, float(i), f"{step} said") for i, (step, state) in enumerate(states.items())]

    assert decide(tags(split_dataset="done", launch_training="started"), {}) == RunOutcome(
        "broken", "launch_training", "the step started and never ended: it was killed, or lost its node"
    )
    # The alias could not be moved: a version exists, and the step failed all the same.
    facts = {"kfp_gate.verdict": "passed"}
    broken = decide(tags(validation_gate="done", register_model="failed"), facts, "FAILED")
    assert (broken.state, broken.step, broken.reason) == ("broken", "register_model", "register_model said")
    assert decide(tags(validation_gate="done"), facts, "SUCCEEDED").state == "passed"
    # The registration's pod never started: no tag, no version, and the pipeline failed.
    unstarted = decide(tags(validation_gate="done"), facts, "FAILED")
    assert (unstarted.state, unstarted.step) == ("broken", "register_model")
    # Training came from the cache and left nothing; the gate's pod never started.
    assert decide(tags(split_dataset="done", preflight="done"), {}, "FAILED").step == "launch_training"
    # MLflow was away when the gate wrote; the pipeline succeeded, and the registration was skipped or had no name.
    assert decide(tags(validation_gate="done"), {}, "SUCCEEDED").state == "refused"
    assert decide(tags(validation_gate="done", register_model="done"), {}, "COMPLETE").state == "passed"
    assert decide(tags(), {}, "").state == "broken"
    # The exit handler's own tag is not a step of the run.
    assert decide(tags(record_outcome="started"), {"kfp_gate.verdict": "refused"}, "SUCCEEDED").state == "refused"


def test_a_dead_tracking_server_is_told_to_the_chat_and_raised(
    webhook: list[dict[str, object]],
) -> None:
    with pytest.raises(Unavailable):
        record_outcome(run_id="r", tracking_uri="http://127.0.0.1:9", pipeline_state="FAILED", patience=0.1)
    assert webhook[0]["state"] == "broken"
    assert "could not be asked" in str(webhook[0]["text"])


def test_a_webhook_that_fails_is_told_without_its_address(
    tracking_uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for address in ("http://127.0.0.1:9/secret-part", "ftp://secret-part", "http://[secret-part"):
        monkeypatch.setenv("KFP_GATE_WEBHOOK", address)
        record_outcome(run_id="r", tracking_uri=tracking_uri)
    assert len(caplog.records) >= 3
    assert "secret-part" not in caplog.text


def test_a_note_quotes_what_a_user_typed_as_text() -> None:
    text = note(RunOutcome("broken", "preflight", "```\n<b>x</b>\n" + "y" * 20000, links={"report": "http://x"}))
    assert text.count("```") == 2
    assert len(text) <= 7900


def test_steps_that_open_the_pipelines_run_at_once_lose_no_tag_and_end_with_one_run(tracking_uri: str) -> None:
    tracking = connect(tracking_uri)
    together = threading.Barrier(6)

    def leave(step: str) -> None:
        run = connect(tracking_uri)
        together.wait()
        parent_run(run, "r")
        assert step_tags.done(step, run_id="r", tracking_uri=tracking_uri)

    threads = [threading.Thread(target=leave, args=(f"step_{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {tag.step for tag in step_tags.read(tracking, "r")} == {f"step_{i}" for i in range(6)}

    record_outcome(run_id="r", tracking_uri=tracking_uri, pipeline_state="SUCCEEDED")
    assert len(find_runs(tracking, "r", PIPELINE)) == 1
    assert {tag.step for tag in step_tags.read(tracking, "r")} == {f"step_{i}" for i in range(6)}


def test_a_run_that_kfp_opened_is_adopted_as_the_parent_and_left_open(
    tracking_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = connect(tracking_uri, experiment="of KFP").client
    experiment = client.get_experiment_by_name("of KFP").experiment_id
    parent = client.create_run(experiment).info.run_id
    task = client.create_run(experiment, tags={"mlflow.parentRunId": parent}).info.run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", experiment)
    monkeypatch.setenv("MLFLOW_RUN_ID", task)

    step_tags.failed("preflight", "found: x", run_id="r")
    assert record_outcome(run_id="r", pipeline_state="FAILED").step == "preflight"
    run = client.get_run(parent)
    assert run.data.tags["kfp_gate.pipeline_run"] == "r"
    assert run.data.tags["kfp_gate.outcome"] == "broken"
    assert run.info.status == "RUNNING"


def test_a_steps_tag_never_breaks_the_step(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_tags, "PATIENCE", 0.1)
    for uri in ("http://127.0.0.1:9", "http://elsewhere.example", "", "ftp://x", "http://["):
        assert step_tags.started("preflight", run_id="r", tracking_uri=uri) is False
    assert len(caplog.records) == 5
