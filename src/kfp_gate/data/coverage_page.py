"""The coverage page: numbers of a `Coverage` arranged for its template."""

import numpy as np

from kfp_gate.data.annotations import SPLITS
from kfp_gate.data.coverage import GROUP_SIZE_EDGES, Coverage
from kfp_gate.metric_names import SIZE_BANDS
from kfp_gate.pages import render


def page(c: Coverage) -> str:
    """The HTML of a coverage."""
    total = max(int(c.images.sum()), 1)
    instances = c.instances.tolist()
    order = np.lexsort((np.arange(len(c.classes)), c.instances[:, 2])).tolist()
    bins = [
        f"{low}" if high is not None and high - low == 1 else f"{low}-{high - 1}" if high is not None else f"{low}+"
        for low, high in zip(GROUP_SIZE_EDGES, [*GROUP_SIZE_EDGES[1:], None], strict=True)
    ]
    sizes = c.group_sizes.tolist()
    shown = max((i for i, row in enumerate(sizes) if any(row)), default=0) + 1
    return render(
        "coverage.html",
        source=c.source_uri, rule=c.rule, strategy=c.strategy, seed=c.seed, total=total,
        splits=[
            {
                "name": split, "images": int(c.images[i]), "asked": c.shares[i], "given": int(c.images[i]) / total,
                "groups": int(c.groups[i]), "objects": int(c.instances[:, i].sum()), "background": int(c.background[i]),
                "background_share": int(c.background[i]) / max(int(c.images[i]), 1),
            }
            for i, split in enumerate(SPLITS)
        ],
        classes=[
            {
                "name": c.classes[k], "counts": instances[k], "total": sum(instances[k]),
                "images": c.images_with[k].tolist(),
                "sizes": c.class_size_bands[k].tolist(),
            }
            for k in order
        ],
        bands=SIZE_BANDS, band_rows=_shares(c.size_bands.tolist()),
        group_bins=list(zip(bins[:shown], sizes[:shown], strict=True)),
        group_most=max(int(c.group_sizes.sum(axis=1).max(initial=0)), 1), largest_group=c.largest_group,
        duplicates=c.duplicates, near=c.near_duplicates_across, near_distance=c.near_distance, rejected=c.rejected,
        defects=list(c.defects.items()), shortfalls=c.shortfalls, absent=c.absent, notes=c.notes, split_names=SPLITS,
    )  # fmt: skip


def _shares(rows: list[list[int]]) -> list[dict[str, object]]:
    """Per split the share of each size band."""
    out: list[dict[str, object]] = []
    for i, split in enumerate(SPLITS):
        counts = [row[i] for row in rows]
        whole = sum(counts)
        out.append({"name": split, "counts": counts, "shares": [n / whole if whole else 0.0 for n in counts]})
    return out
