"""Split a COCO dataset by video and look at what each split holds."""

from kfp import dsl

from kfp_gate.components import split_dataset


@dsl.pipeline(name="split")
def split(dataset: str = "s3://bucket/streets"):
    split_dataset(dataset=dataset, dataset_format="coco", group_rule="folder", test_share=0.2, val_share=0.1)
