"""What is wrong with a dataset, one finding at a time, and what is done about it. Nothing is dropped silently."""

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kfp_gate.errors import LISTED_PROBLEMS, InvalidInput, Problem

POLICIES = ("error", "drop", "fix", "fix+drop")
"""`error` refuses the dataset; `drop` leaves the image out; `fix` mends what has an exact cure and refuses the
rest; `fix+drop` mends what has an exact cure and leaves the rest out. Whatever is done is listed."""

EXPECTED = {
    "unreadable image": "a complete image file that can be decoded",
    "missing image": "an image file for each image that the annotations list",
    "image size differs": "the width and height of the image file, after its EXIF rotation",
    "image listed twice": "each image once",
    "ambiguous label": "one image for each label file",
    "unreadable label file": "UTF-8 text or well-formed XML",
    "not five numbers": "class cx cy width height, five numbers divided by blanks",
    "incomplete annotation": "an image with file name and size; an object with image, class and four finite numbers",
    "unknown class": "a class of the dataset's list of names",
    "out of range": "a box inside the image: numbers from 0 to 1, edges at most 0.001 outside",
    "zero area": "a box with a width and a height above 0",
    "duplicate box": "each box once",
    "label without image": "an image for each label",
    "bridge": "a new image that belongs to groups of one split only",
    "divided group": "each group inside one of the source's own splits",
}
"""Every kind of defect and what was expected instead."""

FIXABLE = {
    "out of range": "clipped to the border",
    "duplicate box": "kept once",
}
"""Kinds that have an exact cure, and the cure. A box that lies wholly outside has none."""


@dataclass(frozen=True)
class Defect:
    """One finding.

    Attributes:
        kind: a key of `EXPECTED`.
        file: the file at fault, relative to the dataset.
        line: line from 1, or annotation id; 0 if the whole file is meant.
        found: the offending value and what is wrong with it.
        image: the image concerned, "" if there is none.
        action: what was done: `refused`, `dropped` (the image is in no split), `left out` (no image was lost), or
            the cure.
    """

    kind: str
    file: str
    line: int
    found: str
    image: str = ""
    action: str = "refused"

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


def rejects_csv(defects: Iterable[Defect]) -> str:
    """The rejects file: one row per finding with image, file, line, kind, found, action."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["image", "file", "line", "kind", "found", "action"])
    writer.writerows([d.image, d.file, d.line or "", d.kind, d.found, d.action] for d in defects)
    return out.getvalue()


def refusal(defects: Sequence[Defect], where: str) -> InvalidInput:
    """The error that lists all defects, kind by kind: the first 20 of each kind and a count."""
    kinds = {kind: [d for d in defects if d.kind == kind] for kind in EXPECTED}
    kinds = {kind: found for kind, found in kinds.items() if found}
    cures = sorted({FIXABLE[d.kind] for d in defects if d.kind in FIXABLE})
    next_step = "mend the files, or choose rejects='drop' to leave these images out (listed in the rejects file)"
    if cures:
        next_step += f", or rejects='fix' for what has an exact cure ({', '.join(cures)})"
    if len(kinds) == 1:
        kind, found = next(iter(kinds.items()))
        return InvalidInput(
            f"{len(found)} x {kind}", expected=EXPECTED[kind], where=where, next_step=next_step,
            problems=[Problem(d.where, d.found) for d in found],
        )  # fmt: skip
    lines = [f"{len(defects)} defects of {len(kinds)} kinds"]
    for kind, found in kinds.items():
        lines.append(f"  {len(found)} x {kind} (expected {EXPECTED[kind]})")
        lines += [f"    {d.where}: {d.found}" for d in found[:LISTED_PROBLEMS]]
        if len(found) > LISTED_PROBLEMS:
            lines.append(f"    ... and {len(found) - LISTED_PROBLEMS} more")
    return InvalidInput(
        "\n           ".join(lines), expected="a dataset without defects", where=where, next_step=next_step
    )
