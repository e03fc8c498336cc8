"""The validation of an epoch, on all ranks, by the evaluator that the gate uses.

Each rank predicts its share of the val set with the averaged weights as they would be stored (rounded to half
precision), letterboxed to a fixed square; records of eight bytes a detection go to rank 0, which computes. So
batch size, number of ranks and uneven shares change no value, and the numbers are the gate's.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kfp_gate import metric_names
from kfp_gate.errors import Broken, InvalidInput, Problem
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.gather import gather_records
from kfp_gate.evaluation.metrics import Metrics, compute
from kfp_gate.evaluation.predict import Detector, PredictSettings
from kfp_gate.evaluation.records import Matcher, Records, truth_pixels
from kfp_gate.observing.parts import Parts
from kfp_gate.training.group import Group, PeerFailed
from kfp_gate.training.weights import as_stored

if TYPE_CHECKING:
    from kfp_gate.data.manifest import Manifest

log = logging.getLogger(__name__)

Values = dict[str, float | None]
"""Canonical name to a finite float, or None where it was not computed."""


class Validation:
    """The val set of one rank, ready to be predicted again and again."""

    def __init__(
        self, manifest: "Manifest", images: Sequence[Path], *, group: Group, settings: PredictSettings,
        confidence: float, bands: bool = False, reference: BoxReference | None = None,
    ) -> None:  # fmt: skip
        """`images` are the local paths in the manifest's order; `bands` also computes values by object size;
        `reference` holds the box shapes of the training set, by which a box is absurd."""
        if len(images) != len(manifest):
            raise Broken(
                f"{len(images)} local images", expected=f"{len(manifest)}, as the val manifest lists",
                where="val set", next_step="check the space and the log of the materialisation",
            )  # fmt: skip
        self.manifest, self.images, self.group, self.bands = manifest, list(images), group, bands
        self.settings, self.confidence, self.reference = settings, confidence, reference
        self.rows = list(manifest.rows())
        self.reasons: dict[str, str] = {}
        self.parts = Parts()
        self._mine = 0

    def run(self, module: torch.nn.Module, *, only: Sequence[int] | None = None) -> Values:
        """Evaluate on all ranks; every rank must call it, and every rank gets the values.

        Args:
            module: the averaged weights; left as they are.
            only: indexes of the images to take; None: all.

        Raises:
            The error of this rank, or PeerFailed naming the rank that failed: on all ranks, in the same moment.
        """
        indexes = list(range(len(self.rows)) if only is None else only)
        during = self.parts.during
        with during("broadcast"):
            self.group.broadcast_tensors(list(module.buffers()))
        records, error = None, None
        try:
            records = self._records(module, indexes[self.group.rank :: self.group.size])
        except Exception as caught:
            error = caught
        with during("wait"):
            self.group.agree("validation: prediction", error)
        assert records is not None
        with during("gather"):
            gathered = gather_records(records)
        values, text = None, ""
        if self.group.rank == 0:
            try:
                with during("metrics"):
                    values = self._compute(gathered, len(indexes))
            except Exception as caught:
                error, text = caught, f"{type(caught).__name__}: {caught}"
        with during("broadcast"):
            answer = self.group.broadcast({"values": values, "error": text})
        if error is not None:
            raise error
        if answer["error"]:
            raise PeerFailed(0, "validation: metrics", answer["error"])
        result: Values = answer["values"]
        return result

    def account(self) -> dict[str, Any]:
        """What the last validation cost on this rank: its images, seconds by part, threads that loaded images.

        `load`, `forward` and `suppress` are sums over these threads; `wait` is for the slowest rank; the rest is the
        main thread's.
        """
        found = self.parts.take()
        threads = found["load"].threads if "load" in found else 0
        parts = {name: round(part.wall_s, 4) for name, part in found.items()}
        return {"images": self._mine, "parts": parts, "threads": threads}

    def sample(self, count: int, monitors: Sequence[str]) -> list[int]:
        """Indexes of up to `count` images in which every monitored class occurs, as far as the set allows."""
        wanted = {metric_names.parse(m).class_name for m in monitors} - {None}
        chosen: list[int] = []
        for name in sorted(c for c in wanted if c is not None):
            index = self.manifest.classes.index(name)
            first = next((i for i, row in enumerate(self.rows) if (row.boxes[:, 0] == index).any()), None)
            if first is not None and first not in chosen:
                chosen.append(first)
        with_objects = (i for i, row in enumerate(self.rows) if len(row.boxes))
        for index in (*with_objects, *range(len(self.rows))):
            if len(chosen) >= count:
                break
            if index not in chosen:
                chosen.append(index)
        return sorted(chosen)

    def check_monitors(self, monitors: Sequence[str]) -> None:
        """Refuse monitors that this val set can never give a value.

        Raises:
            InvalidInput: a monitored class has no object in the val set, or the set has no object at all.
        """
        present = {int(c) for row in self.rows for c in row.boxes[:, 0]}
        problems = []
        for monitor in monitors:
            name = metric_names.parse(monitor, classes=self.manifest.classes, where="monitors").class_name
            if name is not None and self.manifest.classes.index(name) not in present:
                problems.append(Problem(monitor, f"class {name!r} has no object in the val set"))
            elif name is None and not present:
                problems.append(Problem(monitor, "the val set has no object of any class"))
        if problems:
            raise InvalidInput(
                "monitors that can never have a value", expected="monitors with objects in the val set",
                where="monitors", next_step="choose other monitors, or split so that val gets objects of these classes",
                problems=problems,
            )  # fmt: skip

    def _records(self, module: torch.nn.Module, indexes: Sequence[int]) -> Records:
        matcher = Matcher(len(self.manifest.classes), detail=self.bands, reference=self.reference)
        self._mine = len(indexes)
        if not indexes:
            return matcher.finish()
        with self.parts.during("weights"):
            detector = Detector.from_module(as_stored(module), self.manifest.classes)
        found = detector.predict([self.images[i] for i in indexes], self.settings, parts=self.parts)
        for index, detections in zip(indexes, found, strict=True):
            row = self.rows[index]
            with self.parts.during("match"):
                matcher.add(
                    index, detections.boxes, detections.scores, detections.classes,
                    truth_pixels(row.boxes, row.width, row.height), row.boxes[:, 0],
                    crowd=getattr(row, "crowd", None), size=(row.width, row.height),
                )  # fmt: skip
        with self.parts.during("match"):
            return matcher.finish()

    def _compute(self, records: Records | None, expected: int) -> Values:
        found = len(records) if records is not None else 0
        if records is None or found != expected:
            raise Broken(
                f"{found} evaluated images", expected=f"{expected}: images in must equal images out",
                where="validation", next_step="look for ranks that skipped images in the log",
            )  # fmt: skip
        metrics: Metrics = compute(records, self.manifest.classes, confidence=self.confidence, bands=self.bands)
        self.reasons = metrics.not_computed()
        numbers = metrics.numbers()
        return {name: numbers.get(name) for name in metrics}
