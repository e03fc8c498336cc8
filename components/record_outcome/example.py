"""Say in MLflow how every run ended, also one that broke."""

from kfp import dsl

from kfp_gate.components import record_outcome, split_dataset, validation_gate


@dsl.pipeline(name="recorded")
def recorded(dataset: str, model_uri: str, tracking_uri: str = ""):
    ending = record_outcome(tracking_uri=tracking_uri)
    with dsl.ExitHandler(ending):
        split = split_dataset(dataset=dataset, tracking_uri=tracking_uri)
        validation_gate(test=split.outputs["test"], model_uri=model_uri, tracking_uri=tracking_uri)
