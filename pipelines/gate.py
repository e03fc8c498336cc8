"""A dataset becomes a judged and, if it passed, registered model."""

from kfp import dsl

from kfp_gate.components import (
    launch_training,
    preflight,
    record_outcome,
    register_model,
    split_dataset,
    validation_gate,
)
from kfp_gate.pipelines.settings import CompileOptions, configure, described, launches, on_gpu, refuse_bad_mounts


def make_gate(options: CompileOptions = CompileOptions()):
    """The pipeline `gate` for the given compile options."""
    refuse_bad_mounts(options)

    @dsl.pipeline(name="gate")
    @described(
        "Split without leaks, train on many ranks, judge per class, register only what passed.",
        split_dataset,
        preflight,
        launch_training,
        validation_gate,
        register_model,
    )
    def gate(
        dataset: str,
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
        base_model: str = "yolo11n.yaml",
        epochs: int = 100,
        image_size: int = 640,
        batch: int = 16,
        monitors: list = ["map50_95"],
        patience: int = 50,
        stop_on: str = "",
        min_delta: float = 0.0,
        min_epochs: int = 0,
        training_options: dict = {},
        workers: int = -1,
        resume_from: str = "",
        backend: str = "trainjob",
        nodes: int = 1,
        processes_per_node: int = 1,
        gpus_per_node: int = 1,
        memory_per_node: str = "16Gi",
        worker_image: str = "",
        namespace: str = "",
        runtime: str = "kfp-gate-training",
        queue: str = "",
        command: list = [],
        checkpoint_uri: str = "",
        min_map50: float = 0.5,
        min_map50_95: float = 0.0,
        min_precision: float = 0.0,
        min_recall: float = 0.0,
        min_mean_confidence: float = 0.0,
        max_abnormal_box_rate: float = 1.0,
        max_undetected_image_rate: float = 1.0,
        class_thresholds: dict = {},
        min_instances: int = 0,
        decide: str = "point",
        on_insufficient: str = "block",
        waivers: list = [],
        champion: str = "",
        tracking_uri: str = "",
        experiment: str = "kfp-gate",
        registered_model: str = "",
        alias: str = "champion",
    ):
        tracking = {"tracking_uri": tracking_uri, "experiment": experiment}
        thresholds = {
            "min_map50": min_map50,
            "min_map50_95": min_map50_95,
            "min_precision": min_precision,
            "min_recall": min_recall,
            "min_mean_confidence": min_mean_confidence,
            "max_abnormal_box_rate": max_abnormal_box_rate,
            "max_undetected_image_rate": max_undetected_image_rate,
            "class_thresholds": class_thresholds,
            "min_instances": min_instances,
            "decide": decide,
            "on_insufficient": on_insufficient,
            "waivers": waivers,
        }
        outcome = record_outcome(registered_model=registered_model, **tracking)
        configure(outcome, "record_outcome", options, cpu="500m", memory="1Gi")
        with dsl.ExitHandler(outcome, name="pipeline"):
            split = split_dataset(
                dataset=dataset,
                dataset_format=dataset_format,
                dataset_revision=dataset_revision,
                group_rule=group_rule,
                train_share=train_share,
                val_share=val_share,
                test_share=test_share,
                seed=seed,
                split_strategy=split_strategy,
                previous_split=previous_split,
                min_test_instances=min_test_instances,
                on_shortfall=on_shortfall,
                reject_policy=reject_policy,
                **tracking,
            )
            configure(split, "split_dataset", options, cpu="2", memory="8Gi", cached=True)
            checks = preflight(
                train=split.outputs["train"],
                val=split.outputs["val"],
                test=split.outputs["test"],
                base_model=base_model,
                image_size=image_size,
                batch=batch,
                monitors=monitors,
                backend=backend,
                nodes=nodes,
                processes_per_node=processes_per_node,
                gpus_per_node=gpus_per_node,
                memory_per_node=memory_per_node,
                namespace=namespace,
                runtime=runtime,
                worker_image=worker_image,
                queue=queue,
                checkpoint_uri=checkpoint_uri,
                champion=champion,
                registered_model=registered_model,
                alias=alias,
                **thresholds,
                **tracking,
            )
            launches(on_gpu(configure(checks, "validation_gate", options, cpu="2", memory="8Gi"), options), options)
            training = launch_training(
                train=split.outputs["train"],
                val=split.outputs["val"],
                base_model=base_model,
                epochs=epochs,
                image_size=image_size,
                batch=batch,
                seed=seed,
                monitors=monitors,
                patience=patience,
                stop_on=stop_on,
                min_delta=min_delta,
                min_epochs=min_epochs,
                training_options=training_options,
                workers=workers,
                resume_from=resume_from,
                backend=backend,
                nodes=nodes,
                processes_per_node=processes_per_node,
                gpus_per_node=gpus_per_node,
                memory_per_node=memory_per_node,
                worker_image=worker_image,
                namespace=namespace,
                runtime=runtime,
                queue=queue,
                command=command,
                checkpoint_uri=checkpoint_uri,
                **tracking,
            )
            configure(training, "launch_training", options, cpu="1", memory="4Gi", cached=True).after(checks)
            launches(training, options)
            judged = validation_gate(
                model=training.outputs["model"],
                test=split.outputs["test"],
                champion=champion,
                registered_model=registered_model,
                alias=alias,
                batch=batch,
                **thresholds,
                **tracking,
            )
            on_gpu(configure(judged, "validation_gate", options, cpu="4", memory="16Gi"), options)
            # Only `== True` compiles to the right condition, and only on a single unnamed return value.
            with dsl.If(judged.outputs["Output"] == True, name="passed"):  # noqa: E712
                version = register_model(
                    model=training.outputs["model"],
                    verdict=judged.outputs["verdict"],
                    report=judged.outputs["report"],
                    registered_model=registered_model,
                    alias=alias,
                    **tracking,
                )
                configure(version, "register_model", options, cpu="1", memory="2Gi")

    return gate


gate = make_gate()
