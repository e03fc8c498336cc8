"""One pass of a detector over a manifest's images, and its result as a folder that can be judged again.

    evaluation.json    classes, manifest digest, model, settings, versions, image names
    records.npz        the columns of `Records`, uncompressed numpy arrays; never pickled objects

Readers must tolerate keys in the JSON that they do not know; a higher `schema_version` is refused.
"""

import json
import logging
import platform
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import file_digest
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.columns import Records, columns, from_columns
from kfp_gate.evaluation.metrics import Metrics, compute
from kfp_gate.evaluation.records import Matcher, truth_pixels

if TYPE_CHECKING:
    from kfp_gate.data.manifest import Manifest
    from kfp_gate.evaluation.predict import Detector, PredictSettings

log = logging.getLogger(__name__)

SCHEMA_VERSION = 1
FACTS, RECORDS = "evaluation.json", "records.npz"
_PACKAGES = (
    "kfp-gate",
    "numpy",
    "torch",
    "torchvision",
    "ultralytics",
    "onnxruntime",
    "pillow",
    "opencv-python-headless",
    "opencv-python",
)


@dataclass(frozen=True)
class Evaluation:
    """What a model did on a set of images; all that a verdict, its report and a later judgement need.

    Attributes:
        classes: of the data set, in index order.
        manifest_digest: identifies images and boxes.
        model_sha256: of the weights file; "" for a module in training.
        settings: of prediction, as in `PredictSettings`.
        records: with detail, one image per row of the manifest.
        images: the names of the images, as in the manifest.
        unknown_classes: classes of the data set that the model cannot report.
        dropped_classes: classes of the model that the data set does not have; their detections are left out.
        slices: columns of the manifest by which metrics can be sliced, one value per image.
        confidence: at which precision, recall and the rates are stated.
        versions: of what computed it.
    """

    classes: tuple[str, ...]
    manifest_digest: str
    model_sha256: str
    settings: Mapping[str, Any]
    records: Records
    images: tuple[str, ...]
    unknown_classes: tuple[str, ...] = ()
    dropped_classes: tuple[str, ...] = ()
    slices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    confidence: float = 0.25
    versions: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def metrics(self) -> Metrics:
        """Overall, per class, per size band and per slice, at the evaluation's confidence."""
        return self.metrics_at(self.confidence)

    def metrics_at(self, confidence: float) -> Metrics:
        """All metrics at another confidence."""
        from kfp_gate.evaluation.slices import compute_slices

        whole = compute(
            self.records, self.classes, confidence=confidence, bands=self.records.band_true is not None,
            unknown_classes=self.unknown_classes,
        )  # fmt: skip
        return compute_slices(
            whole, self.records, self.classes, self.slices, confidence=confidence, unknown_classes=self.unknown_classes
        )

    def save(self, folder: Path) -> None:
        """Write the folder; what was there under these names is replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        facts = {k: v for k, v in self.__dict__.items() if k not in ("records", "metrics")}
        text = json.dumps({"schema_version": SCHEMA_VERSION, **facts}, ensure_ascii=False, indent=1, allow_nan=False)
        (folder / FACTS).write_text(text, encoding="utf-8")
        with (folder / RECORDS).open("wb") as file:
            np.savez_compressed(file, **columns(self.records))  # type: ignore[arg-type]  # numpy types its flags into **kwds

    @staticmethod
    def load(folder: Path) -> "Evaluation":
        """Read what `save` wrote.

        Raises:
            InvalidInput: no evaluation there, one of a newer schema, or one that was damaged.
        """
        try:
            facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            if facts.pop("schema_version") > SCHEMA_VERSION:
                raise _refused(folder, "an evaluation of a newer version of kfp-gate")
            # allow_pickle stays off: an evaluation may come from anywhere.
            with np.load(folder / RECORDS, allow_pickle=False) as arrays:
                found = {name: arrays[name] for name in arrays.files}
            records = from_columns(found, where=str(folder / RECORDS))
            evaluation = Evaluation(
                classes=tuple(facts["classes"]), manifest_digest=facts["manifest_digest"],
                model_sha256=facts["model_sha256"], settings=facts["settings"], records=records,
                images=tuple(facts["images"]), unknown_classes=tuple(facts["unknown_classes"]),
                dropped_classes=tuple(facts["dropped_classes"]),
                slices={k: tuple(v) for k, v in facts["slices"].items()}, confidence=facts["confidence"],
                versions=facts["versions"],
            )  # fmt: skip
        # RuntimeError: a zip with a password or an unknown method, or JSON nested without end.
        except (
            OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error, RuntimeError,
            MemoryError,
        ) as error:  # fmt: skip
            raise _refused(folder, f"no whole evaluation ({type(error).__name__}: {error})") from error
        if problem := _inconsistency(evaluation):
            raise _refused(folder, problem)
        return evaluation


def evaluate(
    detector: "Detector",
    manifest: "Manifest",
    image_paths: Sequence[Path],
    settings: "PredictSettings",
    *,
    confidence: float = 0.25,
    other_classes: bool = False,
    slices: Sequence[str] = (),
    reference: BoxReference | None = None,
) -> Evaluation:
    """Predict every image once and match.

    Args:
        detector: its classes are matched to the manifest's by name, in any order.
        manifest: images and boxes.
        image_paths: the local file of every row, in the rows' order.
        settings: of prediction.
        confidence: at which precision, recall and the rates are stated.
        other_classes: accept a model with other classes and compare on the common ones, as for a champion.
        slices: columns of the manifest's table to slice by.
        reference: box shapes of the training set, by the manifest's classes; absurd boxes then count as abnormal.

    Raises:
        InvalidInput: an empty manifest, a model with other classes, an unknown column.
        Broken: an image is missing, changed or has another size than the manifest says; or what `predict` raises.
    """
    if len(manifest) == 0:
        raise InvalidInput(
            "a manifest without images", expected="at least one image", where="test set",
            next_step="raise the share of the test set, or add images",
        )  # fmt: skip
    if len(image_paths) != len(manifest):
        raise Broken(
            f"{len(image_paths)} image files", expected=f"{len(manifest)}, one per row of the manifest",
            where="evaluation", next_step="materialise the data set again",
        )  # fmt: skip
    place, unknown, dropped = _class_map(detector.classes, manifest.classes, other_classes)
    by_column = {name: _column(manifest, name) for name in slices}
    rows = list(manifest.rows())
    matcher = Matcher(len(manifest.classes), detail=True, reference=reference)
    predictions = detector.predict(image_paths, settings, digests=[row.sha256 for row in rows])
    for index, (row, found) in enumerate(zip(rows, predictions, strict=True)):
        if (found.width, found.height) != (row.width, row.height):
            raise Broken(
                f"an image of {found.width} x {found.height} pixels",
                expected=f"{row.width} x {row.height}, as the manifest says", where=str(image_paths[index]),
                next_step="split the data set again: its boxes refer to another size",
            )  # fmt: skip
        classes = place[found.classes]
        kept = classes >= 0
        matcher.add(
            index, found.boxes[kept], found.scores[kept], classes[kept],
            truth_pixels(row.boxes, row.width, row.height), row.boxes[:, 0], crowd=row.crowd,
            size=(row.width, row.height),
        )  # fmt: skip
    records = matcher.finish()
    if len(records) != len(manifest):
        raise Broken(
            f"{len(records)} evaluated images", expected=f"{len(manifest)}: images in must equal images out",
            where="evaluation", next_step="report this as an error of kfp-gate",
        )  # fmt: skip
    return Evaluation(
        classes=tuple(manifest.classes), manifest_digest=manifest.digest, model_sha256=_sha256(detector.source),
        settings=asdict(settings), records=records, images=tuple(row.image for row in rows), unknown_classes=unknown,
        dropped_classes=dropped, slices=by_column, confidence=confidence, versions=_versions(),
    )  # fmt: skip


def _class_map(
    of_model: tuple[str, ...], of_data: tuple[str, ...], other_classes: bool
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], tuple[str, ...], tuple[str, ...]]:
    """Index of each model class in the data set, -1 for none; classes the model lacks; classes the data set lacks."""
    unknown = tuple(c for c in of_data if c not in set(of_model))
    dropped = tuple(c for c in of_model if c not in set(of_data))
    if (unknown or dropped) and not other_classes:
        raise InvalidInput(
            f"a model with other classes: it lacks {list(unknown)[:10]} and adds {list(dropped)[:10]}",
            expected=f"the classes of the data set: {list(of_data)[:20]}", where="model",
            next_step="judge the model on a data set with its classes, or train it on this one",
        )  # fmt: skip
    if not set(of_model) & set(of_data):
        raise InvalidInput(
            f"a model without any class of the data set: {list(of_model)[:20]}",
            expected=f"at least one of {list(of_data)[:20]}", where="model",
            next_step="check that model and data set belong together",
        )  # fmt: skip
    if unknown or dropped:
        log.warning("classes differ: the model lacks %s and adds %s", list(unknown), list(dropped))
    return np.array([of_data.index(c) if c in set(of_data) else -1 for c in of_model], np.int64), unknown, dropped


def _column(manifest: "Manifest", name: str) -> tuple[str, ...]:
    if name not in manifest.table.column_names:
        raise InvalidInput(
            f"no column {name!r} in the manifest", expected=f"one of {manifest.table.column_names}", where="slices",
            next_step="slice by a column that the split wrote",
        )  # fmt: skip
    return tuple("" if v is None else str(v) for v in manifest.table.column(name).to_pylist())


def _sha256(source: str) -> str:
    path = Path(source)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _inconsistency(stored: Evaluation) -> str:
    """What of an evaluation from elsewhere does not fit together, "" if nothing: judged, it would give some verdict."""
    records = stored.records
    names = [*stored.classes, *stored.images, *stored.unknown_classes, *stored.dropped_classes]
    names += [value for column in stored.slices.values() for value in column]
    if not all(isinstance(name, str) for name in names):
        return "names that are no texts"
    if not all(isinstance(facts, dict) for facts in (stored.settings, stored.versions)):
        return "settings or versions that are no mapping"
    if len(stored.images) != len(records) or any(len(v) != len(records) for v in stored.slices.values()):
        return f"records of {len(records)} images under {len(stored.images)} names"
    if not np.array_equal(records.images, np.arange(len(records))):
        return "records that are not of each image once, in order"
    for kinds in (records.classes, records.truth_classes):
        if len(kinds) and not (kinds.min() >= 0 and kinds.max() < len(stored.classes)):
            return f"class indices {kinds.min()} to {kinds.max()} with {len(stored.classes)} classes"
    if not np.isfinite(records.scores).all():
        return "scores that are not finite"
    return ""


def _refused(folder: Path, found: str) -> InvalidInput:
    return InvalidInput(
        found, expected=f"a folder with {FACTS} and {RECORDS}", where=str(folder),
        next_step="give the `evaluation` artifact of a gate run",
    )  # fmt: skip
