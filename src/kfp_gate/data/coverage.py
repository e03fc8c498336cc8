"""What each split holds: classes, sizes, groups, and what is missing to judge a class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kfp_gate.data.annotations import SPLITS, Annotations, Ints
from kfp_gate.data.assignment import Shares
from kfp_gate.metric_names import SIZE_BANDS, per_class

SIZE_EDGES = (32**2, 96**2)
"""Areas in pixels that divide COCO's size bands small, medium, large."""

GROUP_SIZE_EDGES = (1, 2, 5, 10, 50, 100, 1000)
"""Lower edges of the bins of the group size histogram."""

_TEXT_CLASSES = 12


@dataclass(frozen=True)
class Shortfall:
    """A class with too few instances in the test set, and the smallest change that would cure it."""

    class_name: str
    instances: int
    needed: int
    cure: str


@dataclass(frozen=True)
class Coverage:
    """Counts of a finished split. Arrays have one column per split: train, val, test.

    Attributes:
        classes: class names, k of them.
        shares: what was asked for.
        images, groups, background: images, groups, and images without objects; shape (3,).
        instances, images_with: objects, and images with at least one, per class; shape (k, 3). Crowds do not count.
        size_bands: objects by area (small, medium, large) in pixels of the image; shape (3, 3).
        class_size_bands: the same per class over all splits; shape (k, 3).
        group_sizes: groups per bin of `GROUP_SIZE_EDGES`; shape (bins, 3).
        largest_group: images of the largest group.
        duplicates: images whose bytes equal an earlier image's; they share its group.
        near_duplicates_across: pairs of near-duplicates in different splits, None if not looked for.
        rejected: images in no split.
        defects: findings by kind.
        shortfalls: classes under the minimum in the test set.
        notes: sentences a person should read.
    """

    classes: tuple[str, ...]
    shares: Shares
    rule: str
    strategy: str
    seed: int
    source_uri: str
    images: Ints
    groups: Ints
    background: Ints
    instances: Ints
    images_with: Ints
    size_bands: Ints
    class_size_bands: Ints
    group_sizes: Ints
    largest_group: int
    duplicates: int
    near_duplicates_across: int | None
    near_distance: int
    rejected: int
    defects: Mapping[str, int]
    shortfalls: tuple[Shortfall, ...]
    notes: tuple[str, ...]

    @property
    def absent(self) -> list[tuple[str, list[str]]]:
        """Classes without an instance in some split, and those splits."""
        return [
            (name, [s for s, n in zip(SPLITS, row, strict=True) if not n])
            for name, row in zip(self.classes, self.instances.tolist(), strict=True)
            if not all(row)
        ]


