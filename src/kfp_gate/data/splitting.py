"""From a dataset to three manifests that share no group, with a report on what they cover."""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kfp_gate import __version__
from kfp_gate.data import coverage as coverage_of
from kfp_gate.data.annotations import NO_SPLIT, SPLITS, Bools, Ints
from kfp_gate.data.assignment import check_shares
from kfp_gate.data.coverage import Coverage
from kfp_gate.data.defects import Defect, rejects_csv
from kfp_gate.data.group_rules import NEAR_DISTANCE, Rule, parse_rules
from kfp_gate.data.grouping import giant_note, link_images, name_groups
from kfp_gate.data.intake import Intake, check_policy, settle, take_in, write_rejects
from kfp_gate.data.manifest import Manifest, build_table, write_manifest
from kfp_gate.data.minimum import find_shortfalls, refuse_shortfalls
from kfp_gate.data.near_duplicates import pairs_across
from kfp_gate.data.placement import STRATEGIES, fixed_pins, place_groups, share_note
from kfp_gate.data.previous import Previous, old_images, pin, read_previous
from kfp_gate.data.progress import Reporter
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import open_store

log = logging.getLogger(__name__)


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
        store.write("rejects.csv", rejects_csv(self.rejects).encode(errors="backslashreplace"))


def split_to_folder(source_uri: str, out: Path | str, **options: Any) -> SplitResult:
    """`split_dataset` with its results written to a folder or prefix: what `kfp-gate split` does.

    Args:
        out: where train, val and test.parquet, coverage.html, coverage.txt and rejects.csv go; the last is
            written even if the dataset is refused.
        options: those of `split_dataset`.
    """
    result = split_dataset(source_uri, **{"rejects_file": f"{str(out).rstrip('/')}/rejects.csv", **options})
    result.save(out)
    return result


