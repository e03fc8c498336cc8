"""From a dataset to three manifests that share no group, with a report on what they cover."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kfp_gate import __version__
from kfp_gate.data import coverage as coverage_of
from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Annotations, Bools, Ints
from kfp_gate.data.assignment import Shares, best_fit, by_hash, check_shares, hash_positions
from kfp_gate.data.box_checks import check_boxes
from kfp_gate.data.coverage import Coverage
from kfp_gate.data.defects import POLICIES, Defect, refusal, rejects_csv
from kfp_gate.data.group_rules import parse_rules
from kfp_gate.data.grouping import Grouping, group_images
from kfp_gate.data.images import ImageFacts, inspect_images
from kfp_gate.data.manifest import Manifest, build_table, write_manifest
from kfp_gate.data.near_duplicates import pairs_across
from kfp_gate.data.progress import Reporter
from kfp_gate.data.sources import open_dataset, read_annotations
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import open_store

log = logging.getLogger(__name__)

NEAR_DISTANCE = 4
"""Bits within which the report counts near-duplicates across splits when no rule names a distance."""

SHARE_TOLERANCE = 0.05
"""A split whose share of the images is further than this from what was asked for is named in the notes."""


@dataclass(frozen=True)
class SplitResult:
    """A finished split.

    Attributes:
        manifests: by split name: train, val, test. No group is in two of them.
        coverage: counts and findings.
        notes: sentences a person should read, also part of the coverage.
        rejects: every finding on the input and what was done about it.
    """

    manifests: dict[str, Manifest]
    coverage: Coverage
    notes: tuple[str, ...]
    rejects: tuple[Defect, ...]

    def save(self, folder: Path | str) -> None:
        """Write train, val and test.parquet, coverage.html, coverage.txt and rejects.csv to a folder or prefix."""
        store = open_store(str(folder))
        for split, manifest in self.manifests.items():
            write_manifest(manifest, f"{store.uri}/{split}.parquet")
        store.write("coverage.html", coverage_of.html(self.coverage).encode())
        store.write("coverage.txt", (coverage_of.text(self.coverage) + "\n").encode())
        store.write("rejects.csv", rejects_csv(self.rejects).encode())


def split_dataset(
    source_uri: str,
    *,
    format: str = "auto",
    group_rule: str = "auto",
    shares: Sequence[float] = (0.7, 0.15, 0.15),
    seed: int = 0,
    revision: str = "",
    rejects: str = "error",
    rejects_file: Path | str | None = None,
    reporter: Reporter | None = None,
) -> SplitResult:
    """Split a dataset into train, val and test so that no group is divided.

    Args:
        source_uri: a folder, an s3:// prefix, or the data.yaml or COCO json inside one.
        format: `auto`, `yolo`, `coco` or `voc`.
        group_rule: see `kfp_gate.data.group_rules.RULES`; several joined by `+`.
        shares: of the images, for train, val, test; each above 0, sum 1.
        seed: another seed gives another split.
        revision: any text; recorded, and part of a pipeline's cache key.
        rejects: what to do about defects, one of `POLICIES`.
        rejects_file: where to list every finding; written before an error is raised too.
        reporter: called with the progress; None logs it.

    Raises:
        InvalidInput: the source cannot be read, holds defects (all are listed), or has fewer than three groups.
    """
    asked = check_shares(shares)
    rules = parse_rules(group_rule)
    if rejects not in POLICIES:
        raise InvalidInput(
            f"rejects policy {rejects!r}", expected=f"one of {', '.join(POLICIES)}", where="rejects",
            next_step="correct the parameter",
        )  # fmt: skip
    store, root, listing, named = open_dataset(source_uri)
    annotations = read_annotations(store, listing, format=format, named=named, reporter=reporter)
    annotations = check_boxes(annotations, fix=rejects.startswith("fix"))
    facts = inspect_images(store, annotations.images, reporter=reporter)
    annotations = _check_images(annotations, facts)
    annotations, keep = _apply_policy(annotations, rejects, rejects_file, root)
    facts = _keep_facts(facts, keep)
    grouping = group_images(annotations.images, facts, rules, store)
    notes = [*annotations.notes, *grouping.notes]
    splits = _assign(grouping, asked, seed, notes, root, group_rule)
    notes += _share_notes(splits, grouping, asked)
    report = _coverage(annotations, facts, grouping, splits, asked, group_rule, seed, root, rules, keep, notes)
    result = SplitResult(
        {
            split: _manifest(annotations, facts, grouping, splits == code, split, root, seed, group_rule, revision)
            for code, split in enumerate(SPLITS)
        },
        report, report.notes, annotations.defects,
    )  # fmt: skip
    for note in report.notes:
        log.warning("%s", note)
    return result


def _check_images(annotations: Annotations, facts: ImageFacts) -> Annotations:
    found = [
        Defect("missing image" if error == "does not exist" else "unreadable image", image, 0, error, image)
        for image, error in zip(annotations.images, facts.errors, strict=True)
        if error
    ]
    readable = np.array([not e for e in facts.errors], bool)
    actual = np.column_stack([facts.width, facts.height])
    differs = readable & (annotations.declared > 0).all(axis=1) & (annotations.declared != actual).any(axis=1)
    for i in np.flatnonzero(differs).tolist():
        (dw, dh), (w, h) = annotations.declared[i].tolist(), actual[i].tolist()
        text = f"{annotations.label_files[i]} states {dw} x {dh}, the file has {w} x {h}"
        found.append(Defect("image size differs", annotations.images[i], 0, text, annotations.images[i]))
    return replace(annotations, defects=annotations.defects + tuple(found))


def _apply_policy(
    annotations: Annotations, policy: str, rejects_file: Path | str | None, where: str
) -> tuple[Annotations, Bools]:
    """Raise for what the policy refuses; otherwise leave out the images concerned. Returns what was kept, shape (n,)."""
    refused = [d for d in annotations.defects if d.action == "refused"]
    if refused and not policy.endswith("drop"):
        _write_rejects(annotations.defects, rejects_file)
        raise refusal(refused, where)
    leaving = {d.image for d in refused if d.image}
    keep = np.array([image not in leaving for image in annotations.images], bool)
    done = tuple(
        replace(d, action="dropped" if d.image else "left out") if d.action == "refused" else d
        for d in annotations.defects
    )
    _write_rejects(done, rejects_file)
    if not keep.any():
        raise InvalidInput(
            f"none of {len(keep)} images is free of defects", expected="at least three usable images", where=where,
            next_step="read the rejects file and mend the dataset",
        )  # fmt: skip
    return replace(annotations.keep_images(keep), defects=done), keep


def _write_rejects(defects: Sequence[Defect], file: Path | str | None) -> None:
    if file is not None:
        folder, _, name = str(file).rpartition("/")
        open_store(folder or ".").write(name, rejects_csv(defects).encode())


def _keep_facts(facts: ImageFacts, keep: Bools) -> ImageFacts:
    if keep.all():
        return facts
    rows = np.flatnonzero(keep).tolist()
    return ImageFacts(
        facts.width[keep], facts.height[keep], [facts.sha256[i] for i in rows], facts.phash[keep], facts.bytes[keep],
        facts.taken[keep], [facts.camera[i] for i in rows], [facts.errors[i] for i in rows],
    )  # fmt: skip


def _assign(grouping: Grouping, shares: Shares, seed: int, notes: list[str], where: str, rule: str) -> Ints:
    """Split of each image, shape (n,)."""
    codes, first, sizes = np.unique(grouping.codes, return_index=True, return_counts=True)
    names = [grouping.names[i] for i in first.tolist()]
    if len(names) < 3:
        raise InvalidInput(
            f"{len(names)} group{'s' * (len(names) != 1)} of images by the rule {rule!r}: {', '.join(map(repr, names))}",
            expected="at least 3 groups, one for each split, since no group may be divided", where=where,
            next_step="choose a finer group_rule ('none' makes each image its own group), or add images of other scenes",
        )  # fmt: skip
    chosen = by_hash(names, shares, seed)
    counts = np.bincount(chosen, minlength=3)
    if not counts.all():
        empty = " and ".join(SPLITS[i] for i in np.flatnonzero(counts == 0).tolist())
        chosen = best_fit(sizes, hash_positions(names, seed), shares, np.full(len(names), NO_SPLIT))
        notes.append(
            f"the hashes of {len(names)} groups leave {empty} empty, so the groups were placed by size instead: until "
            "there are more groups, adding images may move these"
        )
    return np.asarray(chosen[np.searchsorted(codes, grouping.codes)])


def _share_notes(splits: Ints, grouping: Grouping, shares: Shares) -> list[str]:
    images = np.bincount(splits, minlength=3)
    given = images / images.sum()
    if (np.abs(given - shares) <= SHARE_TOLERANCE).all():
        return []
    groups = len(np.unique(grouping.codes))
    asked = "/".join(f"{100 * s:.4g}" for s in shares)
    parts = ", ".join(
        f"{s} {g:.1%} ({n} images)" for s, g, n in zip(SPLITS, given.tolist(), images.tolist(), strict=True)
    )
    return [f"{groups} groups cannot give the asked shares {asked}; they give {parts}"]


def _coverage(
    annotations: Annotations, facts: ImageFacts, grouping: Grouping, splits: Ints, shares: Shares, rule: str, seed: int,
    source_uri: str, rules: Sequence[object], keep: Bools, notes: list[str],
) -> Coverage:  # fmt: skip
    counts = coverage_of.count(annotations, facts.width, facts.height, splits, grouping.codes)
    a, b = pairs_across(facts.phash, splits, NEAR_DISTANCE)
    if len(a):
        shown = ", ".join(
            f"{annotations.images[i]} and {annotations.images[j]}" for i, j in zip(a[:2], b[:2], strict=True)
        )
        notes.append(
            f"{len(a)} pairs of images look alike (at most {NEAR_DISTANCE} of 64 bits apart) and lie in different splits, "
            f"such as {shown}; add +near-duplicates:{NEAR_DISTANCE} to the group rule to hold them together"
        )
    absent = np.flatnonzero((counts["instances"] == 0).any(axis=1)).tolist()
    if absent:
        shown = ", ".join(
            f"{annotations.classes[k]!r} ({', '.join(s for s, n in zip(SPLITS, counts['instances'][k], strict=True) if not n)})"
            for k in absent[:5]
        )
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        notes.append(
            f"{len(absent)} of {len(annotations.classes)} classes have no instance in some split: {shown}{more}"
        )
    return Coverage(
        classes=annotations.classes, shares=shares, rule=rule, strategy="hash", seed=seed, source_uri=source_uri,
        images=counts["images"], groups=counts["groups"], background=counts["background"],
        instances=counts["instances"], images_with=counts["images_with"], size_bands=counts["size_bands"],
        class_size_bands=counts["class_size_bands"], group_sizes=counts["group_sizes"],
        largest_group=int(counts["largest_group"]), duplicates=grouping.duplicates, near_duplicates_across=len(a),
        near_distance=NEAR_DISTANCE, rejected=int((~keep).sum()),
        defects=dict(Counter(d.kind for d in annotations.defects)), shortfalls=(), notes=tuple(notes),
    )  # fmt: skip


def _manifest(
    annotations: Annotations, facts: ImageFacts, grouping: Grouping, chosen: Bools, split: str, source_uri: str, seed: int,
    rule: str, revision: str,
) -> Manifest:  # fmt: skip
    part = annotations.keep_images(chosen)
    rows = np.flatnonzero(chosen).tolist()
    table = build_table(
        {
            "image": part.images, "bytes": facts.bytes[chosen], "width": facts.width[chosen],
            "height": facts.height[chosen], "sha256": [facts.sha256[i] for i in rows], "phash": facts.phash[chosen],
            "group": [grouping.names[i] for i in rows],
        },
        part.offsets, np.column_stack([part.box_class, part.boxes]), part.crowd,
    )  # fmt: skip
    return Manifest(table, annotations.classes, split, source_uri, seed, rule, __version__, revision)
