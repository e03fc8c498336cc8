"""Read a training's timeline: what held it back, and what to check next."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("diagnose_training"), install_kfp_package=False)
def diagnose_training(
    diagnosis: Output[Artifact],
    report: Output[HTML],
    record: Input[Artifact] = None,
    run_uri: str = "",
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
):
    """Say in one sentence what a training waits for, with evidence, and what a change would bring.

    Reads what the ranks recorded and runs nothing: also of a training that failed, or that still runs.
    "Not enough observations" is an answer, and names the missing ones.

    Args:
        record: The `record` of a training step.
        run_uri: Run to read when no training step made one: a checkpoint location (a path or s3:// prefix), a
            folder with a timeline, or an MLflow run (runs:/ID).
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        diagnosis: Answer, hypotheses with evidence, scenarios and memory growth (JSON).
        report: The same as a page, with the time axis.
    """
    from kfp_gate.steps import step

    with step("diagnose_training", tracking_uri=tracking_uri, experiment=experiment) as told:
        from pathlib import Path
        from tempfile import TemporaryDirectory

        from kfp_gate.diagnosis.diagnose import diagnose
        from kfp_gate.diagnosis.pages import report as pages
        from kfp_gate.diagnosis.reading.runs import one_source, read_run

        with TemporaryDirectory() as scratch:
            where = one_source(record.path if record else "", run_uri)
            run = read_run(where, Path(scratch), tracking_uri=tracking_uri)
        found = diagnose(run)
        print(found.answer)
        Path(diagnosis.path).write_text(found.to_json(), encoding="utf-8")
        Path(report.path).write_text(pages.html(found, run), encoding="utf-8")
        told.update(answer=found.answer, state=found.state, diagnosis=diagnosis.path, report=report.path)
