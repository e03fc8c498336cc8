"""What holds for the pipeline, whoever edited its YAML: nothing refused is registered, no secret is in it."""

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import compiler, dsl, local
from kfp.dsl import HTML, Artifact, Model, Output

from kfp_gate.components import register_model
from kfp_gate.registry.tracking import connect
from kfp_gate.registry.versions import aliases, all_versions

Make = Callable[..., Path]


@pytest.mark.parametrize("passed", [True, False])
def test_the_component_registers_what_passed_and_stops_at_what_did_not(
    passed: bool,
    tracking_uri: str,
    make_model: Make,
    make_verdict: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("KFP_GATE_RUN_ID", "r")
    model = make_model()
    (tmp_path / "report.html").write_text("<p>")

    def run() -> None:
        register_model.python_func(
            verdict=SimpleNamespace(path=str(make_verdict(model, passed=passed))),
            report=SimpleNamespace(path=str(tmp_path / "report.html")),
            version=SimpleNamespace(path=str(tmp_path / "version.json")),
            registered_model="det", model=SimpleNamespace(path=str(model)), tracking_uri=tracking_uri,
        )  # fmt: skip

    if passed:
        run()
        assert aliases(connect(tracking_uri), "det") == {"champion": 1}
        return
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == 2
    assert "the gate refused this model" in capsys.readouterr().out
    assert aliases(connect(tracking_uri), "det") is None


@dsl.component(base_image="none", install_kfp_package=False)
def judged_elsewhere(
    source: str, verdict_file: str, model: Output[Model], verdict: Output[Artifact], report: Output[HTML]
) -> bool:
    """Stands for training and gate: the outputs of a model that was refused, and the honest answer."""
    import shutil

    shutil.copytree(source, model.path)
    shutil.copyfile(verdict_file, verdict.path)
    with open(report.path, "w") as page:  # noqa: PTH123  # a component's body imports what it needs, and this is enough
        page.write("<p>refused</p>")
    return False


@pytest.mark.all_only
def test_a_pipeline_whose_condition_was_made_to_hold_always_registers_nothing(
    tracking_uri: str, make_model: Make, make_verdict: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    verdict = make_verdict(model, passed=False)

    @dsl.pipeline(name="tampered")
    def tampered() -> None:
        judged = judged_elsewhere(source=str(model), verdict_file=str(verdict))
        with dsl.If(judged.outputs["Output"] == False):  # noqa: E712  # the pipeline's own form, turned round
            register_model(
                model=judged.outputs["model"], verdict=judged.outputs["verdict"], report=judged.outputs["report"],
                registered_model="det", tracking_uri=tracking_uri,
            )  # fmt: skip

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KFP_GATE_RUN_ID", "r")
    local.init(
        runner=local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "outputs"), raise_on_error=False
    )
    tampered()
    tracking = connect(tracking_uri)
    # The step did run, and stopped at the verdict.
    (run,) = tracking.client.search_runs([tracking.experiment_id], "tags.`kfp_gate.pipeline_run` = 'r'")
    assert "the gate refused this model" in run.data.tags["kfp_gate.step.register_model"]
    assert aliases(tracking, "det") is None
    assert all_versions(tracking, "det") == []


@pytest.mark.all_only
def test_no_value_of_the_environment_gets_into_the_compiled_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MLFLOW_TRACKING_TOKEN", "MLFLOW_TRACKING_PASSWORD", "AWS_SECRET_ACCESS_KEY", "KFP_GATE_WEBHOOK"):
        monkeypatch.setenv(name, f"planted-{name.lower()}")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://planted.example")
    from kfp_gate.pipelines.gate import make_gate

    compiler.Compiler().compile(make_gate(), str(tmp_path / "gate.yaml"))
    compiled = [tmp_path / "gate.yaml", *sorted(Path(__file__).parents[2].glob("compiled/*.yaml"))]
    assert len(compiled) > 2
    for path in compiled:
        content = path.read_text(encoding="utf-8")
        assert "planted" not in content, path
        assert os.environ["HOME"] + "/" not in content or os.environ["HOME"] == "/", path
