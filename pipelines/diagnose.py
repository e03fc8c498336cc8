"""Why is it slow? A bounded probe of a training's speed, and what it says."""

from kfp import dsl

from kfp_gate.components import diagnose_training, launch_training, split_dataset
from kfp_gate.pipelines.settings import CompileOptions, configure, described, launches, refuse_bad_mounts


def make_diagnose(options: CompileOptions = CompileOptions()):
    """The pipeline `diagnose` for the given compile options."""
    refuse_bad_mounts(options)

    @dsl.pipeline(name="diagnose")
    @described(
        "Train a few steps as they would run and on images held in memory, and say what the training waits for.",
        split_dataset,
        launch_training,
        diagnose_training,
    )
    def diagnose(
        dataset: str,
        dataset_format: str = "auto",
        dataset_revision: str = "",
        group_rule: str = "auto",
        train_share: float = 0.7,
        val_share: float = 0.15,
        test_share: float = 0.15,
        seed: int = 0,
        base_model: str = "yolo11n.yaml",
        image_size: int = 640,
        batch: int = 16,
        training_options: dict = {},
        workers: int = -1,
        probe_steps: int = 60,
        profile_steps: int = 5,
        backend: str = "trainjob",
        nodes: int = 1,
        processes_per_node: int = 1,
        gpus_per_node: int = 1,
        memory_per_node: str = "16Gi",
        worker_image: str = "",
        namespace: str = "",
        runtime: str = "kfp-gate-training",
        queue: str = "",
        checkpoint_uri: str = "",
        tracking_uri: str = "",
        experiment: str = "kfp-gate",
    ):
        tracking = {"tracking_uri": tracking_uri, "experiment": experiment}
        split = split_dataset(
            dataset=dataset,
            dataset_format=dataset_format,
            dataset_revision=dataset_revision,
            group_rule=group_rule,
            train_share=train_share,
            val_share=val_share,
            test_share=test_share,
            seed=seed,
            **tracking,
        )
        configure(split, "split_dataset", options, cpu="2", memory="8Gi", cached=True)
        probe = launch_training(
            train=split.outputs["train"],
            val=split.outputs["val"],
            base_model=base_model,
            image_size=image_size,
            batch=batch,
            seed=seed,
            training_options=training_options,
            workers=workers,
            probe_steps=probe_steps,
            profile_steps=profile_steps,
            backend=backend,
            nodes=nodes,
            processes_per_node=processes_per_node,
            gpus_per_node=gpus_per_node,
            memory_per_node=memory_per_node,
            worker_image=worker_image,
            namespace=namespace,
            runtime=runtime,
            queue=queue,
            checkpoint_uri=checkpoint_uri,
            **tracking,
        )
        # Never from the cache: the answer is about the machines as they are now.
        configure(probe, "launch_training", options, cpu="1", memory="4Gi")
        launches(probe, options)
        found = diagnose_training(record=probe.outputs["record"], **tracking)
        configure(found, "diagnose_training", options, cpu="1", memory="8Gi")

    return diagnose


diagnose = make_diagnose()
