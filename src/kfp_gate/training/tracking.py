"""Metrics to MLflow, from rank 0, in a thread of their own.

Everything is written to a spool file first and delivered from there: a server that is down at the start, in the
middle or for good never stops training, and what was not delivered is counted and kept. One bad or non-finite
value never costs the others: names go through the exact map, values are checked here, and a batch that the server
refuses is sent again in halves until the culprit stands alone.
"""

import json
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kfp_gate import metric_names
from kfp_gate.tracking_address import Address, resolve
from kfp_gate.training.delivery import Delivery, send_batch, short

log = logging.getLogger(__name__)

BATCH = 500
"""Metrics per call; MLflow's limit is 1000, and a larger call is written in part before a bad name is found."""

BACKOFF_S = (1.0, 2.0, 5.0, 10.0, 30.0)
TAG_LIMIT = 5000

PIPELINE_RUN_TAG, ROLE_TAG, PARENT_TAG = "kfp_gate.pipeline_run", "kfp_gate.role", "mlflow.parentRunId"
"""The tags by which the steps of a pipeline run find each other's MLflow runs; the same as the registration's."""


def address_of(uri: str) -> Address | None:
    """The server that a training may send values and credentials to; None without tracking.

    Args:
        uri: as the training was given it; empty: the environment's.

    Raises:
        InvalidInput: see `kfp_gate.tracking_address.resolve`.
    """
    return resolve(uri) if uri.strip() or os.environ.get("MLFLOW_TRACKING_URI", "").strip() else None


