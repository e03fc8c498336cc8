"""Check everything that can be known to fail later, before anything expensive starts."""

from kfp import dsl
from kfp.dsl import Dataset, Input, Markdown, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("validation_gate"), install_kfp_package=False)
def preflight(
    train: Input[Dataset],
    val: Input[Dataset],
    test: Input[Dataset],
    checks: Output[Markdown],
    base_model: str = "yolo11n.yaml",
    model_uri: str = "",
    image_size: int = 640,
    batch: int = 16,
    monitors: list = ["map50_95"],
    backend: str = "processes",
    nodes: int = 1,
    processes_per_node: int = 1,
    gpus_per_node: int = 0,
    memory_per_node: str = "16Gi",
    namespace: str = "",
    runtime: str = "kfp-gate-training",
    worker_image: str = "",
    queue: str = "",
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
    """Try thresholds, names, data, storage, tracking and the whole gate path before training.

    Runs in the gate's image and on the gate's GPU, so that both are tried now and not after the training.
    All findings come in one table; one error stops the pipeline with exit code 2.

    Args:
        train: Manifest of the training images.
        val: Manifest of the validation images.
        test: Manifest of the test images.
        base_model: Model to train: a YAML name or a weights location.
        model_uri: Model to judge instead of one that is trained; empty: one is trained.
        image_size: Side of the square that images are fitted to, in pixels.
        batch: Images per step over all ranks.
        monitors: Canonical metric names that are watched; the first is the primary.
        backend: processes, trainjob or pytorchjob.
        nodes: Nodes of the training.
        processes_per_node: Ranks on each node.
        gpus_per_node: GPUs of each training node; 0 trains on the CPU.
        memory_per_node: Memory of each node.
        namespace: Namespace of the training job.
        runtime: TrainingRuntime of the training job.
        worker_image: Image of the ranks; empty: the one of this release.
        queue: Kueue queue; empty: none.
        checkpoint_uri: Where checkpoints go; empty: no storage.
        min_map50: Lowest mAP at IoU 0.50; 0 is off.
        min_map50_95: Lowest mAP over IoU 0.50 to 0.95; 0 is off.
        min_precision: Lowest precision; 0 is off.
        min_recall: Lowest recall; 0 is off.
        min_mean_confidence: Lowest mean confidence; 0 is off.
        max_abnormal_box_rate: Highest share of abnormal boxes; 1 is off.
        max_undetected_image_rate: Highest share of images with objects where nothing was found; 1 is off.
        class_thresholds: Bounds per class, for instance {"cone": {"map50": {"min": 0.8}}}; "*" for each class.
        min_instances: Objects that a class needs in the test set before it is judged.
        decide: point or confident.
        on_insufficient: block or allow.
        waivers: Waived criteria, each with model digest, who, why and expiry.
        champion: Model to compare with; empty: the version at `alias` of `registered_model`, if there is one; none:
            nothing.
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.
        registered_model: Name in the model registry; empty: nothing is registered.
        alias: Alias that the new version gets; empty: none.

    Returns:
        checks: The table of all findings.
    """
    from kfp_gate.steps import run_id, step

    with step("preflight", tracking_uri=tracking_uri, experiment=experiment):
        import os
        from functools import partial
        from pathlib import Path

        from kfp_gate.gate.settings import gate_settings
        from kfp_gate.launching.step import step_options
        from kfp_gate.preflight.cluster_checks import cluster_checks
        from kfp_gate.preflight.request import PreflightRequest
        from kfp_gate.preflight.run import preflight as check
        from kfp_gate.registry.fetch import champion_uri

        gate = gate_settings(
            min_map50=min_map50,
            min_map50_95=min_map50_95,
            min_precision=min_precision,
            min_recall=min_recall,
            min_mean_confidence=min_mean_confidence,
            max_abnormal_box_rate=max_abnormal_box_rate,
            max_undetected_image_rate=max_undetected_image_rate,
            class_thresholds=class_thresholds,
            min_instances=min_instances,
            decide=decide,
            on_insufficient=on_insufficient,
            waivers=waivers,
            champion=champion_uri(champion, registered_model, alias),
        )
        options = step_options(
            backend=backend,
            nodes=nodes,
            processes_per_node=processes_per_node,
            gpus_per_node=gpus_per_node,
            memory=memory_per_node,
            worker_image=worker_image,
            namespace=namespace,
            runtime=runtime,
            queue=queue,
            checkpoint_uri=checkpoint_uri,
            run_id=run_id(),
        )
        request = PreflightRequest(
            train=Path(train.path),
            val=Path(val.path),
            test=Path(test.path),
            gate=gate,
            model_uri=model_uri,
            base_model=base_model,
            image_size=image_size,
            batch=batch,
            monitors=monitors,
            backend=backend,
            worker_image=options.worker_image,
            gpus=gpus_per_node,
            gate_gpu=os.environ.get("NVIDIA_VISIBLE_DEVICES", "") not in ("", "none", "void"),
            checkpoint_uri=checkpoint_uri,
            tracking_uri=tracking_uri,
            experiment=experiment,
            registered_model=registered_model,
            alias=alias,
            run_id=run_id(),
        )
        check(request, extra=[partial(cluster_checks, options=options)], table=Path(checks.path))
