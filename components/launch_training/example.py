"""Train on four nodes with one GPU each; checkpoints survive a preemption."""

from kfp import dsl

from kfp_gate.components import launch_training, split_dataset


@dsl.pipeline(name="train")
def train(dataset: str):
    split = split_dataset(dataset=dataset)
    launch_training(
        train=split.outputs["train"],
        val=split.outputs["val"],
        base_model="yolo11s.yaml",
        epochs=100,
        batch=64,
        backend="trainjob",
        nodes=4,
        gpus_per_node=1,
        checkpoint_uri="s3://bucket/checkpoints",
        monitors=["map50_95", "class/cone/recall"],
    )
