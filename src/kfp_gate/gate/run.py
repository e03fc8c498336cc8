"""The gate: evaluate, judge, and leave everything behind that a reader needs.

Three endings, never mixed. *Passed* and *refused* are values of `Verdict.passed`, and every output is written in both.
*Broken* is an exception: one message that says what, where and what to do.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from kfp_gate.data.manifest import Manifest, read_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.errors import InvalidInput
from kfp_gate.evaluation.box_reference import BoxReference
from kfp_gate.evaluation.evaluate import Evaluation, evaluate
from kfp_gate.evaluation.model_folder import ModelCard, adopt_weights, read_card, read_fingerprints, refuse_probe
from kfp_gate.gate import report
from kfp_gate.gate.judging import Judged, Rival, judge_evaluation
from kfp_gate.gate.origin import Origin, origin_from, origin_of
from kfp_gate.gate.separation import compare, require
from kfp_gate.gate.settings import GateSettings
from kfp_gate.gate.slices import sliceable, slices_of
from kfp_gate.gate.verdict import Champion, Separation, champion_from, separation_from, write_verdict

if TYPE_CHECKING:
    from kfp_gate.evaluation.predict import PredictSettings

log = logging.getLogger(__name__)

CONTEXT, CHAMPION = "gate.json", "champion"

Fetch = Callable[[str, Path], Path | None]
"""Brings a champion to this machine: URI and an empty folder in, model folder or weights file out; None where the
registry has no champion yet, which is no error."""


@dataclass(frozen=True)
class GateOutputs:
    """Where the gate writes.

    Attributes:
        evaluation: folder; records, and under `champion` those of the champion. Holds no image.
        verdict: JSON file.
        report: HTML file.
        work: folder for images and fetched models; None: a temporary one, removed afterwards.
    """

    evaluation: Path
    verdict: Path
    report: Path
    work: Path | None = None


def validate(
    model: Path,
    manifest: Path | str,
    settings: GateSettings,
    out: GateOutputs,
    *,
    predict: "PredictSettings | None" = None,
    batch: int = 16,
    source_uri: str | None = None,
    fetch: Fetch | None = None,
    today: date | None = None,
) -> Judged:
    """Evaluate a model on a test set and judge it.

    Args:
        model: a model folder, or a bare .pt or .onnx file (which proves nothing about separation).
        manifest: of the test set; a path or URI.
        settings: criteria, champion, waivers, how to decide.
        out: where to write; everything is written whether the model passes or not.
        predict: of prediction, for candidate and champion; None: the defaults at the image size of each model's card.
        batch: images per pass on a GPU, where `predict` is None; changes no value.
        source_uri: where the images lie, if not at the manifest's own source.
        fetch: brings the champion of `settings.champion`; None: it is a path on this machine.
        today: the day that waivers are checked against; the current one if None.

    Raises:
        InvalidInput, Unavailable, Broken: the judging itself could not be done; never because the model is weak.
    """
    with _workplace(out.work) as work:
        test = read_manifest(manifest)
        # Before anything costs time: what the user asked for, and whether it may be measured at all.
        settings.check(test.classes, slices_of(_columns(test)).values)
        folder, card = _model_folder(model, work / "candidate", predict)
        separation = compare(test.table, read_fingerprints(folder), near=settings.near_duplicate_distance)
        require(separation, allow_unproven=settings.allow_unproven_separation, where=f"model {card.sha256[:12]}")
        images = materialize({"test": test}, work / "images", source_uri=source_uri).images["test"]
        shapes = _box_shapes(card, test)
        evaluation = _evaluate(folder, card, test, images, predict, settings, batch, shapes, other_classes=False)
        rival = _rival(settings, test, images, predict, batch, shapes, fetch, work)
        context = {"run_id": card.run_id, "split": test.split, "separation": separation, "origin": origin_of(card)}
        _save(out.evaluation, evaluation, rival, context)
        judged = _judge(evaluation, settings, rival, context, today)
        _write(judged, evaluation, rival, out.verdict, out.report, images)
    return judged


def judge(
    evaluation_folder: Path,
    settings: GateSettings,
    *,
    verdict: Path | None = None,
    report_file: Path | None = None,
    today: date | None = None,
) -> Judged:
    """Judge a stored evaluation again, under these settings: seconds, no GPU, no torch, no image.

    For the settings that the gate had, the verdict is the gate's, byte for byte. The champion is the one that the gate
    evaluated.

    Args:
        evaluation_folder: as the gate wrote it.
        verdict, report_file: where to write; None: not written. The report has no images in it.

    Raises:
        InvalidInput: no evaluation there, or problems in the settings.
    """
    evaluation = Evaluation.load(evaluation_folder)
    context, rival = _load(evaluation_folder)
    # The champion is the one that the gate compared with: fetching another would need images.
    settings = replace(settings, champion=rival.facts.uri)
    separation = context["separation"]
    require(separation, allow_unproven=settings.allow_unproven_separation, where=str(evaluation_folder))
    judged = _judge(evaluation, settings, rival, context, today)
    _write(judged, evaluation, rival, verdict, report_file, None)
    return judged


def _judge(
    evaluation: Evaluation, settings: GateSettings, rival: Rival, context: dict[str, Any], today: date | None
) -> Judged:
    judged = judge_evaluation(evaluation, settings, rival=rival, today=today, **context)
    log.info("%s", judged.verdict.headline)
    for text in judged.verdict.refused_waivers:
        log.warning("refused %s", text)
    for text in judged.verdict.self_test.vacuous:
        log.warning("this gate would let pass %s", text)
    return judged


def _write(
    judged: Judged, evaluation: Evaluation, rival: Rival, verdict: Path | None, page: Path | None,
    images: Sequence[Path] | None,
) -> None:  # fmt: skip
    if verdict is not None:
        write_verdict(judged.verdict, verdict)
    if page is not None:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.html(judged, evaluation, champion=rival.evaluation, images=images), encoding="utf-8")


def _evaluate(
    folder: Path, card: ModelCard, test: Manifest, images: Sequence[Path], predict: "PredictSettings | None",
    settings: GateSettings, batch: int, reference: BoxReference | None, *, other_classes: bool,
) -> Evaluation:  # fmt: skip
    from kfp_gate.evaluation.predict import Detector, PredictSettings

    chosen = predict or PredictSettings(image_size=card.image_size, batch=batch)
    return evaluate(
        Detector.load(folder / card.weights), test, images, chosen, confidence=settings.confidence,
        other_classes=other_classes, slices=sliceable(test.table), reference=reference,
    )  # fmt: skip


def _box_shapes(card: ModelCard, test: Manifest) -> BoxReference | None:
    """Box shapes of the candidate's training set, by which its boxes and the champion's are absurd or not."""
    return BoxReference.from_json(dict(card.boxes)).reordered(card.classes, test.classes) if card.boxes else None


def _model_folder(model: Path, folder: Path, predict: "PredictSettings | None") -> tuple[Path, ModelCard]:
    """A model folder and its card; one is made around bare weights."""
    if model.is_dir():
        card = read_card(model)
        refuse_probe(card, str(model))
        return model, card
    from kfp_gate.evaluation.predict import Detector, PredictSettings

    classes = Detector.load(model).classes
    size = (predict or PredictSettings()).image_size
    return folder, adopt_weights(model, folder, classes=classes, image_size=size)


def _rival(
    settings: GateSettings, test: Manifest, images: Sequence[Path], predict: "PredictSettings | None",
    batch: int, reference: BoxReference | None, fetch: Fetch | None, work: Path,
) -> Rival:  # fmt: skip
    """Fetch, check and evaluate the champion. One that may not be compared is named with the reason; a damaged one
    ends the gate, since the registry then needs a person."""
    if not settings.champion:
        return Rival()
    found = fetch(settings.champion, work / "fetched") if fetch else Path(settings.champion)
    if found is None:
        return Rival(Champion("none", settings.champion, reason="no champion yet"))
    folder, card = _model_folder(found, work / "champion", predict)
    separation = compare(test.table, read_fingerprints(folder), near=settings.near_duplicate_distance)
    facts = Champion("compared", settings.champion, card.sha256, separation=separation)
    if separation.state == "overlap":
        return Rival(replace(facts, state="not compared", reason=f"it saw test images ({separation.examples[0]}, ...)"))
    if separation.state == "not proven" and not settings.allow_unproven_separation:
        return Rival(replace(facts, state="not compared", reason="it has no fingerprints, so it may have seen the test "
                                                                 "images"))  # fmt: skip
    try:
        return Rival(
            facts, _evaluate(folder, card, test, images, predict, settings, batch, reference, other_classes=True)
        )
    except InvalidInput as error:
        # For instance no class in common: a fact about the champion, not a fault of this gate.
        return Rival(replace(facts, state="not compared", reason=error.found))


def _columns(test: Manifest) -> dict[str, Sequence[str]]:
    return {n: ["" if v is None else str(v) for v in test.table[n].to_pylist()] for n in sliceable(test.table)}


def _save(folder: Path, evaluation: Evaluation, rival: Rival, context: dict[str, Any]) -> None:
    evaluation.save(folder)
    if rival.evaluation is not None:
        rival.evaluation.save(folder / CHAMPION)
    facts = {
        **context, "separation": asdict(context["separation"]), "origin": asdict(context["origin"]),
        "champion": asdict(rival.facts),
    }  # fmt: skip
    (folder / CONTEXT).write_text(json.dumps(facts, ensure_ascii=False, indent=1, allow_nan=False), encoding="utf-8")


def _load(folder: Path) -> tuple[dict[str, Any], Rival]:
    """What the gate knew besides the records. An evaluation from elsewhere has none of it: nothing is proven."""
    path = folder / CONTEXT
    if not path.is_file():
        return {"run_id": "", "split": "test", "separation": Separation("not proven"), "origin": Origin()}, Rival()
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        champion = champion_from(facts["champion"])
        context = {
            "run_id": str(facts["run_id"]), "split": str(facts["split"]),
            "separation": separation_from(facts["separation"]), "origin": origin_from(facts.get("origin")),
        }  # fmt: skip
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidInput(
            f"not what a gate writes ({type(error).__name__})", expected=f"the {CONTEXT} of a gate's evaluation",
            where=str(path), next_step="fetch the evaluation again",
        ) from error  # fmt: skip
    stored = folder / CHAMPION
    return context, Rival(champion, Evaluation.load(stored) if champion.state == "compared" else None)


@contextmanager
def _workplace(folder: Path | None) -> Iterator[Path]:
    if folder is None:
        with TemporaryDirectory(prefix="kfp-gate-") as temporary:
            yield Path(temporary)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        yield folder
