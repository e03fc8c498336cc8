"""Slices: test images chosen by a column of the manifest.

A column is anything a manifest says of an image beside its boxes: `group`, and whatever column was added to it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kfp_gate.errors import InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

NO_SLICE = frozenset({"image", "bytes", "width", "height", "sha256", "phash", "boxes", "crowd"})


@dataclass(frozen=True)
class Slices:
    """For each column, one text per image, in the order of the manifest."""

    columns: Mapping[str, NDArray[np.str_]]

    @property
    def values(self) -> dict[str, Sequence[str]]:
        """Each column's distinct values, sorted."""
        return {name: np.unique(column).tolist() for name, column in self.columns.items()}

    def mask(self, wanted: str, images: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Which of `images` (indices in the manifest) are in the slice `column=value`."""
        column, _, value = wanted.partition("=")
        if column not in self.columns:
            raise InvalidInput(
                f"no column {column!r}", expected=f"one of {', '.join(self.columns)}", where="slice of a criterion",
                next_step="evaluate again with a manifest that has the column",
            )  # fmt: skip
        chosen: NDArray[np.bool_] = self.columns[column][images] == value
        return chosen


def sliceable(table: "pa.Table") -> list[str]:
    """The columns of a manifest's table that slices can be taken by: texts, flags and whole numbers."""
    kinds = {name: str(table.schema.field(name).type) for name in table.column_names if name not in NO_SLICE}
    return [name for name, kind in kinds.items() if kind in ("string", "large_string", "bool") or "int" in kind]


def slices_of(columns: Mapping[str, Sequence[str]]) -> Slices:
    """Slices from columns of texts, as a stored evaluation holds them."""
    return Slices({name: np.array(list(values), dtype=np.str_) for name, values in columns.items()})
