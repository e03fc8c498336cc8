"""Judge a stored evaluation again, under stricter thresholds for one class."""

from kfp import dsl

from kfp_gate.components import judge_evaluation


@dsl.pipeline(name="judge-again")
def judge_again(evaluation_uri: str):
    judge_evaluation(
        evaluation_uri=evaluation_uri,
        class_thresholds={"cone": {"map50": {"min": 0.8}}, "*": {"recall": {"min": 0.5}}},
        min_instances=20,
    )
