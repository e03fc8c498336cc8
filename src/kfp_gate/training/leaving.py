"""A rank's way out when it fails: the others are told, evidence is left, and the process ends."""

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.timeline import Timeline
from kfp_gate.storage import open_store
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.device_clock import cuda_memory
from kfp_gate.training.evidence import (
    EXIT_BROKEN,
    LastLines,
    describe,
    exit_code,
    kind_of,
    message_of,
    write_failure,
)
from kfp_gate.training.group import PeerFailed
from kfp_gate.training.progress import FAILURE, say
from kfp_gate.training.ranks import Ranks
from kfp_gate.training.record import versions
from kfp_gate.training.redaction import redact
from kfp_gate.training.spec import TrainingSpec
from kfp_gate.training.timelines import Timelines, ends_of
from kfp_gate.training.tracking import Tracker, address_of
from kfp_gate.training.watch import BEAT_S, GRACE_S, Watch, end_process

log = logging.getLogger(__name__)

RUN_ID = "mlflow-run-id"
"""Under this name rank 0 shares its MLflow run with the others."""

EVIDENCE_S = 20.0
"""How long storing the evidence may take: the pod's end is near."""

EVIDENCE_BYTES = 8 << 20
"""What of the timeline goes with it: half a day's lines. All of them are on their way as `Timelines` sends them."""


@dataclass
class Held:
    """What a rank holds by now and a failure must take care of; None until it exists. Two of them are rank 0's."""

    watch: Watch | None = None
    timelines: Timelines | None = None
    tracker: Tracker | None = None
    checkpoints: Checkpoints | None = None


class Leaving:
    """Leaves the evidence once, from whichever thread meets the failure first."""

    def __init__(
        self, spec: TrainingSpec, ranks: Ranks, held: Held, *, timeline: Timeline, private: Path, checkpoint_uri: str
    ) -> None:
        """Made in the main thread, whose stack is shown if another thread ends the process."""
        self.spec, self.ranks, self.held = spec, ranks, held
        self.timeline, self.private, self.checkpoint_uri = timeline, private, checkpoint_uri
        self.lines = LastLines()
        self.lines.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger().addHandler(self.lines)
        self._failing = threading.Lock()
        self._main = threading.get_ident()

    @property
    def failing(self) -> bool:
        """Whether this rank is leaving its evidence."""
        return self._failing.locked()

    def fail_from_thread(self, error: BaseException) -> None:
        """The main thread may never come back: leave the evidence from here and end the process."""
        if not self._failing.acquire(blocking=False):
            return
        code = EXIT_BROKEN
        try:
            code = self._leave_evidence(error, thread=self._main)
        finally:
            # Whatever goes wrong here (a full disk, a closed standard output), the process must not stay and hang.
            end_process(code)

    def fail(self, error: BaseException) -> int:
        if not self._failing.acquire(blocking=False):
            threading.Event().wait(EVIDENCE_S * 2)
        return self._leave_evidence(error)

    def _leave_evidence(self, error: BaseException, *, thread: int | None = None) -> int:
        # First of all the others, so that they stop in seconds.
        if self.held.watch is not None and not isinstance(error, PeerFailed):
            self.held.watch.report(f"{type(error).__name__}: {message_of(error)}")
        facts = describe(error, thread=thread)
        memory = read_memory(group=find_control_group(), cuda=cuda_memory(), children=True)
        self.timeline.write("failure", failure=facts["kind"], message=facts["message"], **memory.values())
        text = write_failure(
            self._failure_file, rank=self.ranks.rank,
            node=self.timeline.identity["node"], phase=self.timeline.phase, memory=memory.values(),
            versions=versions(), settings=self.spec.settings(),
            last_lines=[redact(line) for line in self.lines.lines], **facts,
        )  # fmt: skip
        done = threading.Thread(target=self._store_evidence, args=(text, error), daemon=True)
        done.start()
        done.join(EVIDENCE_S)
        if kind_of(error) in ("user", "peer", "terminated", "unavailable"):
            log.error("\n%s", message_of(error))
        else:
            log.error("\n%s\n%s", facts["traceback"], message_of(error))
        say(FAILURE, rank=self.ranks.rank, kind=facts["kind"], message=facts["message"], peer=facts["peer"],
            phase=self.timeline.phase, exit_code=exit_code(error))  # fmt: skip
        if self.held.watch is not None:
            # Rank 0 holds the store in which the others read what happened.
            self.held.watch.leave(wait_s=2 * BEAT_S + GRACE_S)
        return exit_code(error)

    def _send_evidence(self) -> None:
        """The failure file of a rank without a tracker of its own, into the run that rank 0 opened."""
        run_id = self.held.watch.shared(RUN_ID) if self.held.watch is not None else ""
        if not run_id:
            return
        try:
            from mlflow import MlflowClient

            address = address_of(self.spec.tracking_uri)
            if address is not None:
                MlflowClient(address.uri).log_artifact(run_id, str(self._failure_file), "evidence")
        except Exception as problem:
            log.warning("the evidence did not reach MLflow: %s", type(problem).__name__)

    @property
    def _failure_file(self) -> Path:
        return self.private / f"failure-rank{self.ranks.rank}.json"

    def _store_evidence(self, text: str, error: BaseException) -> None:
        try:
            store = open_store(self.checkpoint_uri)
            store.write(f"evidence/failure-rank{self.ranks.rank}.json", text.encode())
            timeline = ends_of(self.timeline.path, EVIDENCE_BYTES)
            store.write(f"evidence/timeline-rank{self.ranks.rank}.jsonl", timeline)
            if self.held.tracker is not None:
                waiting = self.held.tracker.deliver_later()
                if waiting:
                    store.write("evidence/tracking-spool.jsonl", "\n".join(waiting).encode())
        except Exception as problem:
            log.warning("the evidence did not reach %s: %s", self.checkpoint_uri, type(problem).__name__)
        if self.held.timelines is not None:
            self.held.timelines.stop(EVIDENCE_S / 4)
        if self.ranks.rank != 0 and kind_of(error) != "peer":
            self._send_evidence()
        if self.held.tracker is not None:
            self.held.tracker.tag(**{"kfp_gate.failure": f"{kind_of(error)}: {message_of(error)}"})
            self.held.tracker.artifact(self._failure_file, "evidence")
            self.held.tracker.close(status="KILLED" if kind_of(error) == "terminated" else "FAILED", timeout_s=10)
