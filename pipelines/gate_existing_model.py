"""Judge a model that exists and, if it passed, register it."""

from kfp import dsl

from kfp_gate.components import preflight, record_outcome, register_model, split_dataset, validation_gate
from kfp_gate.pipelines.settings import CompileOptions, configure, described, on_gpu, refuse_bad_mounts


def make_gate_existing_model(options: CompileOptions = CompileOptions()):
    """The pipeline `gate_existing_model` for the given compile options."""
    refuse_bad_mounts(options)

    @dsl.pipeline(name="gate-existing-model")
    @described(
        "Judge a model that exists on the test split of a dataset, register it only if it passed.",
        split_dataset,
        preflight,
        validation_gate,
        register_model,
    )
    def gate_existing_model(
        model_uri: str,
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
        batch: int = 16,
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
        allow_unproven_separation: bool = False,
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
                model_uri=model_uri,
                batch=batch,
                champion=champion,
                registered_model=registered_model,
                alias=alias,
                **thresholds,
                **tracking,
            )
            on_gpu(configure(checks, "validation_gate", options, cpu="2", memory="8Gi"), options)
            judged = validation_gate(
                model_uri=model_uri,
                test=split.outputs["test"],
                champion=champion,
                registered_model=registered_model,
                alias=alias,
                batch=batch,
                allow_unproven_separation=allow_unproven_separation,
                **thresholds,
                **tracking,
            )
            on_gpu(configure(judged, "validation_gate", options, cpu="4", memory="16Gi"), options)
            judged.after(checks)
            with dsl.If(judged.outputs["Output"] == True, name="passed"):  # noqa: E712
                version = register_model(
                    model_uri=model_uri,
                    verdict=judged.outputs["verdict"],
                    report=judged.outputs["report"],
                    registered_model=registered_model,
                    alias=alias,
                    **tracking,
                )
                configure(version, "register_model", options, cpu="1", memory="2Gi")

    return gate_existing_model


gate_existing_model = make_gate_existing_model()