def split_dataset(
    source_uri: str,
    *,
    format: str = "auto",
    group_rule: str = "auto",
    shares: Sequence[float] = (0.7, 0.15, 0.15),
    seed: int = 0,
    revision: str = "",
    strategy: str = "hash",
    tolerance: float = 0.02,
    previous: str = "",
    min_instances: int = 0,
    on_shortfall: str = "warn",
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
        strategy: `hash` (a group's place depends on its name and the seed alone), `stratified` (images and every
            class balanced; keep it stable with `previous`), or `fixed` (the source's own train, val and test).
        tolerance: share by which a class may be off with `stratified`.
        previous: folder or prefix of an earlier split, whose images stay where they are.
        min_instances: what each class should have in the test set; 0 asks for none.
        on_shortfall: `warn` or `error` for a class with fewer.
        rejects: what to do about defects, one of `kfp_gate.data.defects.POLICIES`.
        rejects_file: path or URI where every finding is listed, also before an error is raised.
        reporter: called with the progress; None logs it.

    Raises:
        InvalidInput: the source cannot be read, holds defects (all are listed), or has fewer than three groups.
    """
    asked = check_shares(shares)
    rules = parse_rules(group_rule)
    check_policy(rejects)
    _check_choices(strategy, previous, on_shortfall, tolerance)
    # A pipeline's JSON may make 5.0 of a 5; as a text, which the hashes are made of, that is another seed.
    seed, min_instances = _whole(seed, "seed"), _whole(min_instances, "min_instances")
    earlier = read_previous(previous) if previous else None
    taken = take_in(source_uri, format=format, rejects=rejects, reporter=reporter)
    taken = settle(taken, rejects, rejects_file)
    notes = list(taken.annotations.notes)
    grouped = _group(taken, rules, earlier, notes)
    if strategy == "fixed":
        grouped = _fix(grouped, rejects, rejects_file)
    taken, codes, names = grouped.intake, grouped.codes, grouped.names
    annotations, facts = taken.annotations, taken.facts
    giant = giant_note(codes, names, group_rule)
    notes += [giant] if giant else []
    placed = place_groups(
        codes, names, annotations, grouped.pins, strategy, asked, seed, tolerance, group_rule, taken.root
    )
    splits = placed.splits[codes]
    notes += placed.notes
    off = share_note(np.bincount(splits, minlength=3), len(names), asked)
    notes += [off] if off else []
    short = find_shortfalls(
        placed.labels, placed.splits, placed.positions, placed.pinned, annotations.classes, asked, min_instances,
        by_hash=placed.by_hash,
    )  # fmt: skip
    write_rejects(annotations.defects, rejects_file)
    if short and on_shortfall == "error":
        raise refuse_shortfalls(short, taken.root)
    distance = max((int(r.argument) for r in rules if r.kind == "near-duplicates"), default=NEAR_DISTANCE)
    near = _near_across(annotations.images, facts.phash, splits, distance, notes)
    counts = coverage_of.count(annotations, facts.width, facts.height, splits, codes)
    notes += _absent_note(annotations.classes, counts["instances"])
    coverage = Coverage(
        classes=annotations.classes, shares=asked, rule=group_rule, strategy=strategy, seed=seed, source_uri=taken.root,
        largest_group=int(counts.pop("largest_group")), duplicates=grouped.duplicates, near_duplicates_across=near,
        near_distance=distance, rejected=taken.images_in - len(annotations),
        defects=dict(Counter(d.kind for d in annotations.defects)), shortfalls=short, notes=tuple(notes), **counts,
    )  # fmt: skip
    for note in notes:
        log.warning("%s", note)
    manifests = {
        split: _manifest(grouped, splits == code, split, seed, group_rule, revision)
        for code, split in enumerate(SPLITS)
    }
    return SplitResult(manifests, coverage, tuple(notes), annotations.defects)


@dataclass(frozen=True)
class _Grouped:
    """A dataset with the group of each image, and the split that each group must be in."""

    intake: Intake
    codes: Ints
    names: list[str]
    pins: Ints
    duplicates: int


def _group(taken: Intake, rules: Sequence[Rule], earlier: Previous | None, notes: list[str]) -> _Grouped:
    images, facts = taken.annotations.images, taken.facts
    if earlier is None:
        links = link_images(images, facts, rules, taken.store)
        notes += links.notes
        codes, names = name_groups(links, facts.sha256)
        return _Grouped(taken, codes, names, np.full(len(names), NO_SPLIT), links.duplicates)
    old, former = old_images(earlier, images, facts.sha256)
    links = link_images(images, facts, rules, taken.store, np.argsort(old == NO_SPLIT, kind="stable"))
    notes += links.notes
    pins = pin(images, old, (links.a, links.b))
    keep = ~pins.bridges
    if pins.defects:
        notes.append(
            f"{len(pins.defects)} new images belong to groups that the previous manifests put into different splits; "
            "they are in none (see the rejects, kind 'bridge')"
        )
        taken = _add_defects(taken, pins.defects).keep(keep)
        former = [group for group, kept in zip(former, keep.tolist(), strict=True) if kept]
    codes, names = name_groups(links.keep(keep), taken.facts.sha256, former)
    pinned = np.full(len(names), NO_SPLIT)
    np.maximum.at(pinned, codes, pins.splits[keep])
    return _Grouped(taken, codes, names, pinned, links.duplicates)


def _fix(grouped: _Grouped, rejects: str, rejects_file: Path | str | None) -> _Grouped:
    """Pin the groups where the source's own folders have them."""
    pins, leaving, divided = fixed_pins(grouped.codes, grouped.intake.annotations, grouped.names)
    taken = settle(_add_defects(grouped.intake, divided), rejects, rejects_file) if divided else grouped.intake
    return replace(grouped, intake=taken, codes=grouped.codes[~leaving], pins=pins)


def _add_defects(taken: Intake, defects: tuple[Defect, ...]) -> Intake:
    annotations = taken.annotations
    return replace(taken, annotations=replace(annotations, defects=annotations.defects + defects))


def _check_choices(strategy: str, previous: str, on_shortfall: str, tolerance: float) -> None:
    for name, value, choices in (("strategy", strategy, STRATEGIES), ("on_shortfall", on_shortfall, ("warn", "error"))):
        if value not in choices:
            raise InvalidInput(
                f"{name} {value!r}", expected=f"one of {', '.join(choices)}", where=name,
                next_step="correct the parameter",
            )  # fmt: skip
    if not 0 < tolerance < 1:
        raise InvalidInput(
            f"tolerance {tolerance!r}", expected="a share between 0 and 1", where="tolerance",
            next_step="correct the parameter",
        )  # fmt: skip
    if previous and strategy == "fixed":
        raise InvalidInput(
            "strategy 'fixed' and previous manifests", expected="one source of fixed splits", where="strategy",
            next_step="choose strategy='hash' or 'stratified' with `previous`",
        )  # fmt: skip


def _whole(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:  # NaN and inf fail it
        raise InvalidInput(
            f"{name} {value!r}", expected="a whole number", where=name, next_step="correct the parameter"
        )  # fmt: skip
    return int(value)


def _near_across(images: Sequence[str], phash: Any, splits: Ints, distance: int, notes: list[str]) -> int:
    a, b = pairs_across(phash, splits, distance)
    if len(a):
        shown = ", ".join(f"{images[i]} and {images[j]}" for i, j in zip(a[:2].tolist(), b[:2].tolist(), strict=True))
        notes.append(
            f"{len(a)} pairs of images look alike (at most {distance} of 64 bits apart) and lie in different splits, "
            f"such as {shown}; add +near-duplicates:{distance} to the group rule to hold them together"
        )
    return len(a)


def _absent_note(classes: Sequence[str], instances: Ints) -> list[str]:
    absent = np.flatnonzero((instances == 0).any(axis=1)).tolist()
    if not absent:
        return []
    missing = [", ".join(s for s, n in zip(SPLITS, instances[k].tolist(), strict=True) if not n) for k in absent[:5]]
    shown = ", ".join(f"{classes[k]!r} ({where})" for k, where in zip(absent[:5], missing, strict=True))
    more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
    return [f"{len(absent)} of {len(classes)} classes have no instance in some split: {shown}{more}"]


def _manifest(grouped: _Grouped, chosen: Bools, split: str, seed: int, rule: str, revision: str) -> Manifest:
    annotations, facts = grouped.intake.annotations, grouped.intake.facts.keep(chosen)
    part = annotations.keep_images(chosen)
    columns = {
        "image": part.images, "bytes": facts.bytes, "width": facts.width, "height": facts.height,
        "sha256": facts.sha256, "phash": facts.phash,
        "group": [grouped.names[c] for c in grouped.codes[chosen].tolist()],
    }  # fmt: skip
    table = build_table(columns, part.offsets, np.column_stack([part.box_class, part.boxes]), part.crowd)
    return Manifest(table, annotations.classes, split, grouped.intake.root, seed, rule, __version__, revision)