class Tracker:
    """The MLflow run of a training. Without a tracking URI it keeps nothing and says nothing."""

    def __init__(
        self, *, uri: str, experiment: str, spool: Path, run_id: str = "", name: str = "training",
        params: Mapping[str, Any] | None = None, tags: Mapping[str, str] | None = None,
        on_open: Callable[[str], None] = lambda _run_id: None,
    ) -> None:  # fmt: skip
        """Start delivering.

        Args:
            uri: the server, or sqlite:///file; empty: MLFLOW_TRACKING_URI, else no tracking.
            experiment: made if missing.
            spool: a file that grows by what is logged.
            run_id: a run to continue; empty: one is made as soon as the server answers.
            name: the run's name.
            params: logged once.
            tags: set once.
            on_open: called once with the run's id, from the delivering thread.

        Raises:
            InvalidInput: a server to which nothing may be sent.
        """
        self._on_open = on_open
        address = address_of(uri)
        self.uri = address.uri if address is not None else ""
        self._injected = address.injected_run if address is not None else ""
        self.experiment, self.run_id, self.name, self.spool = experiment, run_id, name, spool
        self.delivery = Delivery()
        self._params, self._tags = dict(params or {}), {k: str(v) for k, v in (tags or {}).items()}
        self._queue: deque[tuple[str, Any]] = deque()
        self._lock = threading.Lock()
        self._wake, self._done = threading.Event(), threading.Event()
        self._client: Any = None
        self._opened = False
        self._away = False
        self._thread: threading.Thread | None = None
        self._names: dict[str, str] = {}
        if self.uri:
            # The defaults (7 retries, 120 s each) would hold the end of a training for minutes.
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
            os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
            os.environ.setdefault("MLFLOW_ENABLE_ASYNC_LOGGING", "false")
            os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
            os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
            os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
            self._thread = threading.Thread(target=self._deliver, name="kfp-gate-tracking", daemon=True)
            self._thread.start()

    @property
    def active(self) -> bool:
        return self._thread is not None

    @property
    def ready(self) -> bool:
        """Whether the run is open and the server answered last."""
        return self.active and self._opened and not self._away

    def log(self, values: Mapping[str, float | None], *, step: int) -> None:
        """Log values under their canonical names. None ("not computed") is left out; never raises."""
        if not self.active:
            return
        now = int(time.time() * 1000)
        rows = []
        for name, value in values.items():
            if value is None:
                continue
            try:
                number = float(value)
            except (TypeError, ValueError):
                number = math.nan
            if not math.isfinite(number):
                self.delivery.not_finite[name] = self.delivery.not_finite.get(name, 0) + 1
                continue
            key = metric_names.to_mlflow(name)
            self._names[key] = name
            rows.append((key, number, now, step))
        self._add(("metrics", rows))

    def tag(self, **tags: str) -> None:
        """Set tags; a value is cut at 5000 characters."""
        if self.active:
            self._add(("tags", {k: str(v)[:TAG_LIMIT] for k, v in tags.items()}))

    def artifact(self, path: Path, folder: str = "training") -> None:
        """Upload a file beside the run."""
        if self.active:
            self._add(("artifact", (str(path), folder)))

    def send_file(self, path: Path, folder: str = "training") -> bool:
        """Upload a file in the caller's thread, past all values that wait.

        Returns:
            False where the run is not open, the server is away, or does not take it. Never raises.
        """
        if not self.ready:
            return False
        try:
            self._client.log_artifact(self.run_id, str(path), folder)
        except Exception as error:
            # Whatever the client raises: a server without room for files still takes values.
            log.debug("tracking: %s was not taken: %s", path.name, short(error))
            return False
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is delivered; False if something still waits after the timeout."""
        deadline = time.monotonic() + timeout_s
        self._wake.set()
        while self._queue and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self._queue

    def close(self, *, status: str, timeout_s: float = 30.0) -> Delivery:
        """End the run and say what was lost. The spool file stays where something was not delivered."""
        if not self.active:
            return self.delivery
        shortened = {k: n for k, n in self._names.items() if k != n}
        if shortened:
            # Values are found again by their real names, also those that were too long for MLflow.
            self.tag(**{"kfp_gate.metric_names": json.dumps(shortened, ensure_ascii=False)[:TAG_LIMIT]})
        self._add(("end", status))
        # A server that is known to be away is not waited for in full: the values are safe in the spool.
        self.flush(timeout_s / 3 if self._away else timeout_s)
        self._done.set()
        self._wake.set()
        with self._lock:
            self.delivery.waiting = sum(len(p) if k in ("metrics", "tags") else 1 for k, p in self._queue)
        if self.delivery.waiting:
            log.warning("tracking: %s. Kept in %s", self.delivery.text(), self.spool)
        elif self.spool.exists() and not self.delivery.refused:
            self.spool.unlink(missing_ok=True)
        return self.delivery

    def deliver_later(self) -> list[str]:
        """The spool's lines that were not delivered, for storage."""
        with self._lock:
            return [json.dumps(item, ensure_ascii=False) for item in self._queue]

    def _add(self, item: tuple[str, Any]) -> None:
        with self._lock:
            self._queue.append(item)
        try:
            with self.spool.open("a", encoding="utf-8") as handle:
                handle.write(json.dumps(item, ensure_ascii=False) + "\n")
        except OSError as error:
            log.debug("the spool could not be written: %s", error)
        self._wake.set()

    def _deliver(self) -> None:
        failures = 0
        while not self._done.is_set():
            self._wake.wait(1.0)
            self._wake.clear()
            while self._queue and not self._done.is_set():
                try:
                    self._open()
                    with self._lock:
                        item = self._queue[0]
                    self._send(item)
                except Exception as error:
                    # Whatever the client raises: tracking is never worth a training.
                    self.delivery.last_error = short(error)
                    if failures == 0:
                        log.warning("tracking: no answer now (%s); values are kept", short(error))
                    self._done.wait(BACKOFF_S[min(failures, len(BACKOFF_S) - 1)])
                    failures += 1
                    self._away = True
                    continue
                if failures:
                    log.info("tracking: the server answers again")
                failures, self._away = 0, False
                with self._lock:
                    self._queue.popleft()

    def _open(self) -> None:
        if self._opened:
            return
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        if self._client is None:
            self._client = MlflowClient(self.uri)
        if not self.run_id:
            found = self._client.get_experiment_by_name(self.experiment)
            try:
                experiment = found.experiment_id if found else self._client.create_experiment(self.experiment)
            except MlflowException:
                # Another pipeline made it in between.
                experiment = self._client.get_experiment_by_name(self.experiment).experiment_id
            tags = {"mlflow.runName": self.name, **self._tags, **self._parent(experiment)}
            self.run_id = self._client.create_run(experiment, tags=tags).info.run_id
        else:
            self._client.update_run(self.run_id, status="RUNNING")
            for key, value in self._tags.items():
                self._client.set_tag(self.run_id, key, value)
        self._opened = True
        self._on_open(self.run_id)
        self._send(("params", self._params))

    def _parent(self, experiment: str) -> dict[str, str]:
        """The run of the whole pipeline: the one KFP opened, or the one an earlier step left under the same tag."""
        if self._injected:
            return {PARENT_TAG: self._injected}
        pipeline = self._tags.get(PIPELINE_RUN_TAG, "")
        if not pipeline or "'" in pipeline:
            return {}
        found = self._client.search_runs(
            [experiment], f"tags.`{PIPELINE_RUN_TAG}` = '{pipeline}' and tags.`{ROLE_TAG}` = 'pipeline'", max_results=50
        )
        first = min(found, key=lambda run: (run.info.start_time, run.info.run_id), default=None)
        return {PARENT_TAG: first.info.run_id} if first is not None else {}

    def _send(self, item: tuple[str, Any]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        kind, payload = item
        send = partial(send_batch, self._client, self.run_id, self.delivery)
        if kind == "metrics":
            for start in range(0, len(payload), BATCH):
                send_batch(
                    self._client,
                    self.run_id,
                    self.delivery,
                    "metrics",
                    [Metric(*row) for row in payload[start : start + BATCH]],
                )
        elif kind == "params":
            rows = [Param(k, str(v)[:6000]) for k, v in payload.items()]
            for start in range(0, len(rows), 100):
                send("params", rows[start : start + 100])
        elif kind == "tags":
            send("tags", [RunTag(k, v) for k, v in payload.items()])
        elif kind == "artifact":
            path, folder = payload
            if Path(path).is_file():
                self._client.log_artifact(self.run_id, path, folder)
        elif kind == "end":
            self._client.set_terminated(self.run_id, status=payload)
