"""Values on their way to the tracking server: one call, a spool that is delivered later, and what became of them."""

import json
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kfp_gate.training.redaction import redact

log = logging.getLogger(__name__)


@dataclass
class Delivery:
    """What happened to the values: delivered, refused by the server for good, never a number, still waiting."""

    delivered: int = 0
    refused: dict[str, str] = field(default_factory=dict)
    not_finite: dict[str, int] = field(default_factory=dict)
    waiting: int = 0
    last_error: str = ""

    def text(self) -> str:
        parts = [f"{self.delivered} values delivered"]
        if self.waiting:
            parts.append(f"{self.waiting} not delivered ({self.last_error})")
        if self.refused:
            parts.append(f"refused: {', '.join(sorted(self.refused))}")
        if self.not_finite:
            parts.append(f"not finite: {', '.join(sorted(self.not_finite))}")
        return "; ".join(parts)


def send_batch(client: Any, run_id: str, delivery: Delivery, kind: str, rows: list[Any]) -> None:
    """Send metrics, params or tags; what the server refuses is sent again in halves until the culprit stands alone.

    Args:
        client: an MlflowClient.
        run_id: the run to write to.
        delivery: counts what arrived and what was refused.
        kind: "metrics", "params" or "tags".
        rows: MLflow's entities.

    Raises:
        MlflowException: the server is away.
    """
    from mlflow.exceptions import MlflowException

    if not rows:
        return
    try:
        client.log_batch(run_id, **{kind: rows})
    except MlflowException as error:
        if not _is_refusal(error):
            raise
        if len(rows) == 1:
            delivery.refused[rows[0].key] = short(error)
            log.warning("tracking: the server refused %r: %s", rows[0].key, short(error))
            return
        middle = len(rows) // 2
        send_batch(client, run_id, delivery, kind, rows[:middle])
        send_batch(client, run_id, delivery, kind, rows[middle:])
        return
    if kind == "metrics":
        delivery.delivered += len(rows)


def deliver_spool(spool: Path, *, uri: str, experiment: str, run_id: str = "", timeout_s: float = 120.0) -> Delivery:
    """Deliver later what a training could not: a `tracking-spool.jsonl` as a worker leaves it, here or in storage.

    Args:
        spool: one item a line.
        uri: the server.
        experiment: used if there is no run yet.
        run_id: the run to write to; empty: a new one. Values that are there already are not doubled by MLflow, which
            keys them by name, step, time and value.
        timeout_s: how long to wait.

    Returns:
        What was delivered, refused, and is still waiting.

    Raises:
        InvalidInput: a server to which nothing may be sent.
    """
    from kfp_gate.training.tracking import Tracker

    with tempfile.TemporaryDirectory() as folder:
        tracker = Tracker(uri=uri, experiment=experiment, run_id=run_id, spool=Path(folder, "spool.jsonl"))
        ended = "FINISHED"
        for line in spool.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                kind, payload = json.loads(line)
            except (TypeError, ValueError):
                continue  # the last line of a process that was killed
            if kind == "end":
                ended = str(payload)
            elif kind != "artifact":
                # Files of the machine that is gone cannot be sent any more.
                tracker._add((kind, payload))
        return tracker.close(status=ended, timeout_s=timeout_s)


def _is_refusal(error: Any) -> bool:
    """The server understood and said no: sending it again changes nothing. All else is an outage."""
    return getattr(error, "error_code", "") in ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "RESOURCE_ALREADY_EXISTS")


def short(error: BaseException) -> str:
    """An error in a line, without what looks like a credential."""
    return redact(f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")[:300]