def count(annotations: Annotations, width: Ints, height: Ints, splits: Ints, groups: Ints) -> dict[str, Ints]:
    """The arrays of a `Coverage` from flat columns.

    Args:
        width, height: pixels, shape (n,).
        splits: code of each image's split, shape (n,).
        groups: code of each image's group, shape (n,).
    """
    classes, owner = len(annotations.classes), annotations.owner
    judged = ~annotations.crowd
    owner, cls = owner[judged], annotations.box_class[judged]
    split = splits[owner]
    area = annotations.boxes[judged, 2] * width[owner] * annotations.boxes[judged, 3] * height[owner]
    band = np.digitize(area, SIZE_EDGES)
    per_image = np.unique(owner * classes + cls)  # (image, class) once
    with_objects = np.zeros(len(splits), bool)
    with_objects[owner] = True
    _, first, sizes = np.unique(groups, return_index=True, return_counts=True)
    bins = np.digitize(sizes, GROUP_SIZE_EDGES) - 1

    def table(rows: Ints, columns: Ints, count: int, width: int = 3) -> Ints:
        return np.bincount(rows * width + columns, minlength=count * width).reshape(count, width).astype(np.int64)

    return {
        "images": np.bincount(splits, minlength=3).astype(np.int64),
        "groups": np.bincount(splits[first], minlength=3).astype(np.int64),
        "background": np.bincount(splits[~with_objects], minlength=3).astype(np.int64),
        "instances": table(cls, split, classes),
        "images_with": table(per_image % classes, splits[per_image // classes], classes),
        "size_bands": table(band, split, 3),
        "class_size_bands": table(cls, band, classes),
        "group_sizes": table(bins, splits[first], len(GROUP_SIZE_EDGES)),
        "largest_group": np.array(sizes.max(initial=0), np.int64),
    }


def metrics(coverage: Coverage) -> dict[str, float]:
    """Flat finite numbers for KFP Metrics and MLflow."""
    c = coverage
    result: dict[str, float] = {}
    for i, split in enumerate(SPLITS):
        result[f"{split}/images"] = float(c.images[i])
        result[f"{split}/groups"] = float(c.groups[i])
        result[f"{split}/instances"] = float(c.instances[:, i].sum())
        result[f"{split}/share"] = float(c.images[i] / max(c.images.sum(), 1))
        result[f"{split}/background_share"] = float(c.background[i] / max(c.images[i], 1))
    result["classes"] = float(len(c.classes))
    result["classes_absent_from_test"] = float((c.instances[:, 2] == 0).sum())
    result["classes_short_in_test"] = float(len(c.shortfalls))
    result["duplicate_images"] = float(c.duplicates)
    result["rejected_images"] = float(c.rejected)
    result["largest_group_images"] = float(c.largest_group)
    if c.near_duplicates_across is not None:
        result["near_duplicate_pairs_across_splits"] = float(c.near_duplicates_across)
    for name, row in zip(c.classes, c.instances.tolist(), strict=True):
        result[per_class(name, "test_instances")] = float(row[2])
    return result


def text(coverage: Coverage) -> str:
    """One screen for a log: what was asked for and given, the scarcest classes first, and what to know."""
    c = coverage
    total = max(int(c.images.sum()), 1)
    rows = [["split", "images", "asked", "given", "groups", "objects", "without objects"]]
    for i, split in enumerate(SPLITS):
        rows.append([
            split, f"{c.images[i]}", f"{c.shares[i]:.1%}", f"{c.images[i] / total:.1%}", f"{c.groups[i]}",
            f"{c.instances[:, i].sum()}", f"{c.background[i]} ({c.background[i] / max(int(c.images[i]), 1):.0%})",
        ])  # fmt: skip
    lines = [
        f"{c.source_uri}: {total} images, rule {c.rule!r}, strategy {c.strategy!r}, seed {c.seed}",
        *_align(rows),
        "",
    ]
    order = np.lexsort((np.arange(len(c.classes)), c.instances[:, 2])).tolist()
    rows = [["objects of class", *SPLITS, *SIZE_BANDS]]
    for k in order[:_TEXT_CLASSES]:
        rows.append(
            [_cut(c.classes[k], 32), *map(str, c.instances[k].tolist()), *map(str, c.class_size_bands[k].tolist())]
        )
    lines += _align(rows)
    if len(order) > _TEXT_CLASSES:
        lines.append(f"... and {len(order) - _TEXT_CLASSES} classes with more in test")
    facts = [f"{c.duplicates} images repeat another's bytes (kept in its group)" if c.duplicates else ""]
    if c.near_duplicates_across:
        facts.append(f"{c.near_duplicates_across} near-duplicate pairs lie in different splits")
    facts.append(f"{c.rejected} images rejected" if c.rejected else "")
    facts += [f"{n} x {kind}" for kind, n in c.defects.items()]
    lines += ["", *(f"- {f}" for f in facts if f)] if any(facts) else []
    lines += [f"- {s.class_name}: {s.instances} of {s.needed} instances in test; {s.cure}" for s in c.shortfalls[:5]]
    lines += [f"- {note}" for note in c.notes]
    return "\n".join(lines)


def html(coverage: Coverage) -> str:
    """A self-contained page with figures."""
    from kfp_gate.data.coverage_page import page

    return page(coverage)


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(_width(r[i]) for r in rows) for i in range(len(rows[0]))]
    out = []
    for row in rows:
        cells = [row[0] + " " * (widths[0] - _width(row[0]))]
        cells += [" " * (w - _width(v)) + v for v, w in zip(row[1:], widths[1:], strict=True)]
        out.append("  ".join(cells).rstrip())
    return out


def _width(value: str) -> int:
    """Columns in a terminal: wide East Asian characters take two."""
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(ch) in "WF" else 1 for ch in value)


def _cut(name: str, width: int) -> str:
    name = "".join(ch if ch.isprintable() else "?" for ch in name)
    while _width(name) > width:
        name = name[:-2] + "…"
    return name
