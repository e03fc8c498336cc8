"""Put a model that passed into the MLflow registry, once, verified by its digest."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Input, Model, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("register_model"), install_kfp_package=False)
def register_model(
    verdict: Input[Artifact],
    report: Input[HTML],
    version: Output[Artifact],
    registered_model: str,
    model: Input[Model] = None,
    model_uri: str = "",
    alias: str = "champion",
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
):
    """Register the judged model and read it back.

    The verdict is checked here again: a refused one, or one about other weights, is never registered,
    whatever the pipeline's condition says. A retry finds the version that it made before.

    Args:
        verdict: The gate's verdict.
        report: The gate's page, kept beside the model.
        registered_model: Name in the model registry; empty: nothing is registered.
        model: Model folder of a training step.
        model_uri: Model to register when no training step made one: a path or s3:// location.
        alias: Alias that the version gets; empty: none.
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        version: Name, version, digest and alias as registered (JSON).
    """
    from kfp_gate.steps import run_id, step

    with step("register_model", tracking_uri=tracking_uri, experiment=experiment) as told:
        import json
        from dataclasses import asdict
        from pathlib import Path
        from tempfile import mkdtemp

        from kfp_gate.registry import register
        from kfp_gate.registry.fetch import fetch_model

        if registered_model:
            folder = Path(model.path) if model else fetch_model(model_uri, Path(mkdtemp()), tracking_uri=tracking_uri)
            registration = register.register_model(
                folder,
                Path(verdict.path),
                name=registered_model,
                alias=alias,
                tracking_uri=tracking_uri,
                experiment=experiment,
                run_id=run_id(),
                report=Path(report.path),
            )
            told.update(asdict(registration))
        else:
            print("nothing is registered: the parameter registered_model is empty", flush=True)
        Path(version.path).write_text(json.dumps(told, indent=1), encoding="utf-8")
