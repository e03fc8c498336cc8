"""The model artifact: a folder with the weights, a card, and the fingerprints of what they were chosen on.

    model.pt | model.onnx    the weights
    model.json               the card
    fingerprints.parquet     sha256, phash and group of every image trained on or selected on

Readers must tolerate keys in the card that they do not know, and a missing `fingerprints.parquet`: weights
that came from elsewhere have none, and the gate then cannot prove that the test images are new to them.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from hashlib import file_digest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kfp_gate.errors import Broken, InvalidInput

if TYPE_CHECKING:
    import pyarrow as pa

CARD, FINGERPRINTS = "model.json", "fingerprints.parquet"
FINGERPRINT_COLUMNS = ("sha256", "phash", "group")
WEIGHTS = ("model.pt", "model.onnx")
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelCard:
    """What is known of a model's weights.

    Attributes:
        sha256: hex digest of the weights file; the model's identity in verdicts, waivers and the registry.
        classes: class names by index.
        image_size: side of the square the model was trained on, in pixels.
        weights: file name of the weights inside the folder.
        settings: how it was trained, as plain JSON values.
        monitors: canonical metric names that were watched; the first one is the primary.
        chosen_by: the monitor whose best epoch these weights are; "" if nothing chose them.
        manifests: split name to manifest digest of the data used ("train", "val").
        versions: package name to version; `image` names the image they ran in, where known.
        image_lock: digest of that image's lock (`sha256:...`), "" outside an image.
        run_id: MLflow run, "" without tracking.
        other_weights: monitor name to where the best weights of that monitor are kept.
        boxes: box shapes of the training set by class, as `BoxReference.to_json`; empty: unknown.
    """

    sha256: str
    classes: tuple[str, ...]
    image_size: int
    weights: str = "model.pt"
    settings: Mapping[str, Any] = field(default_factory=dict)
    monitors: tuple[str, ...] = ()
    chosen_by: str = ""
    manifests: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    image: str = ""
    run_id: str = ""
    other_weights: Mapping[str, str] = field(default_factory=dict)
    image_lock: str = ""
    boxes: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION


def write_model_folder(
    folder: Path, weights: Path, card: ModelCard, fingerprints: "Iterable[pa.Table] | None" = None
) -> ModelCard:
    """Make a model folder.

    Args:
        folder: created if missing; files of the same names are replaced, the card last, so that a folder with
            a card is complete.
        weights: a `.pt` or `.onnx` file; copied unless it lies there already.
        card: its `sha256` and `weights` are filled in from the file.
        fingerprints: the manifests' tables of every split that the weights were trained or selected on; columns
            beyond `sha256`, `phash` and `group` are dropped. None: the folder gets no fingerprints.

    Returns:
        The card as written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"model{weights.suffix}"
    if weights.resolve() != target.resolve():
        shutil.copyfile(weights, target)
    if fingerprints is not None:
        _write_fingerprints(folder, fingerprints)
    written = ModelCard(**{**_values(card), "sha256": sha256_of(target), "weights": target.name})
    (folder / CARD).write_text(json.dumps(asdict(written), ensure_ascii=False, indent=1), encoding="utf-8")
    return written


def read_card(folder: Path, *, verify: bool = True) -> ModelCard:
    """The card of a model folder.

    Args:
        folder: as written by `write_model_folder`.
        verify: compare the weights file with the card's digest (reads the whole file).

    Raises:
        InvalidInput: no such folder, no card, a card that is not one, or weights that are missing.
        Broken: the weights are not the ones that the card describes.
    """
    path = folder / CARD
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        known = {f.name for f in fields(ModelCard)}
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in known}
        card = ModelCard(**arguments)
        _check_types(card)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"no readable model card ({type(error).__name__})", expected=f"a model folder with {CARD}", where=str(path),
            next_step="give the folder that training wrote, or a bare .pt or .onnx file",
        ) from error  # fmt: skip
    weights = folder / card.weights
    if Path(card.weights).name != card.weights or not weights.is_file():
        raise InvalidInput(
            f"weights {card.weights!r} are not in the folder", expected="the file that the card names",
            where=str(folder), next_step="copy the model folder as a whole",
        )  # fmt: skip
    if verify and (found := sha256_of(weights)) != card.sha256:
        raise Broken(
            f"weights with sha256 {found}", expected=f"{card.sha256}, as the card says", where=str(weights),
            next_step="the file was changed or cut after training: fetch the model again",
        )  # fmt: skip
    return card


def refuse_probe(card: ModelCard, where: str) -> None:
    """Refuse the weights of a probe, which trained for a few steps to measure its speed.

    Raises:
        InvalidInput: the card says so.
    """
    steps = card.settings.get("probe_steps")
    if steps:
        raise InvalidInput(
            f"a model of a probe (probe_steps {steps}), which only measured its speed",
            expected="a model that a training made", where=where,
            next_step="train with probe_steps 0, and judge and register that model",
        )  # fmt: skip


def read_fingerprints(folder: Path) -> "pa.Table | None":
    """The fingerprints, columns `sha256`, `phash`, `group`; None if the model came without.

    Raises:
        InvalidInput: the file is there and cannot be read. A damaged proof is not "no proof".
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / FINGERPRINTS
    if not path.is_file():
        return None
    try:
        # In this thread, as in `read_manifest`.
        table = pq.ParquetFile(path, pre_buffer=False).read(use_threads=False).select(list(FINGERPRINT_COLUMNS))
        # A missing value is equal to none, and would prove whatever is asked.
        if not pa.types.is_integer(table.schema.field("phash").type) or any(c.null_count for c in table.columns):
            raise ValueError("hashes that are no numbers, or missing values")
        return table
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:
        raise InvalidInput(
            f"unreadable fingerprints ({type(error).__name__})", expected=f"columns {', '.join(FINGERPRINT_COLUMNS)}",
            where=str(path), next_step="fetch the model folder again",
        ) from error  # fmt: skip


def adopt_weights(weights: Path, folder: Path, *, classes: tuple[str, ...], image_size: int) -> ModelCard:
    """Make a model folder of a bare weights file from elsewhere: no fingerprints, nothing known of its training."""
    return write_model_folder(folder, weights, ModelCard("", classes, image_size))


def _check_types(card: ModelCard) -> None:
    """TypeError for a value of another type than the card's: it would fail far from here, and say something else."""
    texts = (card.sha256, card.weights, card.chosen_by, card.image, card.run_id, card.image_lock)
    lists = (card.classes, card.monitors)
    mappings = (card.settings, card.manifests, card.versions, card.other_weights)
    fits = (
        all(isinstance(value, str) for value in texts)
        and all(isinstance(value, tuple) and all(isinstance(one, str) for one in value) for value in lists)
        and all(isinstance(value, dict) for value in mappings)
        and isinstance(card.image_size, int)
        and not isinstance(card.image_size, bool)
    )
    if not fits:
        raise TypeError("values of other types")


def sha256_of(path: Path) -> str:
    """Hex digest of a file's content."""
    with path.open("rb") as handle:
        return file_digest(handle, "sha256").hexdigest()


def _values(card: ModelCard) -> dict[str, Any]:
    return {f.name: getattr(card, f.name) for f in fields(card)}


def _write_fingerprints(folder: Path, tables: "Iterable[pa.Table]") -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pa.concat_tables([t.select(list(FINGERPRINT_COLUMNS)) for t in tables])
    # One row per distinct image: the same frame in train and val would only make the file longer.
    pq.write_table(rows.group_by(list(FINGERPRINT_COLUMNS)).aggregate([]), folder / FINGERPRINTS, compression="zstd")
