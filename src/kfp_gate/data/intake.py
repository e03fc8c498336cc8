"""Takes a dataset in: reads it, checks every label and every image, and applies the policy to what is wrong."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kfp_gate.data.annotations import Annotations, Bools
from kfp_gate.data.box_checks import check_boxes
from kfp_gate.data.defects import POLICIES, Defect, refusal, rejects_csv
from kfp_gate.data.images import ImageFacts, inspect_images
from kfp_gate.data.progress import Reporter
from kfp_gate.data.sources import open_dataset, read_annotations
from kfp_gate.errors import InvalidInput
from kfp_gate.storage import MISSING, Store, open_store


@dataclass(frozen=True)
class Intake:
    """A dataset without defects.

    Attributes:
        store, root: where its files lie.
        annotations: of the images that stay; `defects` tells of the others.
        facts: of the same images, in the same order.
        images_in: how many images the source has, with those left out.
    """

    store: Store
    root: str
    annotations: Annotations
    facts: ImageFacts
    images_in: int

    def keep(self, keep: Bools) -> "Intake":
        """Only the images where `keep` is True."""
        return replace(self, annotations=self.annotations.keep_images(keep), facts=self.facts.keep(keep))


def take_in(source_uri: str, *, format: str, rejects: str, reporter: Reporter | None = None) -> Intake:
    """Read and check a dataset.

    Raises:
        InvalidInput: it cannot be read.
    """
    store, root, listing, named = open_dataset(source_uri)
    annotations = read_annotations(store, listing, format=format, named=named, reporter=reporter)
    annotations = check_boxes(annotations, fix=rejects.startswith("fix"))
    facts = inspect_images(store, annotations.images, reporter=reporter)
    return Intake(store, root, _check_images(annotations, facts), facts, len(annotations))


def check_policy(rejects: str) -> None:
    """Refuse an unknown policy."""
    if rejects not in POLICIES:
        raise InvalidInput(
            f"rejects policy {rejects!r}", expected=f"one of {', '.join(POLICIES)}", where="rejects",
            next_step="correct the parameter",
        )  # fmt: skip


def settle(intake: Intake, policy: str, rejects_file: Path | str | None) -> Intake:
    """Raise for what the policy refuses, else leave out the images concerned and say so in their defects.

    Raises:
        InvalidInput: lists every refused defect, or says that no image is left. The rejects file is written before.
    """
    annotations = intake.annotations
    refused = [d for d in annotations.defects if d.action == "refused"]
    if refused and not policy.endswith("drop"):
        write_rejects(annotations.defects, rejects_file)
        raise refusal(refused, intake.root)
    leaving = {d.image for d in refused if d.image}
    # Every image that leaves has a row with that action in the rejects file; a finding without an image costs none.
    done = tuple(
        replace(d, action="dropped" if d.image else "left out") if d.action == "refused" else d
        for d in annotations.defects
    )
    keep = np.array([image not in leaving for image in annotations.images], bool)
    if not keep.any():
        write_rejects(done, rejects_file)
        raise InvalidInput(
            f"none of {len(keep)} images is free of defects", expected="at least three usable images",
            where=intake.root, next_step="read the rejects file and mend the dataset",
        )  # fmt: skip
    return replace(intake, annotations=replace(annotations, defects=done)).keep(keep)


def write_rejects(defects: Sequence[Defect], file: Path | str | None) -> None:
    """Write the rejects file to a path or URI, if one was asked for."""
    if file is not None:
        folder, _, name = str(file).rpartition("/")
        open_store(folder or ("/" if str(file).startswith("/") else ".")).write(
            name, rejects_csv(defects).encode(errors="backslashreplace")
        )


def _check_images(annotations: Annotations, facts: ImageFacts) -> Annotations:
    listed = {d.image for d in annotations.defects if d.kind == "missing image"}
    found = [
        Defect("missing image" if error == MISSING else "unreadable image", image, 0, error, image)
        for image, error in zip(annotations.images, facts.errors, strict=True)
        if error and image not in listed
    ]
    readable = np.array([not e for e in facts.errors], bool)
    actual = np.column_stack([facts.width, facts.height])
    differs = readable & np.all(annotations.declared > 0, axis=1) & np.any(annotations.declared != actual, axis=1)
    for i in np.flatnonzero(differs).tolist():
        (dw, dh), (w, h) = annotations.declared[i].tolist(), actual[i].tolist()
        text = f"{annotations.label_files[i]} states {dw} x {dh}, the file has {w} x {h}"
        found.append(Defect("image size differs", annotations.images[i], 0, text, annotations.images[i]))
    return replace(annotations, defects=annotations.defects + tuple(found))
