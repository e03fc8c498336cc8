"""Generated from the components; renew it with `KFP_GATE_RENEW=1 pytest tests/components`"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from kfp.dsl import PipelineTask
from kfp.dsl.structures import ComponentSpec

class Channel(Protocol):
    """An output of a task, or a parameter of the pipeline. kfp ships no types, so it is told by its shape."""

    name: str
    channel_type: Any
    task_name: Any

Text: TypeAlias = str | Channel
Whole: TypeAlias = int | Channel
Number: TypeAlias = float | Channel
Truth: TypeAlias = bool | Channel
Listed: TypeAlias = Sequence[Any] | Channel
Mapped: TypeAlias = Mapping[str, Any] | Channel

class _Component:
    name: str
    component_spec: ComponentSpec
    python_func: Callable[..., Any]

class _JudgeEvaluation(_Component):
    """Take the records that a gate kept and judge them again, in seconds and on a CPU."""

    def __call__(
        self,
        *,
        evaluation_uri: Text,
        min_map50: Number = ...,
        min_map50_95: Number = ...,
        min_precision: Number = ...,
        min_recall: Number = ...,
        min_mean_confidence: Number = ...,
        max_abnormal_box_rate: Number = ...,
        max_undetected_image_rate: Number = ...,
        class_thresholds: Mapped = ...,
        min_instances: Whole = ...,
        decide: Text = ...,
        on_insufficient: Text = ...,
        waivers: Listed = ...,
        allow_unproven_separation: Truth = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
    ) -> PipelineTask: ...

class _LaunchTraining(_Component):
    """Train a detector on one or many ranks, each with a filesystem of its own."""

    def __call__(
        self,
        *,
        train: Channel,
        val: Channel,
        base_model: Text = ...,
        epochs: Whole = ...,
        image_size: Whole = ...,
        batch: Whole = ...,
        seed: Whole = ...,
        monitors: Listed = ...,
        patience: Whole = ...,
        stop_on: Text = ...,
        min_delta: Number = ...,
        min_epochs: Whole = ...,
        training_options: Mapped = ...,
        resume_from: Text = ...,
        backend: Text = ...,
        nodes: Whole = ...,
        processes_per_node: Whole = ...,
        gpus_per_node: Whole = ...,
        memory_per_node: Text = ...,
        worker_image: Text = ...,
        namespace: Text = ...,
        runtime: Text = ...,
        queue: Text = ...,
        command: Listed = ...,
        checkpoint_uri: Text = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
    ) -> PipelineTask: ...

class _Preflight(_Component):
    """Try thresholds, names, data, storage, tracking and the whole gate path before training."""

    def __call__(
        self,
        *,
        train: Channel,
        val: Channel,
        test: Channel,
        base_model: Text = ...,
        model_uri: Text = ...,
        image_size: Whole = ...,
        batch: Whole = ...,
        monitors: Listed = ...,
        backend: Text = ...,
        nodes: Whole = ...,
        processes_per_node: Whole = ...,
        gpus_per_node: Whole = ...,
        memory_per_node: Text = ...,
        namespace: Text = ...,
        runtime: Text = ...,
        worker_image: Text = ...,
        queue: Text = ...,
        checkpoint_uri: Text = ...,
        min_map50: Number = ...,
        min_map50_95: Number = ...,
        min_precision: Number = ...,
        min_recall: Number = ...,
        min_mean_confidence: Number = ...,
        max_abnormal_box_rate: Number = ...,
        max_undetected_image_rate: Number = ...,
        class_thresholds: Mapped = ...,
        min_instances: Whole = ...,
        decide: Text = ...,
        on_insufficient: Text = ...,
        waivers: Listed = ...,
        champion: Text = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
        registered_model: Text = ...,
        alias: Text = ...,
    ) -> PipelineTask: ...

class _RecordOutcome(_Component):
    """Exit handler: finds the MLflow run by the pipeline run's id and the ending by the tags of the steps."""

    def __call__(
        self,
        *,
        tracking_uri: Text = ...,
        experiment: Text = ...,
        registered_model: Text = ...,
    ) -> PipelineTask: ...

class _RegisterModel(_Component):
    """Register the judged model and read it back."""

    def __call__(
        self,
        *,
        verdict: Channel,
        report: Channel,
        registered_model: Text,
        model: Channel = ...,
        model_uri: Text = ...,
        alias: Text = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
    ) -> PipelineTask: ...

class _SplitDataset(_Component):
    """Read annotations, group what belongs together, and assign every group to one split by its hash."""

    def __call__(
        self,
        *,
        dataset: Text,
        dataset_format: Text = ...,
        dataset_revision: Text = ...,
        group_rule: Text = ...,
        train_share: Number = ...,
        val_share: Number = ...,
        test_share: Number = ...,
        seed: Whole = ...,
        split_strategy: Text = ...,
        previous_split: Text = ...,
        min_test_instances: Whole = ...,
        on_shortfall: Text = ...,
        reject_policy: Text = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
    ) -> PipelineTask: ...

class _ValidationGate(_Component):
    """Predict on the test set, compute the metrics, and say whether the model goes on."""

    def __call__(
        self,
        *,
        test: Channel,
        model: Channel = ...,
        model_uri: Text = ...,
        min_map50: Number = ...,
        min_map50_95: Number = ...,
        min_precision: Number = ...,
        min_recall: Number = ...,
        min_mean_confidence: Number = ...,
        max_abnormal_box_rate: Number = ...,
        max_undetected_image_rate: Number = ...,
        class_thresholds: Mapped = ...,
        min_instances: Whole = ...,
        decide: Text = ...,
        on_insufficient: Text = ...,
        waivers: Listed = ...,
        champion: Text = ...,
        registered_model: Text = ...,
        alias: Text = ...,
        allow_unproven_separation: Truth = ...,
        batch: Whole = ...,
        tracking_uri: Text = ...,
        experiment: Text = ...,
    ) -> PipelineTask: ...

judge_evaluation: _JudgeEvaluation
launch_training: _LaunchTraining
preflight: _Preflight
record_outcome: _RecordOutcome
register_model: _RegisterModel
split_dataset: _SplitDataset
validation_gate: _ValidationGate

__all__ = ["judge_evaluation", "launch_training", "preflight", "record_outcome", "register_model", "split_dataset", "validation_gate"]
