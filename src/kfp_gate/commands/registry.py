"""`kfp-gate fetch`, `kfp-gate rollback` and `kfp-gate deliver`."""

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


@app.command()
def deliver(
    spool: Annotated[str, typer.Argument(help="What a training could not deliver: a path or s3://.../spool-*.jsonl.")],
    run_id: Annotated[str, typer.Option(help="MLflow run to write to; empty: a new one.")] = "",
    experiment: Annotated[str, typer.Option(help="MLflow experiment of a new run.")] = "kfp-gate",
    tracking_uri: Annotated[str, _TRACKING] = "",
) -> None:
    """Send the values of a training to MLflow that its server did not take at the time."""
    from tempfile import TemporaryDirectory

    from kfp_gate.errors import InvalidInput, Unavailable
    from kfp_gate.storage import open_store
    from kfp_gate.training.delivery import deliver_spool
    from kfp_gate.training.tracking import address_of

    if address_of(tracking_uri) is None:
        raise InvalidInput(
            "no MLflow server", expected="the address of one", where="--tracking-uri",
            next_step="name it there, or in MLFLOW_TRACKING_URI",
        )  # fmt: skip

    place, _, name = spool.rpartition("/")
    with TemporaryDirectory() as scratch:
        file = Path(scratch) / "spool.jsonl"
        open_store(place or ".").download(name, file)
        found = deliver_spool(file, uri=tracking_uri, experiment=experiment, run_id=run_id)
    print(found.text())
    if found.waiting:
        raise Unavailable(
            f"{found.waiting} items were not taken: {found.last_error}", expected="a server that answers",
            where=spool, next_step="run the command again later: nothing is written twice",
        )  # fmt: skip
