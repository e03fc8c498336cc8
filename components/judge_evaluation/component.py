"""Judge a stored evaluation under other thresholds, without a GPU."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, ClassificationMetrics, Metrics, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("judge_evaluation"), install_kfp_package=False)
def judge_evaluation(
    evaluation_uri: str,
    verdict: Output[Artifact],
    metrics: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    report: Output[HTML],
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
    allow_unproven_separation: bool = False,
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
) -> bool:
    """Take the records that a gate kept and judge them again, in seconds and on a CPU.

    Under the settings that the gate had, the verdict is the gate's. The champion is the one that the gate
    evaluated. The report has no images.

    Args:
        evaluation_uri: Where a gate's `evaluation` lies: a path or s3:// prefix.
        min_map50: Lowest mAP at IoU 0.50; 0 is off.
        min_map50_95: Lowest mAP over IoU 0.50 to 0.95; 0 is off.
        min_precision: Lowest precision; 0 is off.
        min_recall: Lowest recall; 0 is off.
        min_mean_confidence: Lowest mean confidence; 0 is off.
        max_abnormal_box_rate: Highest share of abnormal boxes; 1 is off.
        max_undetected_image_rate: Highest share of images with objects where nothing was found; 1 is off.
        class_thresholds: Bounds per class, for instance {"cone": {"map50": {"min": 0.8}}}; "*" for each class.
        min_instances: Objects that a class needs in the test set before it is judged.
        decide: point (the value is compared) or confident (its interval must clear the bound).
        on_insufficient: block or allow a class with too few objects.
        waivers: Waived criteria, each with model digest, who, why and expiry.
        allow_unproven_separation: Judge a model that does not say which images it was trained on; the verdict
            then says "not proven".
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        verdict: The verdict, criterion by criterion (JSON).
        metrics: Overall metrics and the verdict's counts.
        confusion: Confusion matrix over classes.
        report: The verdict as a page.
        Output: True if the model passed; the only output that a condition may read.
    """
    from kfp_gate.steps import run_id, step

    with step("judge_evaluation", tracking_uri=tracking_uri, experiment=experiment) as told:
        from pathlib import Path
        from tempfile import mkdtemp

        from kfp_gate.gate import summary
        from kfp_gate.gate.run import judge
        from kfp_gate.gate.settings import gate_settings
        from kfp_gate.registry.gate_run import keep_gate
        from kfp_gate.storage import local_folder

        settings = gate_settings(
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
            allow_unproven_separation=allow_unproven_separation,
        )
        stored = local_folder(evaluation_uri, Path(mkdtemp()))
        judged = judge(stored, settings, verdict=Path(verdict.path), report_file=Path(report.path))
        passed = judged.verdict.passed
        for name, value in summary.table_metrics(judged).items():
            metrics.log_metric(name, value)
        if table := summary.confusion(judged):
            confusion.log_confusion_matrix(*table)
        keep_gate(
            Path(verdict.path),
            summary.all_values(judged),
            report=Path(report.path),
            run_id=run_id(),
            tracking_uri=tracking_uri,
            experiment=experiment,
        )
        told.update(passed=passed, summary=judged.verdict.headline, verdict=verdict.path, report=report.path)
    return passed
