"""How often a gate decides wrongly: the point gate, MLflow's thresholds, and the confident gate, on the same detectors.

Detectors of known recall are simulated on test sets of n objects, five to an image, alike within an image (intra-image
correlation 0.1). Asked is recall >= 0.80. Wrong is to pass a detector of 0.70, or to refuse one of 0.90 as missed. A
confident gate may also say that the evidence does not suffice; that blocks, and is counted apart.

    python benchmarks/decisions.py [--trials 400]
"""

import argparse
import json
import logging
from collections import Counter

import numpy as np

from kfp_gate.evaluation.bootstrap import difference, resample
from kfp_gate.evaluation.columns import Records
from kfp_gate.gate.criteria import Criterion
from kfp_gate.gate.deciding import Evidence, Rule, decide

BOUND, BAD, GOOD, CORRELATION, PER_IMAGE = 0.80, 0.70, 0.90, 0.1, 5
SIZES = (10, 20, 50, 100, 200, 500)
ASKED = Criterion("class/cone/recall", "min", BOUND)
DROP = Criterion("class/cone/recall", "max_drop", 0.05)
NAMES, CLASSES = ["class/cone/recall"], ("cone",)


def truth(rng, objects: int, recall: float) -> np.ndarray:
    """(objects,) which objects are found; objects of one image share their difficulty."""
    images = -(-objects // PER_IMAGE)
    strength = (1 - CORRELATION) / CORRELATION
    chance = rng.beta(recall * strength, (1 - recall) * strength, images)
    return rng.random(objects) < np.repeat(chance, PER_IMAGE)[:objects]


def records(found: np.ndarray) -> Records:
    """Records of a detector that reports just the found objects."""
    image = np.arange(len(found)) // PER_IMAGE
    images = int(image.max()) + 1
    hits = int(found.sum())
    return Records(
        images=np.arange(images, dtype=np.int32),
        detection_counts=np.bincount(image[found], minlength=images).astype(np.int32),
        truth_counts=np.bincount(image, minlength=images).astype(np.int32),
        scores=np.full(hits, 0.9, np.float32), classes=np.zeros(hits, np.int16), bits=np.full(hits, 1, np.uint16),
        truth_classes=np.zeros(len(found), np.int16), truth_flags=np.full(len(found), 4, np.uint8),
    )  # fmt: skip


def mlflow_passes(value: float) -> bool:
    from mlflow import validate_evaluation_results
    from mlflow.models import EvaluationResult, MetricThreshold
    from mlflow.models.evaluation.validation import ModelValidationFailedException

    try:
        validate_evaluation_results(
            validation_thresholds={"recall": MetricThreshold(threshold=BOUND, greater_is_better=True)},
            candidate_result=EvaluationResult(metrics={"recall": value}, artifacts={}),
        )  # fmt: skip
    except ModelValidationFailedException:
        return False
    return True


def outcomes(recall: float, objects: int, trials: int) -> dict[str, Counter]:
    rng = np.random.default_rng([objects, int(recall * 100)])
    found: dict[str, Counter] = {"point": Counter(), "mlflow": Counter(), "confident": Counter()}
    for trial in range(trials):
        drawn = resample(records(truth(rng, objects, recall)), CLASSES, NAMES, resamples=400, seed=trial)
        evidence = Evidence(float(drawn.point[0]), instances=objects, interval=drawn.interval(NAMES[0]))
        found["point"][decide(ASKED, evidence, Rule("point")).state] += 1
        found["mlflow"]["met" if mlflow_passes(evidence.value) else "missed"] += 1
        found["confident"][decide(ASKED, evidence, Rule("confident")).state] += 1
    return found


def drop_outcomes(drop: float, objects: int, trials: int) -> Counter:
    """A candidate that loses some of the objects its champion finds, on the same images."""
    rng = np.random.default_rng([objects, int(drop * 100)])
    found: Counter = Counter()
    for trial in range(trials):
        champion = truth(rng, objects, 0.85)
        lost = champion & (rng.random(objects) < drop / 0.85 + 0.02)
        won = ~champion & (rng.random(objects) < 0.02 * 0.85 / 0.15)  # changes both ways, the mean is the drop
        mine, theirs = (
            resample(records(f), CLASSES, NAMES, resamples=400, seed=trial) for f in (champion & ~lost | won, champion)
        )
        low, high = difference(mine, theirs).interval(NAMES[0])
        evidence = Evidence(
            float(mine.point[0]), instances=objects, champion=float(theirs.point[0]), drop_interval=(-high, -low)
        )
        found[decide(DROP, evidence, Rule("confident")).state, decide(DROP, evidence, Rule("point")).state] += 1
    return found


def main() -> None:
    logging.disable(logging.INFO)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=400)
    trials = parser.parse_args().trials
    print(f"recall >= {BOUND}; {trials} test sets a row; wrong decisions in per cent\n")
    print(f"{'':>8} | passes a detector of {BAD}   | misses one of {GOOD} | not enough evidence")
    print(f"{'objects':>8} | point  MLflow  confident | point  confident   | for {BAD}   for {GOOD}")
    worst = {"point": 0.0, "mlflow": 0.0, "confident": 0.0}
    misses = {"point": 0.0, "confident": 0.0}
    for objects in SIZES:
        bad, good = outcomes(BAD, objects, trials), outcomes(GOOD, objects, trials)
        passed = {k: c["met"] / trials for k, c in bad.items()}
        missed = {k: c["missed"] / trials for k, c in good.items()}
        worst = {k: max(v, passed[k]) for k, v in worst.items()}
        misses = {k: max(v, missed[k]) for k, v in misses.items()}
        unsure = [c["confident"]["insufficient"] / trials for c in (bad, good)]
        print(
            f"{objects:>8} | {passed['point']:>5.1%}  {passed['mlflow']:>6.1%}  {passed['confident']:>9.1%} |"
            f" {missed['point']:>5.1%}  {missed['confident']:>9.1%}   | {unsure[0]:>8.1%}   {unsure[1]:>8.1%}"
        )
    print(f"\nmax_drop {DROP.bound} against the champion, paired by image, champion of recall 0.85\n")
    print(f"{'objects':>8} | passes a true drop of 0.12 | misses a true drop of 0 | not enough evidence")
    print(f"{'':>8} | point           confident  | point        confident  | for 0.12   for 0")
    for objects in (50, 200, 1000):
        large, none = drop_outcomes(0.12, objects, trials // 2), drop_outcomes(0.0, objects, trials // 2)
        half = trials // 2
        share = [
            sum(n for (confident, point), n in c.items() if (point, confident)[which] == state) / half
            for c, state in ((large, "met"), (none, "missed"))
            for which in (0, 1)
        ]
        worst["confident"] = max(worst["confident"], share[1])
        misses["confident"] = max(misses["confident"], share[3])
        unsure = [
            sum(n for (confident, _), n in c.items() if confident == "insufficient") / half for c in (large, none)
        ]
        print(
            f"{objects:>8} | {share[0]:>5.1%}           {share[1]:>9.1%}  | {share[2]:>5.1%}        {share[3]:>9.1%}  |"
            f" {unsure[0]:>8.1%}   {unsure[1]:>5.1%}"
        )
    # Two-sided 95% intervals: 2.5% on the side that matters, and three standard errors of so many trials.
    bar = 0.025 + 3 * (0.025 * 0.975 / (trials // 2)) ** 0.5
    ours = {"wrong_pass": worst["confident"], "wrong_miss": misses["confident"]}
    peers = {
        "point": {"wrong_pass": worst["point"], "wrong_miss": misses["point"]},
        "mlflow": {"wrong_pass": worst["mlflow"]},
    }
    ratios = {"wrong_pass_against_mlflow": worst["mlflow"] / max(worst["confident"], 1 / trials)}
    print(
        json.dumps(
            {
                "name": "decisions",
                "ours": ours,
                "peers": peers,
                "ratios": ratios,
                "bars": {"wrong_pass": bar, "wrong_miss": bar},
                "met": max(ours.values()) <= bar,
            }
        )
    )


if __name__ == "__main__":
    main()
