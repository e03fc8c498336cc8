"""Judge a model that exists, class by class; act on both endings."""

from kfp import dsl

from kfp_gate.components import split_dataset, validation_gate


@dsl.component(base_image="python:3.11-slim", install_kfp_package=False)
def announce(text: str):
    print(text)


@dsl.pipeline(name="judge")
def judge(dataset: str, model_uri: str):
    split = split_dataset(dataset=dataset)
    judged = validation_gate(
        test=split.outputs["test"],
        model_uri=model_uri,
        class_thresholds={"cone": {"map50": {"min": 0.8}}, "*": {"recall": 0.5}},
        min_instances=30,
    )
    judged.set_accelerator_type("nvidia.com/gpu").set_accelerator_limit(1)
    with dsl.If(judged.outputs["Output"] == True):  # noqa: E712
        announce(text="passed")
    with dsl.Else():
        announce(text="refused: see the report of the gate")
