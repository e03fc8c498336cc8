"""Register what passed, and nothing else."""

from kfp import dsl

from kfp_gate.components import register_model, split_dataset, validation_gate


@dsl.pipeline(name="register")
def register(dataset: str, model_uri: str):
    split = split_dataset(dataset=dataset)
    judged = validation_gate(test=split.outputs["test"], model_uri=model_uri, min_map50=0.6)
    with dsl.If(judged.outputs["Output"] == True):  # noqa: E712
        register_model(
            model_uri=model_uri,
            verdict=judged.outputs["verdict"],
            report=judged.outputs["report"],
            registered_model="cones",
            alias="candidate",
        )
