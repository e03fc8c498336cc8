"""The gate's own MLflow run: values, verdict and report, under the pipeline's run.

Names are mapped by `metric_names.to_mlflow`; what is not a finite number is a tag with its reason, since MLflow
stores infinity as 1.8e308, a number that passes every bound on the way back.
"""

import json
import logging
import math
import os
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kfp_gate.errors import KfpGateError
from kfp_gate.gate.verdict import read_verdict
from kfp_gate.metric_names import MLFLOW_NAME_LIMIT, to_mlflow
from kfp_gate.registry.artifacts import put_run_file
from kfp_gate.registry.pipeline_run import GATE, child_run
from kfp_gate.registry.tracking import PATIENCE, Tracking, connect
from kfp_gate.tracking_address import URI_VARIABLE

log = logging.getLogger(__name__)

BATCH = 900
"""MLflow takes 1000 metrics at once, and stores the first chunks even if a later one is refused."""

NAME_MAP = "metric-names.json"


def log_gate(
    verdict_path: Path,
    values: Mapping[str, Any],
    *,
    run_id: str,
    tracking_uri: str = "",
    experiment: str = "",
    report: Path | None = None,
    patience: float = PATIENCE,
) -> str:
    """Write the gate's results to its own run in MLflow; `record_outcome` reads the verdict there.

    Args:
        verdict_path: the verdict as stored.
        values: canonical metric name to a number, or to something else (a reason) for what was not computed.
        run_id: the pipeline run's id.

    Returns:
        The id of the MLflow run.

    Raises:
        InvalidInput, Unavailable, Broken: see `tracking.connect`.
    """
    verdict = read_verdict(verdict_path)
    tracking = connect(tracking_uri, experiment=experiment, patience=patience)
    run = child_run(tracking, run_id, GATE, "validation gate")
    client = tracking.client
    tags = {
        "sha256": str(verdict.model.get("sha256", "")),
        "kfp_gate.verdict": "passed" if verdict.passed else "refused",
        "kfp_gate.verdict_headline": verdict.headline[:5000],
        "kfp_gate.verdict_id": sha256(verdict_path.read_bytes()).hexdigest()[:16],
    }
    for key, value in tags.items():
        tracking.call("tagging the gate's run", client.set_tag, run, key, value)
    log_values(tracking, run, values)
    for path in (verdict_path, report):
        if path is not None and path.is_file():
            put_run_file(tracking, run, path)
    tracking.call("ending the gate's run", client.set_terminated, run, "FINISHED")
    return run


def keep_gate(
    verdict_path: Path, values: Mapping[str, Any], *, run_id: str, tracking_uri: str, experiment: str, report: Path
) -> None:
    """`log_gate` where a server is named, and a warning where it cannot be written to.

    A judged model is judged, whoever keeps the record: the verdict lies in the step's artifacts.
    """
    if not (tracking_uri or os.environ.get(URI_VARIABLE)):
        return
    try:
        log_gate(verdict_path, values, run_id=run_id, tracking_uri=tracking_uri, experiment=experiment, report=report)
    except KfpGateError as error:
        log.warning("the verdict was not written to MLflow: %s", error.found)


def log_values(tracking: Tracking, run: str, values: Mapping[str, Any], step: int = 0) -> None:
    """Log metrics under their MLflow names; the rest as one tag, and names that had to be changed as an artifact."""
    from mlflow.entities import Metric

    now = int(time.time() * 1000)
    finite, missing = split_finite(values)
    metrics = [Metric(to_mlflow(name), value, now, step) for name, value in finite.items()]
    for start in range(0, len(metrics), BATCH):
        tracking.call("logging metrics", tracking.client.log_batch, run, metrics[start : start + BATCH])
    if missing:
        text = json.dumps(missing)
        tracking.call(
            "tagging what was not computed", tracking.client.set_tag, run, "kfp_gate.not_computed", text[:5000]
        )
    renamed = {to_mlflow(name): name for name in values if to_mlflow(name) != name}
    if renamed:
        with TemporaryDirectory(prefix="kfp-gate-") as folder:
            path = Path(folder, NAME_MAP)
            path.write_text(json.dumps(renamed, indent=1), encoding="utf-8")
            put_run_file(tracking, run, path)
        if any(len(name) > MLFLOW_NAME_LIMIT for name in renamed.values()):
            log.info("names above %d characters were shortened; %s has the full ones", MLFLOW_NAME_LIMIT, NAME_MAP)


def split_finite(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """Numbers that MLflow can hold, as Python floats, and for all else the reason why not.

    numpy's numbers are numbers; a bool or a text that looks like a number is not.
    """
    finite: dict[str, float] = {}
    missing: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, bool | str) or type(value).__name__ in ("bool_", "bool"):
            missing[name] = str(value) if isinstance(value, str) else f"{value!r} is not a number"
            continue
        try:
            number = float(value)
        except (TypeError, ValueError):
            missing[name] = str(getattr(value, "reason", value))
            continue
        if math.isfinite(number):
            finite[name] = number
        else:
            missing[name] = f"not finite ({number})"
    return finite, missing
