"""Other thresholds on an evaluation that a gate kept: seconds, no GPU."""

from kfp import dsl

from kfp_gate.components import judge_evaluation
from kfp_gate.pipelines.settings import CompileOptions, configure, described, refuse_bad_mounts


def make_rejudge(options: CompileOptions = CompileOptions()):
    """The pipeline `rejudge` for the given compile options."""
    refuse_bad_mounts(options)

    @dsl.pipeline(name="rejudge")
    @described("Judge a stored evaluation again, under other thresholds.", judge_evaluation)
    def rejudge(
        evaluation_uri: str,
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
    ):
        judged = judge_evaluation(
            evaluation_uri=evaluation_uri,
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
            tracking_uri=tracking_uri,
            experiment=experiment,
        )
        configure(judged, "judge_evaluation", options, cpu="2", memory="4Gi")

    return rejudge


rejudge = make_rejudge()
