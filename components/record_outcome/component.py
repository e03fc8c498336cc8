"""Write into MLflow how the pipeline ended: registered, refused, or broken at a step."""

from kfp import dsl

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("record_outcome"), install_kfp_package=False)
def record_outcome(
    status: dsl.PipelineTaskFinalStatus,
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
    registered_model: str = "",
):
    """Exit handler: finds the MLflow run by the pipeline run's id and the ending by the tags of the steps.

    Args:
        status: State of the pipeline as the backend tells it.
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.
        registered_model: Name in the model registry, for the link.
    """
    from kfp_gate.steps import run_id, step

    with step("record_outcome") as told:
        import os

        from kfp_gate.registry import outcome

        if not (tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")):
            print("nothing is recorded: there is no tracking server", flush=True)
            return
        found = outcome.record_outcome(
            run_id=run_id(),
            tracking_uri=tracking_uri,
            experiment=experiment,
            pipeline_state=status.state,
            pipeline_error=status.error_message or "",
        )
        print(outcome.note(found), flush=True)
        told.update(state=found.state, step=found.step)
