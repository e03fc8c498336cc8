"""`kfp-gate render` and `kfp-gate doctor`."""

from typing import Annotated

import typer

app = typer.Typer()

_BACKEND = typer.Option(help="trainjob or pytorchjob.")
_NAMESPACE = typer.Option("--namespace", "-n", help="Namespace of the job; empty: the current one.")
_IMAGE = typer.Option(help="Image of the ranks; empty: this release's.")
_CHECKPOINTS = typer.Option(help="s3:// prefix for checkpoints.")


@app.command()
def render(
    worker_image: Annotated[str, _IMAGE] = "",
    checkpoint_uri: Annotated[str, _CHECKPOINTS] = "s3://bucket/checkpoints",
    backend: Annotated[str, _BACKEND] = "trainjob",
    nodes: Annotated[int, typer.Option(help="Pods.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each pod.")] = 1,
    memory_per_node: Annotated[str, typer.Option(help="Memory of each pod.")] = "16Gi",
    namespace: Annotated[str, _NAMESPACE] = "",
    runtime: Annotated[str, typer.Option(help="TrainingRuntime.")] = "kfp-gate-training",
    queue: Annotated[str, typer.Option(help="Kueue queue.")] = "",
    release: Annotated[str, typer.Option(help="Of Kubeflow Trainer: 2.0, 2.1 or 2.2.")] = "2.2",
) -> None:
    """Print the manifests that a launch would create, without a cluster."""
    import yaml

    from kfp_gate.images.names import reference
    from kfp_gate.launching.cluster import render as manifests
    from kfp_gate.launching.options import LaunchOptions
    from kfp_gate.training.spec import TrainingSpec

    options = LaunchOptions(
        backend=backend, nodes=nodes, gpus_per_node=gpus_per_node, memory=memory_per_node, namespace=namespace,
        worker_image=worker_image or reference("worker"), runtime=runtime, queue=queue, checkpoint_uri=checkpoint_uri,
    )  # fmt: skip
    inputs = f"{checkpoint_uri}/inputs"
    spec = TrainingSpec(
        train_manifest=f"{inputs}/train.parquet", val_manifest=f"{inputs}/val.parquet", checkpoint_uri=checkpoint_uri
    )
    print(yaml.safe_dump_all(manifests(spec.to_json(), options, release=release), sort_keys=False), end="")


@app.command()
def doctor(
    backend: Annotated[str, _BACKEND] = "trainjob",
    namespace: Annotated[str, _NAMESPACE] = "",
    worker_image: Annotated[str, _IMAGE] = "",
    checkpoint_uri: Annotated[str, _CHECKPOINTS] = "",
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of each pod.")] = 1,
    runtime: Annotated[str, typer.Option(help="TrainingRuntime.")] = "kfp-gate-training",
    tracking_uri: Annotated[str, typer.Option(envvar="MLFLOW_TRACKING_URI", help="MLflow server.")] = "",
) -> None:
    """Ask the current cluster for everything that a launch needs. Exits 2 if something is missing."""
    from kfp_gate.images.names import reference
    from kfp_gate.launching import doctor as checks
    from kfp_gate.launching.options import LaunchOptions

    options = LaunchOptions(
        backend=backend, namespace=namespace, gpus_per_node=gpus_per_node, runtime=runtime,
        worker_image=worker_image or reference("worker"), checkpoint_uri=checkpoint_uri,
    )  # fmt: skip
    findings = checks.doctor(options, tracking_uri=tracking_uri)
    print(checks.text(findings))
    checks.refuse_errors(findings, "the current cluster")
