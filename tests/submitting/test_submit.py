"""`kfp-gate submit`: what is refused before anything is sent, what arrives at the server, how a run is followed.

The command line and kfp's client are the real ones; the server is `pipelines_api`. Messages that a user meets are
pinned in `messages.json`; renew them on purpose with `KFP_GATE_RENEW=1 pytest tests/submitting`.
"""

import doctest
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kfp.cli.utils.parsing import parse_parameter_value

from kfp_gate import cli
from kfp_gate.errors import InvalidInput, KfpGateError, Unavailable
from kfp_gate.submitting import following, guessing, parameters
from kfp_gate.submitting.guessing import as_kfp_reads, difference
from kfp_gate.submitting.parameters import declared, pipeline_spec
from kfp_gate.submitting.submit import RunOptions, create, prepare

sys.path.insert(0, str(Path(__file__).parent))
from pipelines_api import DROP, SILENCE, PipelinesApi, Snapshot, nodes

ROOT = Path(__file__).parents[2]
GATE = ROOT / "compiled" / "gate.yaml"
MESSAGES = Path(__file__).with_name("messages.json")
THRESHOLDS = '{"원뿔 (소형)": {"map50": {"min": 0.8}}, "*": 0.5}'.replace('"*": 0.5', '"*": {"recall": 0.5}')


@pytest.fixture
def api() -> Iterator[PipelinesApi]:
    with PipelinesApi() as server:
        yield server


