"""The gate's whole path on a few images, in the gate's own image and on its own device, before training.

A training usually dies in validation: in a library that training never imports, under a name that something refuses.
So the path is walked now: every module that the gate reaches is imported, and the base model with the data set's
classes is evaluated, judged and reported on. The verdict does not matter; a failure names the part.
"""

import importlib
import logging
import pkgutil
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from kfp_gate.data.manifest import Manifest, box_columns, write_manifest
from kfp_gate.errors import KfpGateError
from kfp_gate.gate.settings import GateSettings
from kfp_gate.preflight.checks import Check, error, from_error, ok

log = logging.getLogger(__name__)

ROOMS = ("kfp_gate.evaluation", "kfp_gate.gate")

PARTS: Mapping[str, str] = {
    "data/materialize": "images", "evaluation/letterbox": "images", "evaluation/predict": "predict",
    "evaluation/torch_model": "predict", "evaluation/onnx_model": "predict", "evaluation/suppression": "predict",
    "evaluation/batches": "predict", "evaluation/records": "records", "evaluation/matching": "records",
    "evaluation/columns": "records", "evaluation/metrics": "metrics", "evaluation/slices": "metrics",
    "evaluation/evaluate": "evaluation", "gate/criteria": "criteria", "gate/settings": "criteria",
    "gate/report": "report", "pages": "report", "training/untrained": "base model", "training/base_model": "base model",
}  # fmt: skip
"""Which part of the path a module of ours belongs to; the other modules of the gate are its `verdict`."""

WHY = "the gate would break after the training, and the training would be lost time"


def try_gate(
    base_model: str, train: Manifest, gate: GateSettings, *, image_size: int, batch: int, count: int = 8
) -> list[Check]:
    """Evaluate, judge and report on a few train images with the untrained base model.

    Args:
        base_model: as for the training.
        train: images are taken from here: the test set is not looked at before the gate.
        gate: the gate's settings; champion and waivers are left out, and separation is not asked for.
        image_size, batch: of the prediction.
        count: images, spread over the split, those with objects first.

    Returns:
        One check: fine, or an error that names the part that broke.
    """
    if broken := import_all():
        return broken
    try:
        with TemporaryDirectory(prefix="kfp-gate-try-") as folder:
            text = _walk(Path(folder), base_model, train, gate, image_size, batch, count)
    except KfpGateError as problem:
        part = part_of(problem)
        return [replace(c, what=f"the gate's path breaks in {part}: {c.what}") for c in from_error(problem, why=WHY)]
    except Exception as problem:
        log.exception("the gate's path broke")
        said = (str(problem).splitlines() or [""])[0][:300]
        what = f"the gate's path breaks in {part_of(problem)}: {type(problem).__name__}: {said}"
        return [error(what, why=WHY, cure="see the traceback in the step's log; check the image and the GPU driver")]
    return [ok(text)]


def import_all() -> list[Check]:
    """Import every module of the rooms that the gate runs in; a check per module that cannot be."""
    checks = []
    for room in ROOMS:
        package = importlib.import_module(room)
        for module in pkgutil.iter_modules(package.__path__, f"{room}."):
            try:
                importlib.import_module(module.name)
            except Exception as problem:  # a broken shared library raises OSError, a wrong build RuntimeError
                what = f"{module.name} cannot be imported: {type(problem).__name__}: {problem}"
                checks.append(
                    error(what, why=WHY, cure="use the gate's image of this release, or lock and build it again")
                )
    return checks


def part_of(problem: BaseException) -> str:
    """The part of the path in which an exception arose: that of the innermost module of ours."""
    for frame in reversed(traceback.extract_tb(problem.__traceback__)):
        path = Path(frame.filename).with_suffix("").as_posix()
        _, found, module = path.rpartition("kfp_gate/")
        if not found or module.startswith("preflight/"):
            continue
        if module in PARTS:
            return PARTS[module]
        if module.startswith("gate/") and module != "gate/run":
            return "verdict"
    return "setting up"


def sample(train: Manifest, count: int) -> Manifest:
    """At most `count` images, evenly spread over those with objects; filled up with others if those do not suffice."""
    offsets, _, _ = box_columns(train.table)
    sizes = np.diff(offsets)
    with_objects, without = np.flatnonzero(sizes > 0), np.flatnonzero(sizes == 0)
    chosen = with_objects[np.unique(np.linspace(0, len(with_objects) - 1, min(count, len(with_objects))).astype(int))]
    chosen = np.sort(np.concatenate([chosen, without[: count - len(chosen)]]))
    return replace(train, table=train.table.take(chosen), split="test")


def _walk(
    folder: Path, base_model: str, train: Manifest, gate: GateSettings, image_size: int, batch: int, count: int
) -> str:
    from kfp_gate.evaluation.predict import PredictSettings
    from kfp_gate.gate.run import GateOutputs, validate
    from kfp_gate.training.base_model import resolve
    from kfp_gate.training.untrained import write_untrained

    weights = folder / "untrained.pt"
    write_untrained(resolve(base_model, folder), train.classes, weights)
    few = sample(train, count)
    write_manifest(few, folder / "few.parquet")
    settings = replace(
        gate, champion="", waivers=(), allow_unproven_separation=True, resamples=min(gate.resamples, 100)
    )
    out = GateOutputs(folder / "evaluation", folder / "verdict.json", folder / "report.html", folder / "work")
    validate(
        weights, folder / "few.parquet", settings, out,
        predict=PredictSettings(image_size=image_size, batch=max(1, min(batch, len(few)))),
    )  # fmt: skip
    size = out.report.stat().st_size
    return f"the gate's path holds: {len(few)} train images predicted, judged and reported ({size} bytes of report)"
