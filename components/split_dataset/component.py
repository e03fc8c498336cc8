"""Split a detection dataset into train, val and test, without leaks."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Metrics, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("split_dataset"), install_kfp_package=False)
def split_dataset(
    dataset: str,
    train: Output[Dataset],
    val: Output[Dataset],
    test: Output[Dataset],
    coverage: Output[HTML],
    metrics: Output[Metrics],
    rejects: Output[Artifact],
    dataset_format: str = "auto",
    dataset_revision: str = "",
    group_rule: str = "auto",
    train_share: float = 0.7,
    val_share: float = 0.15,
    test_share: float = 0.15,
    seed: int = 0,
    split_strategy: str = "hash",
    previous_split: str = "",
    min_test_instances: int = 0,
    on_shortfall: str = "warn",
    reject_policy: str = "error",
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
):
    """Read annotations, group what belongs together, and assign every group to one split by its hash.

    Images that share a group never land in different splits, and files that are added later move no image
    that was assigned before. `val` chooses the best checkpoint; `test` is seen by the gate alone.

    Args:
        dataset: Path or s3:// prefix of the dataset.
        dataset_format: auto, yolo, coco or voc.
        dataset_revision: Any text; change it when the files under the same location changed, since a cached
            split is found by its parameters.
        group_rule: auto, none, folder, prefix:SEPARATOR, regex:PATTERN and others, joined with +.
        train_share: Share of the images that train the model.
        val_share: Share of the images that choose the best checkpoint.
        test_share: Share of the images that only the gate sees.
        seed: Another seed gives another assignment.
        split_strategy: hash, stratified (shares balanced per class) or fixed (the source's own train, val, test).
        previous_split: Folder or prefix of an earlier split, whose images stay where they are; empty: none.
        min_test_instances: Objects that each class should have in the test set; 0 asks for none.
        on_shortfall: warn or error for a class with fewer.
        reject_policy: error, drop or fix what is defective; everything is listed in the rejects.
        tracking_uri: MLflow server that gets the step's tags; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        train: Manifest of the training images (Parquet).
        val: Manifest of the validation images (Parquet).
        test: Manifest of the test images (Parquet).
        coverage: What each split holds, per class.
        metrics: The counts of the coverage report.
        rejects: Every finding on the input and what was done about it (CSV).
    """
    from kfp_gate.steps import step

    with step("split_dataset", tracking_uri=tracking_uri, experiment=experiment) as told:
        import json
        from pathlib import Path

        from kfp_gate.data import coverage as report
        from kfp_gate.data.manifest import write_manifest
        from kfp_gate.data.splitting import split_dataset as split

        result = split(
            dataset,
            format=dataset_format,
            revision=dataset_revision,
            group_rule=group_rule,
            shares=(train_share, val_share, test_share),
            seed=seed,
            strategy=split_strategy,
            previous=previous_split,
            min_instances=min_test_instances,
            on_shortfall=on_shortfall,
            rejects=reject_policy,
            rejects_file=Path(rejects.path),
        )
        for name, artifact in (("train", train), ("val", val), ("test", test)):
            manifest = result.manifests[name]
            write_manifest(manifest, Path(artifact.path))
            artifact.metadata.update(digest=manifest.digest, images=len(manifest), classes=list(manifest.classes))
        values = report.metrics(result.coverage)
        for name, value in values.items():
            metrics.log_metric(name, value)
        # Without a file behind every output kfp's local cache takes the entry for a damaged one.
        Path(metrics.path).write_text(json.dumps(values), encoding="utf-8")
        Path(coverage.path).write_text(report.html(result.coverage), encoding="utf-8")
        print(report.text(result.coverage), flush=True)
        told.update(notes=list(result.notes), coverage=coverage.path)
