"""Generated from the components; renew it with `KFP_GATE_RENEW=1 pytest tests/components`"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from kfp.dsl import PipelineTask
from kfp.dsl.structures import ComponentSpec

class _Channel(Protocol):
    """An output of a task, or a parameter of the pipeline. kfp ships no types, so it is told by its shape."""

    name: str
    channel_type: Any
    task_name: Any

_Text: TypeAlias = str | _Channel
_Whole: TypeAlias = int | _Channel
_Number: TypeAlias = float | _Channel
_Truth: TypeAlias = bool | _Channel
_Listed: TypeAlias = Sequence[Any] | _Channel
_Mapped: TypeAlias = Mapping[str, Any] | _Channel

class _Component:
    name: str
    component_spec: ComponentSpec
    python_func: Callable[..., Any]

class _DiagnoseTraining(_Component):
    """Say in one sentence what a training waits for, with evidence, and what a change would bring."""

    def __call__(
        self,
        *,
        record: _Channel = ...,
        run_uri: _Text = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

class _JudgeEvaluation(_Component):
    """Take the records that a gate kept and judge them again, in seconds and on a CPU."""

    def __call__(
        self,
        *,
        evaluation_uri: _Text,
        min_map50: _Number = ...,
        min_map50_95: _Number = ...,
        min_precision: _Number = ...,
        min_recall: _Number = ...,
        min_mean_confidence: _Number = ...,
        max_abnormal_box_rate: _Number = ...,
        max_undetected_image_rate: _Number = ...,
        class_thresholds: _Mapped = ...,
        min_instances: _Whole = ...,
        decide: _Text = ...,
        on_insufficient: _Text = ...,
        waivers: _Listed = ...,
        allow_unproven_separation: _Truth = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

class _LaunchTraining(_Component):
    """Train a detector on one or many ranks, each with a filesystem of its own."""

    def __call__(
        self,
        *,
        train: _Channel,
        val: _Channel,
        base_model: _Text = ...,
        epochs: _Whole = ...,
        image_size: _Whole = ...,
        batch: _Whole = ...,
        seed: _Whole = ...,
        monitors: _Listed = ...,
        patience: _Whole = ...,
        stop_on: _Text = ...,
        min_delta: _Number = ...,
        min_epochs: _Whole = ...,
        training_options: _Mapped = ...,
        workers: _Whole = ...,
        probe_steps: _Whole = ...,
        profile_steps: _Whole = ...,
        resume_from: _Text = ...,
        backend: _Text = ...,
        nodes: _Whole = ...,
        processes_per_node: _Whole = ...,
        gpus_per_node: _Whole = ...,
        memory_per_node: _Text = ...,
        worker_image: _Text = ...,
        namespace: _Text = ...,
        runtime: _Text = ...,
        queue: _Text = ...,
        command: _Listed = ...,
        checkpoint_uri: _Text = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

class _Preflight(_Component):
    """Try thresholds, names, data, storage, tracking and the whole gate path before training."""

    def __call__(
        self,
        *,
        train: _Channel,
        val: _Channel,
        test: _Channel,
        base_model: _Text = ...,
        model_uri: _Text = ...,
        image_size: _Whole = ...,
        batch: _Whole = ...,
        monitors: _Listed = ...,
        backend: _Text = ...,
        nodes: _Whole = ...,
        processes_per_node: _Whole = ...,
        gpus_per_node: _Whole = ...,
        memory_per_node: _Text = ...,
        namespace: _Text = ...,
        runtime: _Text = ...,
        worker_image: _Text = ...,
        queue: _Text = ...,
        checkpoint_uri: _Text = ...,
        min_map50: _Number = ...,
        min_map50_95: _Number = ...,
        min_precision: _Number = ...,
        min_recall: _Number = ...,
        min_mean_confidence: _Number = ...,
        max_abnormal_box_rate: _Number = ...,
        max_undetected_image_rate: _Number = ...,
        class_thresholds: _Mapped = ...,
        min_instances: _Whole = ...,
        decide: _Text = ...,
        on_insufficient: _Text = ...,
        waivers: _Listed = ...,
        champion: _Text = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
        registered_model: _Text = ...,
        alias: _Text = ...,
    ) -> PipelineTask: ...

class _RecordOutcome(_Component):
    """Exit handler: finds the MLflow run by the pipeline run's id and the ending by the tags of the steps."""

    def __call__(
        self,
        *,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
        registered_model: _Text = ...,
    ) -> PipelineTask: ...

class _RegisterModel(_Component):
    """Register the judged model and read it back."""

    def __call__(
        self,
        *,
        verdict: _Channel,
        report: _Channel,
        registered_model: _Text,
        model: _Channel = ...,
        model_uri: _Text = ...,
        alias: _Text = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

class _SplitDataset(_Component):
    """Read annotations, group what belongs together, and assign every group to one split by its hash."""

    def __call__(
        self,
        *,
        dataset: _Text,
        dataset_format: _Text = ...,
        dataset_revision: _Text = ...,
        group_rule: _Text = ...,
        train_share: _Number = ...,
        val_share: _Number = ...,
        test_share: _Number = ...,
        seed: _Whole = ...,
        split_strategy: _Text = ...,
        previous_split: _Text = ...,
        min_test_instances: _Whole = ...,
        on_shortfall: _Text = ...,
        reject_policy: _Text = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

class _ValidationGate(_Component):
    """Predict on the test set, compute the metrics, and say whether the model goes on."""

    def __call__(
        self,
        *,
        test: _Channel,
        model: _Channel = ...,
        model_uri: _Text = ...,
        min_map50: _Number = ...,
        min_map50_95: _Number = ...,
        min_precision: _Number = ...,
        min_recall: _Number = ...,
        min_mean_confidence: _Number = ...,
        max_abnormal_box_rate: _Number = ...,
        max_undetected_image_rate: _Number = ...,
        class_thresholds: _Mapped = ...,
        min_instances: _Whole = ...,
        decide: _Text = ...,
        on_insufficient: _Text = ...,
        waivers: _Listed = ...,
        champion: _Text = ...,
        registered_model: _Text = ...,
        alias: _Text = ...,
        allow_unproven_separation: _Truth = ...,
        batch: _Whole = ...,
        tracking_uri: _Text = ...,
        experiment: _Text = ...,
    ) -> PipelineTask: ...

diagnose_training: _DiagnoseTraining
judge_evaluation: _JudgeEvaluation
launch_training: _LaunchTraining
preflight: _Preflight
record_outcome: _RecordOutcome
register_model: _RegisterModel
split_dataset: _SplitDataset
validation_gate: _ValidationGate

__all__ = ["diagnose_training", "judge_evaluation", "launch_training", "preflight", "record_outcome", "register_model", "split_dataset", "validation_gate"]