def run_cli(api: PipelinesApi, *arguments: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Exit code of `kfp-gate submit ...`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["kfp-gate", "submit", "--endpoint", api.url, "-n", "team", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def client(api: PipelinesApi, token: str = "") -> Any:
    return cli._kfp_client(api.url, "team", token, "")


def pinned(name: str, text: str) -> None:
    known = json.loads(MESSAGES.read_text(encoding="utf-8")) if MESSAGES.exists() else {}
    if os.environ.get("KFP_GATE_RENEW"):
        known[name] = text.splitlines()
        MESSAGES.write_text(json.dumps(known, ensure_ascii=False, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    assert text.splitlines() == known.get(name), f"{name}: see the head of this file"


# What is refused before anything is sent

REFUSED = {
    "names and types": {
        "dataset": "s3://b/d", "image_sise": "3", "epochs": "many", "min_map50": "nan", "nodes": "1.5",
        "class_thresholds": "{cone: {map50: 0.8}}", "monitors": "map50, recall", "waivers": "{}",
        "training_options": '{"lr0": }',
    },
    "nothing given": {},
    "values": {
        "dataset": "d", "epochs": "0", "image_size": "100", "backend": "k8s", "decide": "sure", "train_share": "0.9",
        "gpus_per_node": "-1",
    },
    "thresholds": {
        "dataset": "d", "min_map50": "1.5",
        "class_thresholds": '{"cone": {"map5": 0.8}, "원뿔": {"map50": {"min": 80}}, "*": {"recall": {"mim": 0.5}}}',
    },
    "no criterion": {"dataset": "d", "min_map50": "0"},
    "a password": {"dataset": "d", "tracking_uri": "https://me:geheim@mlflow.example.com"},
    "too large": {
        "dataset": "d", "class_thresholds": json.dumps({f"class {i}": {"map50": {"min": 0.8}} for i in range(4000)}),
    },
    "a missing file": {"dataset": "d", "class_thresholds": "@no/such/thresholds.json"},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_in_one_message(case: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        prepare(GATE, REFUSED[case])
    pinned(case, str(caught.value))
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("an empty file", ""), ("no YAML", "a: [1, {"), ("another YAML", "kind: Deployment\nspec: {}\n"),
        ("a component of version 1", "name: x\nimplementation: {container: {image: y}}\n"), ("a list", "- 1\n- 2\n"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_compiled_pipeline(case: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput) as caught:
        prepare(tmp_path / "p.yaml", {})
    pinned(f"file: {case}", str(caught.value).replace(str(tmp_path), "DIR"))


def test_nothing_reaches_the_server_and_the_exit_code_is_2(
    api: PipelinesApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(api, str(GATE), "-p", "datset=x", monkeypatch=monkeypatch) == 2
    assert "did you mean dataset" in capsys.readouterr().err
    assert run_cli(api, str(GATE), "-p", "dataset", monkeypatch=monkeypatch) == 2
    assert run_cli(api, str(ROOT / "no.yaml"), monkeypatch=monkeypatch) == 2
    assert run_cli(api, monkeypatch=monkeypatch) == 2
    assert api.requests == []


# What kfp's own command line would have made of it


@given(
    st.one_of(st.text(), st.from_regex(r"[-+]?[0-9._eE]*"), st.sampled_from(["TRUE", "null", '"a"', "1e999", "NaN"]))
)
def test_the_guess_is_the_one_that_kfp_makes(text: str) -> None:
    try:
        theirs = parse_parameter_value(text)
    except RecursionError:
        return
    assert repr(as_kfp_reads(text)) == repr(theirs)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("s3://b/d", "STRING", ""), ("5", "NUMBER_DOUBLE", ""), ("TRUE", "BOOLEAN", ""), ("[]", "LIST", ""),
        ("5.0", "NUMBER_INTEGER", ""), ("null", "STRING", "as null"), ("true", "STRING", "as true or false"),
        ('"quoted"', "STRING", "without its quotes"), ("{}", "STRING", "as a dict"), ("1e3", "STRING", "as a number"),
        ("many", "NUMBER_INTEGER", "as a string, without a word"), ("nan", "NUMBER_DOUBLE", "nan, which is no JSON"),
    ],
)  # fmt: skip
def test_a_difference_is_told(text: str, kind: str, says: str) -> None:
    found = difference("name", text, kind)
    assert (says in found) if says else found == ""


@pytest.mark.parametrize("text", ["123", "true", "null", '"a"', "{}", "1e3"])
def test_the_advice_for_kfp_is_right(text: str) -> None:
    """What the note tells to write there arrives there as what was meant."""
    advice = difference("dataset", text, "STRING").rpartition("write '")[2].removesuffix("' there")
    assert parse_parameter_value(advice.partition("=")[2]) == text


# What arrives


def test_what_arrives_is_what_was_meant(
    api: PipelinesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text(THRESHOLDS, encoding="utf-8")
    given = ("dataset=123", "epochs=20", "min_map50=1", 'monitors=["map50"]', "registered_model=true",
             f"class_thresholds=@{tmp_path / 't.json'}", "experiment=a b=c")  # fmt: skip
    options = [part for text in given for part in ("-p", text)]
    run_cli(api, str(GATE), *options, "-e", "한 실험", "--name", "night run", "--no-cache",
            "--service-account", "trainer", monkeypatch=monkeypatch)  # fmt: skip
    assert api.sent == {
        "dataset": "123", "epochs": 20, "min_map50": 1.0, "monitors": ["map50"], "registered_model": "true",
        "class_thresholds": json.loads(THRESHOLDS), "experiment": "a b=c",
    }  # fmt: skip
    run = api.only_run
    assert (run["display_name"], run["service_account"]) == ("night run", "trainer")
    assert api.experiments[run["experiment_id"]]["display_name"] == "한 실험"
    spec = run["pipeline_spec"]["pipeline_spec"]
    assert spec["pipelineInfo"]["name"] == "gate"
    assert not any(t.get("cachingOptions", {}).get("enableCache") for t in spec["root"]["dag"]["tasks"].values())
    shown = capsys.readouterr()
    assert run["run_id"] in shown.out
    assert "dataset=123 as a number" in shown.err and "Docker Hub" in shown.err


def kfp_run_create(api: PipelinesApi, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("kfp")), "--endpoint", api.url, "-n", "team", "run", "create"]
    return subprocess.run(
        [*command, "-e", "EXP", "-f", str(GATE), *arguments], capture_output=True, text=True, timeout=120
    )


def test_kfp_run_create_works_as_documented(api: PipelinesApi) -> None:
    done = kfp_run_create(api, 'dataset="123"', "epochs=20", f"class_thresholds={THRESHOLDS}", "min_map50=0.25")
    assert done.returncode == 0, done.stderr
    assert api.sent == {
        "dataset": "123", "epochs": 20, "class_thresholds": json.loads(THRESHOLDS), "min_map50": 0.25,
    }  # fmt: skip


def test_kfp_run_create_sends_a_slip_as_a_string_which_we_name_before(api: PipelinesApi) -> None:
    slip = "class_thresholds={cone: {map50: 0.8}}"
    done = kfp_run_create(api, "dataset=s3://b/d", slip)
    assert done.returncode == 1
    assert "requires type struct" in done.stderr + done.stdout
    with pytest.raises(InvalidInput) as caught:
        prepare(GATE, {"dataset": "s3://b/d", "class_thresholds": slip.partition("=")[2]})
    assert """'class_thresholds={"cone": {"map50": 0.8}}' meant""" in str(caught.value)


def test_a_refusal_of_the_server_is_bad_input_in_its_own_words(api: PipelinesApi) -> None:
    submission = prepare(GATE, {"dataset": "d"})
    object.__setattr__(submission, "arguments", {"dataset": 5})
    with pytest.raises(InvalidInput, match="400: Failed to create a run: input parameter dataset requires type string"):
        create(client(api), submission, RunOptions())


@pytest.mark.parametrize(
    ("faults", "runs", "advice"),
    [
        ([503, 503], 1, ""),
        ([DROP], 0, "the run may exist"),
        ([500], 0, "the run may exist"),
        ([403], 0, "ask for the right to create runs"),
    ],
)
def test_a_run_is_never_created_twice(api: PipelinesApi, faults: list[Any], runs: int, advice: str) -> None:
    """Repeated only when the server cannot have acted; else the user is told to look first."""
    api.fault_paths, api.faults = ("runs",), list(faults)
    if not advice:
        create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
    else:
        with pytest.raises(KfpGateError) as caught:
            create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
        assert advice in str(caught.value)
        assert api.requests.count(("POST", "runs")) == 1
    assert len(api.runs) == runs


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nobody = cli._kfp_client(f"http://127.0.0.1:{port}", "team", "", "")
    with pytest.raises(Unavailable) as caught:
        create(nobody, prepare(GATE, {"dataset": "d"}), RunOptions(), patience=1)
    assert "nothing was created" in str(caught.value)


# How a run ends

DONE = {"split_dataset": "SUCCEEDED", "preflight": "SUCCEEDED", "launch_training": "SUCCEEDED"}
PASSED = nodes(**DONE, validation_gate="SUCCEEDED", condition_2="SUCCEEDED", register_model="SUCCEEDED",
               record_outcome="SUCCEEDED")  # fmt: skip
REFUSED_NODES = nodes(**DONE, validation_gate="SUCCEEDED", condition_2="SKIPPED", record_outcome="SUCCEEDED")
BROKEN_NODES = nodes(**{**DONE, "launch_training": "FAILED"}) | {
    "exit-handler-1": "FAILED",
    "record-outcome": "SUCCEEDED",
}

DRIVER_NODES = nodes(split_dataset="FAILED") | {"split-dataset-driver": "FAILED"}
NAMED = ("registered_model=cones",)

ENDINGS: dict[str, tuple[Snapshot, tuple[str, ...], int, str]] = {
    "registered": (Snapshot("SUCCEEDED", PASSED), NAMED, 0, "passed, and its model is registered"),
    "passed": (Snapshot("SUCCEEDED", PASSED), (), 0, "passed"),
    "refused": (Snapshot("SUCCEEDED", REFUSED_NODES), NAMED, 3, "refused by the gate: nothing is registered, .+"),
    "broken": (Snapshot("FAILED", BROKEN_NODES, "child failed"), (), 1, "broken at launch-training: child failed"),
    "driver": (Snapshot("FAILED", DRIVER_NODES), (), 1, "broken at split-dataset"),
    "before any step": (Snapshot("FAILED", {}, "quota exceeded"), (), 1, "broken: quota exceeded"),
    "canceled": (Snapshot("CANCELED", nodes(split_dataset="SUCCEEDED")), (), 1, "canceled"),
    "error": (Snapshot("FAILED", {}), (), 1, "broken"),
    "untold": (Snapshot("SUCCEEDED", {}), (), 1, "succeeded, but the server does not tell what .+"),
}


@pytest.mark.parametrize("case", ENDINGS)
def test_the_exit_code_tells_the_ending(
    case: str, api: PipelinesApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    last, given, code, words = ENDINGS[case]
    api.script = [Snapshot(None), Snapshot("PENDING"), Snapshot("RUNNING", nodes(split_dataset="RUNNING")), last]
    options = [part for text in given for part in ("-p", text)]
    found = run_cli(
        api, str(GATE), "-p", "dataset=d", *options, "--watch", "--interval", "0.05", monkeypatch=monkeypatch
    )
    shown = capsys.readouterr().out
    assert found == code
    assert re.fullmatch(rf"[0-9a-f-]{{36}} {words}", shown.splitlines()[-1]), shown
    assert "split-dataset running" in shown


def test_every_change_is_told_once(
    api: PipelinesApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Snapshot("RUNNING", nodes(split_dataset="SUCCEEDED", preflight="RUNNING"))
    api.script = [Snapshot("PENDING"), running, running, running, Snapshot("SUCCEEDED", REFUSED_NODES)]
    run_cli(api, str(GATE), "-p", "dataset=d", "-w", "--interval", "0.05", monkeypatch=monkeypatch)
    lines = [line.split(" ", 1)[1] for line in capsys.readouterr().out.splitlines() if line[2:3] == ":"]
    assert lines == [
        "run pending", "preflight running", "split-dataset succeeded (0:00:42)", "run running",
        "launch-training succeeded (0:00:42)", "preflight succeeded (0:00:42)", "validation-gate succeeded (0:00:42)",
        "record-outcome succeeded (0:00:42)", "condition-2 skipped (0:00:42)", "run succeeded",
    ]  # fmt: skip


def test_tasks_that_the_server_lists_late_are_waited_for(api: PipelinesApi) -> None:
    run_id = create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
    api.script = [Snapshot("SUCCEEDED", {}), Snapshot("SUCCEEDED", {}), Snapshot("SUCCEEDED", REFUSED_NODES)]
    assert following.follow(client(api), run_id, None, following.Watch(seconds=0.02)).kind == "refused"


# Outages


def test_outages_are_waited_out_and_told_once(api: PipelinesApi) -> None:
    run_id = create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
    api.faults, api.silence = [503, DROP, DROP, 500, 404, 429, SILENCE], 1.0
    api.script = [Snapshot("RUNNING"), Snapshot("SUCCEEDED", PASSED)]
    said: list[str] = []
    watch = following.Watch(seconds=0.02, say=said.append, answer_seconds=0.4)
    assert following.follow(client(api), run_id, None, watch).kind == "passed"
    assert api.faults == []
    assert [line for line in said if "answer" in line] == [
        "no answer about the run (no healthy upstream); it goes on, and so does the watch", "the server answers again",
    ]  # fmt: skip


def test_an_expired_login_is_renewed(api: PipelinesApi) -> None:
    api.tokens = ("first",)
    run_id = create(client(api, "first"), prepare(GATE, {"dataset": "d"}), RunOptions())
    api.tokens = ("second",)
    api.script = [Snapshot("SUCCEEDED", REFUSED_NODES)]
    watch = following.Watch(seconds=0.02, connect=lambda: client(api, "second"))
    assert following.follow(client(api, "first"), run_id, None, watch).kind == "refused"


@pytest.mark.parametrize(
    ("status", "kind", "words"), [(503, Unavailable, "no answer"), (403, InvalidInput, "answered 403")]
)
def test_patience_ends_and_says_how_to_go_on(api: PipelinesApi, status: int, kind: type, words: str) -> None:
    run_id = create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
    api.faults = [status] * 10_000
    with pytest.raises(kind, match=words) as caught:
        following.follow(client(api), run_id, None, following.Watch(seconds=0.02, patience=0.3))
    assert f"--follow {run_id}" in str(caught.value)


def test_a_run_is_followed_by_its_id(
    api: PipelinesApi, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_id = create(client(api), prepare(GATE, {"dataset": "d"}), RunOptions())
    api.script = [Snapshot("SUCCEEDED", REFUSED_NODES)]
    assert run_cli(api, "--follow", run_id, "--interval", "0.05", monkeypatch=monkeypatch) == 3
    assert len(api.runs) == 1
    api.shows_pipeline = False
    assert run_cli(api, "--follow", run_id, "--interval", "0.05", monkeypatch=monkeypatch) == 2
    assert "does not tell the pipeline" in capsys.readouterr().err
    assert run_cli(api, str(GATE), "--follow", run_id, "--interval", "0.05", monkeypatch=monkeypatch) == 3
    assert run_cli(api, "--follow", "unknown", "--patience", "0", "--interval", "0.05", monkeypatch=monkeypatch) == 2


def test_an_interrupt_leaves_the_run_and_says_how_to_go_on(api: PipelinesApi) -> None:
    api.script = [Snapshot("RUNNING", nodes(split_dataset="RUNNING"))]
    command = [sys.executable, "-m", "kfp_gate.cli", "submit", str(GATE), "-p", "dataset=d", "-w", "--interval", "0.1"]
    environment = {**os.environ, "KF_PIPELINES_ENDPOINT": api.url, "KFP_NAMESPACE": "team"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout and child.stderr
        while "split-dataset running" not in child.stdout.readline():
            pass
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 130
        assert f"--follow {api.only_run['run_id']}" in child.stderr.read()


# Any pipeline


def test_gates_are_found_in_any_pipeline(tmp_path: Path) -> None:
    from kfp import compiler, dsl

    from kfp_gate.components import validation_gate

    @dsl.component(base_image="x.example.com/y", install_kfp_package=False)
    def act(word: str) -> bool:
        return bool(word)

    @dsl.pipeline(name="own")
    def own(model_uri: str):
        data = dsl.importer(artifact_uri="s3://b/test", artifact_class=dsl.Dataset)
        judged = validation_gate(test=data.output, model_uri=model_uri)
        with dsl.If(judged.outputs["Output"] == True):  # noqa: E712
            act(word="passed")
        with dsl.If(judged.outputs["Output"] == False):  # noqa: E712
            act(word="refused")
        with dsl.If(model_uri == "x"):
            act(word="x")

    compiler.Compiler().compile(own, str(tmp_path / "own.yaml"))
    found = following.tasks_of(pipeline_spec((tmp_path / "own.yaml").read_text(encoding="utf-8")))
    assert found.conditions == ("condition-1",)
    assert found.registering == ("act",)


@pytest.mark.parametrize("file", sorted((ROOT / "compiled").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_gate_of_every_shipped_pipeline_is_found(file: Path) -> None:
    found = following.tasks_of(pipeline_spec(file.read_text(encoding="utf-8")))
    if "register-model" in found.steps:
        assert len(found.conditions) == 1 and found.registering == ("register-model",)
        assert found.optional_name


def test_a_pipeline_whose_steps_wait_for_no_gate_is_done_by_succeeding(tmp_path: Path) -> None:
    tasks = following.Tasks(("a",), (), ())

    class Run:
        state, run_details, error = "SUCCEEDED", None, None

    ending = following.ended(Run(), tasks)
    assert (ending.kind, ending.exit_code) == ("done", 0)
    assert str(ending) == "done: what it found is in the outputs of its steps"


@pytest.mark.parametrize("states", [("SKIPPED", "SUCCEEDED"), ("SUCCEEDED", "SKIPPED")])
def test_one_refusal_among_gates_of_one_name_is_a_refusal(states: tuple[str, str]) -> None:
    """A loop over models, or a pipeline that is used twice, lists its condition once for each."""
    details = [SimpleNamespace(display_name="condition-1", state=s, start_time=None, end_time=None) for s in states]
    run = SimpleNamespace(state="SUCCEEDED", run_details=SimpleNamespace(task_details=details), error=None)
    assert following.ended(run, following.Tasks(("a",), ("condition-1",), ("a",))).kind == "refused"


def test_parameters_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["kfp-gate", "parameters", str(GATE)])
    with pytest.raises(SystemExit):
        cli.main()
    shown = capsys.readouterr().out
    assert shown.startswith("dataset  text, required\n    Path or s3:// prefix")
    assert "epochs  whole number, default 100\n" in shown
    assert max(map(len, shown.splitlines())) <= 100
    names = declared(GATE.read_text(encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", ["kfp-gate", "parameters", "gate", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    listed = json.loads(capsys.readouterr().out)
    assert set(listed) == set(names)
    assert all(p["description"] for p in listed.values())


@pytest.mark.parametrize("module", [guessing, parameters])
def test_examples_in_docstrings_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_the_manual_names_every_option() -> None:
    from typer.main import get_command

    manual = (ROOT / "docs" / "authoring.md").read_text(encoding="utf-8")
    options = get_command(cli.app).commands["submit"].params  # type: ignore[attr-defined]
    flags = {flag for o in options for flag in o.opts if flag.startswith("--")} - {"--token", "--parameter"}
    missing = [flag for flag in flags if flag not in manual and f"--no-{flag[2:]}" not in manual]
    assert missing == []
