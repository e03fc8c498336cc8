"""Manifests: readable, of one data set, disjoint, and their images still where they say."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from kfp_gate.data.freshness import listing_drift
from kfp_gate.data.manifest import Manifest, box_columns, read_manifest
from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.gate.separation import compare_splits
from kfp_gate.preflight.checks import Check, error, from_error, ok, warning
from kfp_gate.storage import LocalStore, Store, open_store

SPLITS = ("train", "val", "test")
LISTED = 10


def read_all(paths: Mapping[str, Path]) -> tuple[dict[str, Manifest], list[Check]]:
    """The manifests that can be read, and a finding for each that cannot."""
    found: dict[str, Manifest] = {}
    checks: list[Check] = []
    for split, path in paths.items():
        try:
            found[split] = read_manifest(path)
        except KfpGateError as problem:
            checks += from_error(problem, why=f"the {split} images cannot be found without it")
    return found, checks


def check_manifests(manifests: Mapping[str, Manifest]) -> list[Check]:
    """Whether the splits belong together, hold images with objects, and lie where they say."""
    checks = [_described(split, manifest) for split, manifest in manifests.items()]
    classes = {manifest.classes for manifest in manifests.values()}
    if len(classes) > 1:
        told = "; ".join(f"{split}: {', '.join(m.classes)}" for split, m in manifests.items())
        checks.append(
            error(
                f"the manifests disagree on the classes ({told})",
                why="a class index would mean one thing in training and another in the gate",
                cure="take the train, val and test outputs of one and the same split_dataset",
            )
        )
    for split, manifest in manifests.items():
        checks += _reachable(split, manifest)
    return checks


def instances(manifest: Manifest) -> dict[str, int]:
    """Labelled objects per class, crowd regions left out."""
    _, boxes, crowd = box_columns(manifest.table)
    counts = np.bincount(boxes[~crowd, 0].astype(np.int64), minlength=len(manifest.classes))
    return dict(zip(manifest.classes, counts.tolist(), strict=True))


def _described(split: str, manifest: Manifest) -> Check:
    counts = instances(manifest)
    total = sum(counts.values())
    if not len(manifest) or not total:
        return error(
            f"the {split} split has {len(manifest)} images and {total} objects",
            why=f"{'training' if split == 'train' else 'no metric of this split'} "
            f"{'has nothing to learn from' if split == 'train' else 'can be computed'}",
            cure="choose other shares, or check that the labels were found",
        )
    missing = [name for name, count in counts.items() if not count]
    what = f"{split}: {len(manifest)} images, {total} objects, digest {manifest.digest[:16]}"
    if missing:
        return warning(
            f"{what}; without any object of {_listed(missing)}",
            why="their metrics are not computed in this split" + " and cannot be gated" * (split == "test"),
            cure="add images of these classes, or other groups, so that each split gets some",
        )
    return ok(what)


def check_separation(manifests: Mapping[str, Manifest], near: int) -> list[Check]:
    """Whether the gate will find the test images new to whatever is trained and chosen on the other two splits.

    Args:
        near: bits in which the hashes of two images may differ to count as one look, as the gate counts.
    """
    if len(manifests) < len(SPLITS):
        return []
    train, val, test = (manifests[split].table for split in SPLITS)
    found = compare_splits(test, [train, val], near=near)
    checks = []
    if found.state == "overlap":
        checks.append(
            error(
                f"the test split shares {found.same_image} images, {found.near_duplicate} near-duplicates and "
                f"{found.same_group} images of a group with train and val ({'; '.join(found.examples[:3])})",
                why="the gate does not judge a model on images that it was trained or chosen on: it would break",
                cure="split again with a group rule that keeps such images together",
            )
        )
    chosen = compare_splits(val, [train], near=near)
    if chosen.same_image or chosen.same_group:
        checks.append(
            warning(
                f"the val split shares {chosen.same_image} images and {chosen.same_group} images of a group with train",
                why="the best epoch is chosen on images that were learned by heart, and training stops too late",
                cure="split again with a group rule that keeps such images together",
            )
        )
    return checks or [ok(f"the test images are new to train and val ({found.compared_with} images compared)")]


def check_listing(manifests: Mapping[str, Manifest]) -> list[Check]:
    """Whether the source still lists what was split: the split may come from a cache that knows its location only."""
    drift = listing_drift(manifests)
    if not drift:
        return [ok("the dataset's listing is what the manifests say")]
    return [
        warning(
            f"the dataset changed since it was split: {drift}",
            why="a cached split is found by its parameters, so that new and changed files take no part",
            cure="set dataset_revision to another text; images that were assigned before stay where they are",
        )
    ]


def _reachable(split: str, manifest: Manifest) -> list[Check]:
    """Three images of the split are asked for: mounted, uploaded and still of the recorded size."""
    if not len(manifest):
        return []
    table = manifest.table
    try:
        store = open_store(manifest.source_uri)
        for i in sorted({0, len(manifest) // 2, len(manifest) - 1}):
            name, size = table["image"][i].as_py(), table["bytes"][i].as_py()
            found = _size(store, name)
            if found is None:
                raise InvalidInput(
                    f"image {name!r} of the {split} manifest is not there", expected="the image that was split",
                    where=manifest.source_uri,
                    next_step="mount or upload the data set where the manifest says, or split it again",
                )  # fmt: skip
            if found != size:
                raise InvalidInput(
                    f"image {name!r} has {found} bytes, the {split} manifest says {size}",
                    expected="the image that was split", where=manifest.source_uri,
                    next_step="the data set was changed: set another dataset_revision, which splits it again",
                )  # fmt: skip
    except KfpGateError as problem:
        return from_error(problem, why=f"the {split} images cannot be read")
    return [ok(f"{split}: images are reachable at {manifest.source_uri}")]


def _size(store: Store, name: str) -> int | None:
    if isinstance(store, LocalStore):  # listing a local store walks all of it
        path = store.root / name
        return path.stat().st_size if path.is_file() else None
    return next((entry.size for entry in store.list(name) if entry.key == name), None)


def _listed(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:LISTED]))
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown
