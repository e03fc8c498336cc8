"""`kfp-gate diagnose`."""

import json
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from kfp_gate.errors import InvalidInput

app = typer.Typer()


@app.command()
def diagnose(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN...",
            show_default=False,
            help="A run's folder or timeline, a checkpoint location (path or s3://), or runs:/ID of MLflow; also "
            "while it goes on. Of several, each is compared with the first.",
        ),
    ] = None,
    report: Annotated[Path | None, typer.Option(help="File for the report (HTML).")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="File for the answer (JSON).")] = None,
    acknowledge: Annotated[
        list[str] | None, typer.Option(help="A condition that is meant to differ between the runs; repeat it.")
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(help="File to which what was found is added; without a run: show what it holds."),
    ] = None,
    hypothesis: Annotated[str, typer.Option(help="For the record: what you hold for the cause.")] = "",
    change: Annotated[str, typer.Option(help="For the record: what was changed.")] = "",
    rejected: Annotated[
        list[str] | None, typer.Option(help="For the record: a path that led nowhere, and why; repeat it.")
    ] = None,
    tracking_uri: Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow server.")] = "",
) -> None:
    """Say what a training waits for, with evidence, the next check, and what a change would bring.

    For instance: kfp-gate diagnose s3://bucket/checkpoints --report why.html
    """
    from kfp_gate.diagnosis.comparing.compare import Comparison, compare_each
    from kfp_gate.diagnosis.comparing.notes import add_note, markdown, read_notes
    from kfp_gate.diagnosis.diagnose import diagnose as diagnosed
    from kfp_gate.diagnosis.findings import Diagnosis
    from kfp_gate.diagnosis.pages import report as pages
    from kfp_gate.diagnosis.pages.text import comparison_text, text
    from kfp_gate.diagnosis.reading.runs import read_run

    if not runs:
        if record is None:
            raise _refused("no run", "a run to read", "name its folder, checkpoint location or MLflow run")
        unused = {"--report": report, "--json": json_file, "--acknowledge": acknowledge, "--hypothesis": hypothesis,
                  "--change": change, "--rejected": rejected}  # fmt: skip
        if given := [name for name, value in unused.items() if value]:
            raise _refused(
                f"{', '.join(given)} and no run", "a run to read; --record alone shows what the record holds",
                "name the run's folder, checkpoint location or MLflow run",
            )  # fmt: skip
        print(markdown(read_notes(record)), end="")
        return
    if acknowledge and len(runs) == 1:
        raise _refused(
            "--acknowledge with one run", "two runs to compare", "name the run before the change, then the one after"
        )
    if (hypothesis or change or rejected) and record is None:
        raise _refused("something to record, and no record", "--record FILE", "name the file that keeps what was tried")
    with TemporaryDirectory() as scratch:
        read = [read_run(r, Path(scratch) / str(i), tracking_uri=tracking_uri) for i, r in enumerate(runs)]
    subjects: list[Diagnosis | Comparison]
    if len(read) == 1:
        found = diagnosed(read[0])
        shown, page, subjects = text(found), pages.html(found, read[0]), [found]
    else:
        compared = compare_each(read, acknowledge or ())
        shown = "\n\n".join(comparison_text(c) for c in compared)
        page, subjects = pages.comparison_html(*compared), [*compared]
    print(shown)
    if report is not None:
        report.write_text(page, encoding="utf-8")
        print(f"\nreport: {report}")
    if json_file is not None:
        plain = [asdict(s) for s in subjects]
        told = json.dumps(plain[0] if len(plain) == 1 else plain, ensure_ascii=False, indent=1, default=str)
        json_file.write_text(told + "\n", encoding="utf-8")
    if record is not None:
        for subject in subjects:
            add_note(record, subject, hypothesis=hypothesis, change=change, rejected=rejected or ())
        print(f"record: {record}")


def _refused(found: str, expected: str, next_step: str) -> InvalidInput:
    return InvalidInput(found, expected=expected, where="kfp-gate diagnose", next_step=next_step)
