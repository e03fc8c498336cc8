"""Start the ranks of a training, follow them to their end, and explain a failure."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, Dataset, Input, Model, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("launch_training"), install_kfp_package=False)
def launch_training(
    train: Input[Dataset],
    val: Input[Dataset],
    model: Output[Model],
    training: Output[HTML],
    record: Output[Artifact],
    base_model: str = "yolo11n.yaml",
    epochs: int = 100,
    image_size: int = 640,
    batch: int = 16,
    seed: int = 0,
    monitors: list = ["map50_95"],
    patience: int = 50,
    stop_on: str = "",
    min_delta: float = 0.0,
    min_epochs: int = 0,
    training_options: dict = {},
    workers: int = -1,
    probe_steps: int = 0,
    profile_steps: int = 0,
    resume_from: str = "",
    backend: str = "processes",
    nodes: int = 1,
    processes_per_node: int = 1,
    gpus_per_node: int = 0,
    memory_per_node: str = "16Gi",
    worker_image: str = "",
    namespace: str = "",
    runtime: str = "kfp-gate-training",
    queue: str = "",
    command: list = [],
    checkpoint_uri: str = "",
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
):
    """Train a detector on one or many ranks, each with a filesystem of its own.

    Nothing that differs between two runs is a parameter, so that a training is found in the cache when only
    the gate has to run again.

    Args:
        train: Manifest of the training images.
        val: Manifest of the images that choose the best checkpoint.
        base_model: A YAML name (trained from scratch) or the location of weights.
        epochs: Passes over the training images.
        image_size: Side of the square that images are fitted to, in pixels.
        batch: Images per step over all ranks.
        seed: Seed of weights, order and augmentation.
        monitors: Canonical metric names, also per class (class/NAME/map50_95); the best epoch of the first
            one becomes the model.
        patience: Epochs without improvement before training stops; 0 is off.
        stop_on: The monitor that stops training early, all (when every one stopped improving) or off; empty: the
            first monitor.
        min_delta: What a value must gain to count as an improvement.
        min_epochs: Never stop earlier.
        training_options: Further training settings by their Ultralytics names, for instance {"lr0": 0.004}.
        workers: Loader processes of each rank; -1: four on a GPU, none on a CPU.
        probe_steps: Above 0: no training but a bounded probe of its speed, with so many steps on images as they come
            and as many on images held in memory. The model is of no use.
        profile_steps: Above 0: profile so many steps after the warm-up, once.
        resume_from: Checkpoint location of an earlier run to continue from.
        backend: processes (this step's own machine), trainjob or pytorchjob.
        nodes: Nodes, or groups of local processes.
        processes_per_node: Ranks on each node.
        gpus_per_node: GPUs of each node; 0 trains on the CPU.
        memory_per_node: Memory of each node.
        worker_image: Image of the ranks; empty: the one of this release.
        namespace: Namespace of the training job; empty: the step's own.
        runtime: TrainingRuntime of the training job.
        queue: Kueue queue; empty: none.
        command: A training command of your own in place of the built-in one.
        checkpoint_uri: Where checkpoints and evidence go while training runs; empty: nowhere.
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        model: Folder with the weights, their card and the fingerprints of the images they were chosen on.
        training: Curves, phases, memory and monitors, and what held the training back.
        record: The training record and the timeline of every rank, for `diagnose_training`.
    """
    from kfp_gate.steps import run_id, step

    with step("launch_training", tracking_uri=tracking_uri, experiment=experiment) as told:
        from pathlib import Path
        from shutil import copytree
        from tempfile import TemporaryDirectory

        from kfp_gate.diagnosis.pages.report import training_page
        from kfp_gate.launching.launch import launch
        from kfp_gate.launching.step import step_options
        from kfp_gate.training.spec import TrainingSpec

        spec = TrainingSpec(
            train_manifest=train.path,
            val_manifest=val.path,
            base_model=base_model,
            epochs=epochs,
            image_size=image_size,
            batch=batch,
            seed=seed,
            monitors=tuple(monitors),
            patience=patience,
            stop_on=stop_on,
            min_delta=min_delta,
            min_epochs=min_epochs,
            overrides=training_options,
            workers=workers,
            probe_steps=probe_steps,
            profile_steps=profile_steps,
            resume_from=resume_from,
            checkpoint_uri=checkpoint_uri,
            tracking_uri=tracking_uri,
            experiment=experiment,
            run_id=run_id(),
        )
        # Gigabytes of images and checkpoints beside the record: on a laptop they would stay.
        with TemporaryDirectory(ignore_cleanup_errors=True) as records:
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
                command=tuple(command),
                checkpoint_uri=checkpoint_uri,
                run_id=run_id(),
                records=Path(records),
            )
            outcome = launch(spec, options, Path(model.path))
            outcome.raise_if_failed()
            kept = Path(records) / "rank-0" / "training"
            Path(training.path).write_text(training_page(kept), encoding="utf-8")
            # A command of the user's own need not keep a record; the output exists all the same.
            kept.mkdir(parents=True, exist_ok=True)
            copytree(kept, record.path, dirs_exist_ok=True)
        told.update(training=training.path)
