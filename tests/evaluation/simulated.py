"""A detector whose true quality is known: its value on a very large set."""

import numpy as np

from kfp_gate.evaluation.columns import Records


def simulate(
    rng: np.random.Generator, images: int, *, recall: float = 0.8, objects: float = 4.0, image_spread: float = 0.5
) -> Records:
    """Records of one class. Objects per image vary; an image has its own difficulty, so objects are not independent.

    A found object has a true-positive run up to a random threshold; false positives have lower scores.
    """
    per_image = rng.poisson(objects, images)
    ease = rng.normal(0, image_spread, images)
    image = np.repeat(np.arange(images), per_image)
    logit = np.log(recall / (1 - recall)) + ease[image]
    found = rng.random(len(image)) < 1 / (1 + np.exp(-logit))
    good = np.clip(rng.normal(6 + ease[image], 2.5, len(image)).astype(int), 1, 10)[found]
    true_bits = ((1 << good) - 1).astype(np.uint16)
    true_scores = rng.beta(5, 2, found.sum())
    wrong = rng.poisson(1.5, images)
    wrong_image = np.repeat(np.arange(images), wrong)
    wrong_scores = rng.beta(2, 4, len(wrong_image))
    images_of = np.r_[image[found], wrong_image]
    scores = np.r_[true_scores, wrong_scores].astype(np.float32)
    bits = np.r_[true_bits, np.zeros(len(wrong_image), np.uint16)]
    order = np.lexsort((-scores, images_of))
    return Records(
        images=np.arange(images, dtype=np.int32),
        detection_counts=np.bincount(images_of, minlength=images).astype(np.int32),
        truth_counts=per_image.astype(np.int32),
        scores=scores[order],
        classes=np.zeros(len(scores), np.int16),
        bits=bits[order].astype(np.uint16),
        truth_classes=np.zeros(len(image), np.int16),
        truth_flags=np.zeros(len(image), np.uint8),
    )
