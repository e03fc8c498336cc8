"""`kfp-gate judge` and `kfp-gate suggest-thresholds`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from kfp_gate.errors import InvalidInput

app = typer.Typer()


@app.command()
def judge(
    evaluation: Annotated[str, typer.Argument(help="Where a gate's evaluation lies: a path or s3:// prefix.")],
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", help="A bound or setting of the gate as name=value; repeat it."),
    ] = None,
    verdict: Annotated[Path | None, typer.Option(help="File for the verdict (JSON).")] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report (HTML).")] = None,
) -> None:
    """Judge a stored evaluation under other thresholds. Exits 0 passed, 3 refused.

    For instance: kfp-gate judge EVALUATION -p min_map50=0.6 -p 'class_thresholds={"cone": {"map50": 0.8}}'
    """
    from kfp_gate.gate import run, summary
    from kfp_gate.gate.settings import gate_settings
    from kfp_gate.running.local import REFUSED
    from kfp_gate.storage import local_folder

    # Without a bound of its own the gate asks for what the pipelines ask for by default.
    settings = gate_settings(**{"min_map50": 0.5, **dict(map(_setting, parameter or []))})
    with TemporaryDirectory() as scratch:
        judged = run.judge(local_folder(evaluation, Path(scratch)), settings, verdict=verdict, report_file=report)
    print(summary.markdown(judged.verdict))
    raise typer.Exit(0 if judged.verdict.passed else REFUSED)


@app.command()
def suggest_thresholds(
    evaluation: Annotated[str, typer.Argument(help="Where a gate's evaluation lies: a path or s3:// prefix.")],
    metrics: Annotated[str, typer.Option(help="Metrics to bound, joined by commas.")] = "map50,recall",
    share: Annotated[
        float, typer.Option(help="Share of resampled test sets on which the model shall pass all of them together.")
    ] = 0.95,
) -> None:
    """Propose per-class thresholds that the evaluated model would still pass on another such test set."""
    from kfp_gate.evaluation.evaluate import Evaluation
    from kfp_gate.gate.suggesting import suggest
    from kfp_gate.storage import local_folder

    with TemporaryDirectory() as scratch:
        stored = Evaluation.load(local_folder(evaluation, Path(scratch)))
        found = suggest(stored, metrics=[m.strip() for m in metrics.split(",")], share=share)
    print(json.dumps(found.class_thresholds, ensure_ascii=False, indent=1))
    for note in found.notes:
        typer.echo(f"note: {note}", err=True)


def _setting(text: str) -> tuple[str, Any]:
    """`name=value`, where the value is JSON, or a bare word such as `confident`."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        if value.isidentifier():
            return name, value
    raise InvalidInput(
        f"{text!r}", expected='name=value with a number, a word or JSON such as {"cone": {"map50": 0.8}}',
        where="--parameter", next_step="put names and texts into double quotes, and the whole into single ones",
    )  # fmt: skip
