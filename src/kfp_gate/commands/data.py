"""`kfp-gate split`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def split(
    source: Annotated[str, typer.Option(help="Path or s3:// prefix of the dataset.")],
    out: Annotated[Path, typer.Option(help="Folder for the manifests, the coverage report and the rejects.")],
    format: Annotated[str, typer.Option(help="auto, yolo, coco or voc.")] = "auto",
    group_rule: Annotated[str, typer.Option(help="What belongs together, see docs/splitting.md.")] = "auto",
    shares: Annotated[str, typer.Option(help="Of train, val and test.")] = "0.7,0.15,0.15",
    seed: Annotated[int, typer.Option(help="Another seed gives another assignment.")] = 0,
    strategy: Annotated[str, typer.Option(help="hash, stratified or fixed.")] = "hash",
    previous: Annotated[str, typer.Option(help="An earlier split, whose images stay where they are.")] = "",
    min_instances: Annotated[int, typer.Option(help="Objects that each class should have in the test set.")] = 0,
    on_shortfall: Annotated[str, typer.Option(help="warn or error for a class with fewer.")] = "warn",
    rejects: Annotated[str, typer.Option(help="error, drop or fix what is defective.")] = "error",
) -> None:
    """Split a dataset without leaks: manifests, coverage report and rejects into a folder."""
    from kfp_gate.data import coverage
    from kfp_gate.data.splitting import split_to_folder
    from kfp_gate.errors import InvalidInput

    try:
        parts = tuple(float(part) for part in shares.split(","))
    except ValueError:
        raise InvalidInput(
            f"shares {shares!r}", expected="three numbers such as 0.7,0.15,0.15", where="--shares",
            next_step="write the shares of train, val and test, joined by commas",
        ) from None  # fmt: skip
    result = split_to_folder(
        source, out, format=format, group_rule=group_rule, shares=parts, seed=seed, strategy=strategy,
        previous=previous, min_instances=min_instances, on_shortfall=on_shortfall, rejects=rejects,
    )  # fmt: skip
    print(coverage.text(result.coverage))
    print(f"written: {out}")
