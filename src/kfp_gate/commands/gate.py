"""`kfp-gate judge` and `kfp-gate suggest-thresholds`."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

app = typer.Typer()


@app.command()
def judge(
    evaluation: Annotated[str, typer.Argument(help="Where a gate's evaluation lies: a path or s3:// prefix.")],
    class_thresholds: Annotated[str, typer.Option(help='JSON such as {"cone": {"map50": 0.8}}.')] = "{}",
    min_map50: Annotated[float, typer.Option(help="Lowest mAP at IoU 0.50; 0 is off.")] = 0.5,
    min_instances: Annotated[int, typer.Option(help="Objects that a class needs before it is judged.")] = 0,
    decide: Annotated[str, typer.Option(help="point or confident.")] = "point",
    on_insufficient: Annotated[str, typer.Option(help="block or allow.")] = "block",
    allow_unproven_separation: Annotated[bool, typer.Option(help="Judge a model without fingerprints.")] = False,
    verdict: Annotated[Path | None, typer.Option(help="File for the verdict (JSON).")] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report (HTML).")] = None,
) -> None:
    """Judge a stored evaluation under other thresholds. Exits 0 passed, 3 refused."""
    from kfp_gate.gate import run, summary
    from kfp_gate.gate.settings import gate_settings
    from kfp_gate.local_run import REFUSED
    from kfp_gate.storage import local_folder

    settings = gate_settings(
        min_map50=min_map50, class_thresholds=_json(class_thresholds), min_instances=min_instances, decide=decide,
        on_insufficient=on_insufficient, allow_unproven_separation=allow_unproven_separation,
    )  # fmt: skip
    with TemporaryDirectory() as scratch:
        judged = run.judge(local_folder(evaluation, Path(scratch)), settings, verdict=verdict, report_file=report)
    print(summary.markdown(judged.verdict))
    raise typer.Exit(0 if judged.verdict.passed else REFUSED)


@app.command()
def suggest_thresholds(
    evaluation: Annotated[str, typer.Argument(help="Where a gate's evaluation lies: a path or s3:// prefix.")],
    metrics: Annotated[str, typer.Option(help="Metrics to bound, joined by commas.")] = "map50,recall",
    share: Annotated[float, typer.Option(help="Share of resampled test sets on which the model shall pass.")] = 0.95,
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


def _json(text: str) -> Any:
    from kfp_gate.errors import InvalidInput

    try:
        return json.loads(text)
    except ValueError as error:
        raise InvalidInput(
            f"{text!r} ({error})", expected='JSON such as {"cone": {"map50": 0.8}}', where="--class-thresholds",
            next_step="put names and texts into double quotes, and the whole into single ones",
        ) from None  # fmt: skip
