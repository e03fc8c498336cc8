"""Judge a model on the test set against per-class thresholds."""

from kfp import dsl
from kfp.dsl import HTML, Artifact, ClassificationMetrics, Dataset, Input, Metrics, Model, Output

from kfp_gate.images.names import reference


@dsl.component(base_image=reference("validation_gate"), install_kfp_package=False)
def validation_gate(
    test: Input[Dataset],
    evaluation: Output[Artifact],
    verdict: Output[Artifact],
    metrics: Output[Metrics],
    confusion: Output[ClassificationMetrics],
    report: Output[HTML],
    model: Input[Model] = None,
    model_uri: str = "",
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
    registered_model: str = "",
    alias: str = "champion",
    allow_unproven_separation: bool = False,
    batch: int = 16,
    tracking_uri: str = "",
    experiment: str = "kfp-gate",
) -> bool:
    """Predict on the test set, compute the metrics, and say whether the model goes on.

    True: passed. False: refused; the step succeeds and all artifacts are kept. A failing step means that
    the judging itself broke, never that the model is weak.

    Args:
        test: Manifest of the test images.
        model: Model folder of a training step.
        model_uri: Model to judge when no training step made one: a path, s3:// or models:/ location.
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
        champion: Model to compare with; empty: the version at `alias` of `registered_model`, if there is one; none:
            nothing.
        registered_model: Name in the model registry that the champion is looked up in.
        alias: Alias that the champion is looked up by.
        allow_unproven_separation: Judge a model that does not say which images it was trained on; the verdict
            then says "not proven".
        batch: Images per prediction step.
        tracking_uri: MLflow server; empty: the environment's, if any.
        experiment: MLflow experiment.

    Returns:
        evaluation: Compact records of every detection, from which it can be judged again.
        verdict: The verdict, criterion by criterion (JSON).
        metrics: Overall metrics and the verdict's counts.
        confusion: Confusion matrix over classes.
        report: The verdict as a page.
        Output: True if the model passed; the only output that a condition may read.
    """
    from kfp_gate.steps import run_id, step

    with step("validation_gate", tracking_uri=tracking_uri, experiment=experiment) as told:
        from functools import partial
        from pathlib import Path
        from tempfile import mkdtemp

        from kfp_gate.gate import summary
        from kfp_gate.gate.run import GateOutputs, validate
        from kfp_gate.gate.settings import gate_settings
        from kfp_gate.registry.fetch import champion_uri, fetch_model, fetch_rival
        from kfp_gate.registry.gate_run import keep_gate

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
            champion=champion_uri(champion, registered_model, alias),
            allow_unproven_separation=allow_unproven_separation,
        )
        folder = Path(model.path) if model else fetch_model(model_uri, Path(mkdtemp()), tracking_uri=tracking_uri)
        fetch = partial(fetch_rival, tracking_uri=tracking_uri)
        outputs = GateOutputs(Path(evaluation.path), Path(verdict.path), Path(report.path))
        judged = validate(folder, Path(test.path), settings, outputs, fetch=fetch, batch=batch)
        passed = judged.verdict.passed
        for name, value in summary.table_metrics(judged).items():
            metrics.log_metric(name, value)
        if table := summary.confusion(judged):
            confusion.log_confusion_matrix(*table)
        keep_gate(
            outputs.verdict,
            summary.all_values(judged),
            report=outputs.report,
            run_id=run_id(),
            tracking_uri=tracking_uri,
            experiment=experiment,
        )
        told.update(passed=passed, summary=judged.verdict.headline, verdict=verdict.path, report=report.path)
    return passed
