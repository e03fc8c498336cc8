"""Try thresholds, names and the gate's image before a training is paid for."""

from kfp import dsl

from kfp_gate.components import preflight, split_dataset


@dsl.pipeline(name="check-first")
def check_first(dataset: str):
    split = split_dataset(dataset=dataset)
    preflight(
        train=split.outputs["train"],
        val=split.outputs["val"],
        test=split.outputs["test"],
        backend="trainjob",
        class_thresholds={"*": {"recall": {"min": 0.5}}, "cone": {"map50": {"min": 0.8}}},
    )
