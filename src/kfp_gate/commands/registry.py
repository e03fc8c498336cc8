"""`kfp-gate fetch` and `kfp-gate rollback`."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()

_TRACKING = typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow server.")


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(help="models:/NAME@champion, models:/NAME/3, s3://... or a path.")],
    out: Annotated[Path, typer.Option(help="Folder for the model; replaced if it exists.")] = Path("model"),
    tracking_uri: Annotated[str, _TRACKING] = "",
) -> None:
    """Bring a model to this machine, verified by its digest."""
    from kfp_gate.registry.fetch import fetch_model

    print(fetch_model(model, out, tracking_uri=tracking_uri))


@app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="Name of the registered model.")],
    alias: Annotated[str, typer.Option(help="Alias to set back.")] = "champion",
    to: Annotated[int, typer.Option(help="Version to go back to; 0: the one before.")] = 0,
    tracking_uri: Annotated[str, _TRACKING] = "",
) -> None:
    """Set an alias back to the version before, whose files are read back first."""
    from kfp_gate.registry.alias import rollback as roll
    from kfp_gate.registry.fetch import connect_for_reading
    from kfp_gate.registry.tracking import PATIENCE

    move = roll(connect_for_reading(tracking_uri, PATIENCE), name, alias, to or None)
    print(f"{name}@{alias}: version {move.version}, before: {move.previous}")
