"""One job from its creation to its end: every rank's log, every wait explained, and how it ended."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kfp_gate.launching.api import Api, Away, Refused, denied
from kfp_gate.launching.causes import NEXT_CHECK, Seen, explain, with_cause
from kfp_gate.launching.events import creation_failures, pod_events
from kfp_gate.launching.kinds import JobState, Kind
from kfp_gate.launching.logs import Follower
from kfp_gate.launching.outcome import Outcome, RankEnd
from kfp_gate.launching.output import writer
from kfp_gate.launching.pod_watch import PodWatch
from kfp_gate.launching.pods import Pod, ending, seconds
from kfp_gate.launching.waits import GaveUp, Patience, Waits
from kfp_gate.launching.worker_lines import MACHINE_PREFIXES, ProgressReport, WorkerLines
from kfp_gate.launching.worker_pod import JobRequest


@dataclass
class Rank:
    """One pod of the job, followed."""

    pod: Pod
    number: int
    follower: Follower
    thread: threading.Thread
    lines: WorkerLines = field(default_factory=WorkerLines)


class Following:
    """Follows one attempt. `run` returns its outcome; the model is still in storage then."""

    def __init__(
        self, api: Api, kind: Kind, request: JobRequest, *, say: Callable[[str], None] | None = None,
        beat: Callable[[], None] = lambda: None, patience: Patience | None = None,
    ) -> None:  # fmt: skip
        self.api, self.kind, self.request, self.patience = api, kind, request, patience or Patience()
        self.options = request.options
        self.say_lines = writer(say)
        self.beat = beat
        self.job_text = f"{kind.name} {request.namespace}/{request.name}"
        self.watch = PodWatch(api, request.namespace, kind.selector(request.name), self._pod)
        self.ranks: dict[str, Rank] = {}
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.report = ProgressReport(self._say, self.patience.say)
        self.job: dict[str, Any] = {}
        self.state: tuple[JobState, str, str] = ("running", "", "")
        self.job_gone = False
        self.waits = Waits(self.patience, self.options.pending_seconds, self.job_text, self._say)
        self._poll_at = 0.0
        self._refused_since = 0.0
        self._ending_since = 0.0
        self._ended_stragglers = False
        self._listed_after_end = False

    def run(self) -> Outcome:
        """Until the job has ended and its logs are read.

        Raises:
            Unavailable: the API server stayed away.
            InvalidInput: pods or job may not be read.
        """
        self.watch.start()
        try:
            while True:
                self.beat()
                self._follow_new_pods()
                self._poll_job()
                if gave_up := self._look_at_waits():
                    return self._give_up(gave_up)
                if self._deadline_passed():
                    return self._deadline()
                if self._ended():
                    return self._outcome()
                self.watch.changed.wait(0.5)
                self.watch.changed.clear()
        finally:
            self.stop.set()
            self.watch.stop.set()

    # -- what is going on ------------------------------------------------------------------------------

    def _pod(self, body: dict[str, Any]) -> Pod:
        meta = body.get("metadata", {})
        rank = self.kind.rank_of(meta.get("labels") or {}, self.options)
        return Pod(str(meta.get("name", "")), str(meta.get("uid", "")), rank, body, self.kind.container)

    def _follow_new_pods(self) -> None:
        if self.watch.denied is not None and self.watch.denied.status in (401, 403) and not self.watch.listed.is_set():
            raise denied(self.watch.denied, "listing the job's pods", self.watch.path)
        for pod, _gone in self.watch.pods():
            if pod.rank is None:
                continue
            if pod.uid in self.ranks:
                self.ranks[pod.uid].pod = pod
                continue
            follower = Follower(
                self.api, self.request.namespace, pod, lambda p=pod: self.watch.read(p.name, p.uid),  # type: ignore[misc]
                lambda lines, uid=pod.uid: self._lines(uid, lines), self.stop,  # type: ignore[misc]
                note=lambda text, n=pod.rank: self._say(f"[rank {n}] -- {text} --"),  # type: ignore[misc]
            )  # fmt: skip
            thread = threading.Thread(target=follower.run, name=f"follow-{pod.name}", daemon=True)
            self.ranks[pod.uid] = Rank(pod, pod.rank, follower, thread)
            thread.start()

    def _lines(self, uid: str, raw: list[bytes]) -> None:
        rank = self.ranks[uid]
        prefix = f"[rank {rank.number}] "
        shown = []
        for line in raw:
            text = line.decode("utf-8", errors="replace").rstrip("\r")
            rank.lines.feed(text)
            if text and not text.startswith(MACHINE_PREFIXES):
                shown.append(prefix + text)
        if shown:
            with self.lock:
                self.say_lines(shown)

    def _poll_job(self) -> None:
        now = time.monotonic()
        for rank in list(self.ranks.values()):
            if rank.number == 0:
                self.report.update(rank.lines, now)
        if now < self._poll_at:
            return
        self._poll_at = now + self.patience.poll
        path = self.kind.path(self.request.namespace, self.request.name)
        try:
            self.job = self.api.call("GET", path, while_waiting=self.beat)
            self.state = self.kind.state(self.job)
            self._refused_since = 0.0
        except Refused as refused:
            if refused.status == 404 and refused.reason == "NotFound":
                self.job_gone = True
                return
            # A job that was read before is not given up for one refusal: tokens are renewed and servers start again,
            # and a server that starts may not know this kind of job yet (a 404 without the Status of one).
            self._refused_since = self._refused_since or now
            if not self.job or refused.status not in (401, 403, 404) or now - self._refused_since > self.patience.start:
                raise denied(refused, f"reading {self.job_text}", path) from None

    def _look_at_waits(self) -> GaveUp | None:
        if self.job_gone:
            return None
        pods = [pod for pod, gone in self.watch.pods() if not gone]
        made = bool(self.watch.pods()) or not self.watch.listed.is_set()
        return self.waits.look(
            pods, self.state, made, lambda: creation_failures(self.api, self.request.namespace, self.request.name)
        )

    def _say(self, text: str) -> None:
        with self.lock:
            self.say_lines([text])

    # -- waits -------------------------------------------------------------------------------------------

    def _give_up(self, gave_up: GaveUp) -> Outcome:
        """Delete a job that does not start: later, without a launcher, nobody would want it to."""
        evidence = gave_up.evidence
        if gave_up.rank is not None:
            evidence += tuple(self._pod_events(gave_up.rank))
        self._delete_job()
        ends = tuple(_rank_end(item) for item in sorted(self.ranks.values(), key=lambda item: item.number))
        return Outcome(
            "failed", gave_up.cause, gave_up.rank, gave_up.summary, evidence, NEXT_CHECK[gave_up.cause], ends, None,
            self.job_text,
        )  # fmt: skip

    def _pod_events(self, rank: int | None) -> list[str]:
        uids = [item.pod.uid for item in self.ranks.values() if item.number == rank]
        return [text for uid in uids for text in pod_events(self.api, self.request.namespace, uid)]

    # -- the end -----------------------------------------------------------------------------------------

    def _deadline_passed(self) -> bool:
        created = seconds(self.job.get("metadata", {}).get("creationTimestamp"))
        limit = self.options.deadline_seconds
        return bool(limit and created and time.time() - created > limit and self.state[0] == "running")

    def _deadline(self) -> Outcome:
        outcome = self._explain()
        self._delete_job()
        return with_cause(
            outcome,
            "deadline",
            f"{self.job_text} was stopped: its deadline of {self.options.deadline_seconds} s passed",
        )

    def _current(self) -> list[tuple[Pod, bool]]:
        """The newest pod of each rank, with whether it is gone: a job that was queued again gets new ones."""
        newest: dict[int, tuple[Pod, bool]] = {}
        for pod, gone in self.watch.pods():
            if pod.rank is not None and (pod.rank not in newest or pod.created >= newest[pod.rank][0].created):
                newest[pod.rank] = (pod, gone)
        return [newest[rank] for rank in sorted(newest)]

    def _ended(self) -> bool:
        """Whether there is nothing left to wait for."""
        pods = self._current()
        settled = {pod.rank for pod, gone in pods if gone or pod.finished}
        all_settled = self.watch.listed.is_set() and len(settled) >= self.options.nodes
        if self.state[0] == "suspended" and not self.job_gone:
            return False  # a queue took its pods back, and will give it new ones
        final = self.job_gone or self.state[0] in ("succeeded", "failed")
        broken = any(not gone and pod.finished and pod.phase != "Succeeded" for pod, gone in pods)
        if not final and not all_settled and not broken:
            self._ending_since = 0.0
            return False
        now = time.monotonic()
        self._ending_since = self._ending_since or now
        if final and not self._listed_after_end:
            # The job's end may be known before the watch has told of its pods: list them once more.
            try:
                self.watch.refresh()
            except (Away, Refused):
                return False
            self._listed_after_end = True
            self._follow_new_pods()
            pods = self._current()
        waited = now - self._ending_since
        running = [pod for pod, gone in pods if not gone and not pod.finished]
        if running and waited > self.patience.stragglers and not self._ended_stragglers:
            # A rank that waits in a collective for a dead one would wait for its whole timeout.
            self._ended_stragglers = True
            for pod in running:
                self._delete(f"/api/v1/namespaces/{self.request.namespace}/pods/{pod.name}")
        read = self.watch.listed.is_set() and not any(rank.thread.is_alive() for rank in self.ranks.values())
        if not read and waited < self.patience.drain + self.patience.stragglers:
            return False
        # The controller's word may come later than the pods' ends; without one the pods decide.
        return final or waited > self.patience.settle

    def _outcome(self) -> Outcome:
        pods = self._current()
        codes = [self._code(pod) for pod, _ in pods]
        all_well = len(pods) >= self.options.nodes and all(code == 0 for code in codes)
        claimed = self.state[0] == "succeeded" and not any(code for code in codes if code is not None)
        unfinished = any(not gone and not pod.finished for pod, gone in pods)
        if (all_well and self.state[0] != "failed") or (claimed and not unfinished):
            ends = tuple(RankEnd(pod.rank or 0, self._code(pod), ending(pod)[2], "none") for pod, _ in pods)
            return Outcome("succeeded", ranks=ends, job=self.job_text, summary=f"{self.job_text}: all ranks ended well")
        outcome = self._explain()
        if self.state[1] == "DeadlineExceeded":
            return with_cause(outcome, "deadline", f"{self.job_text} was stopped: {self.state[2] or 'deadline'}")
        if self.job_gone and outcome.cause in ("unknown", "pods-deleted", "killed"):
            return with_cause(outcome, "job-deleted", f"{self.job_text} was deleted while it was followed")
        return outcome

    def _code(self, pod: Pod) -> int | None:
        rank = self.ranks.get(pod.uid)
        code = ending(pod)[1]
        if code is None and rank is not None:
            code = rank.lines.end.get("exit_code")
        return code

    def _explain(self) -> Outcome:
        seen: list[Seen] = []
        displaced: list[int] = []
        for pod, gone in self._current():
            rank = self.ranks.get(pod.uid)
            if rank is None:
                continue
            cause, _, ended_at, evidence = ending(pod)
            code = self._code(pod)
            taken = cause is None and (gone or pod.deleting or not pod.finished)
            own_end = code not in (None, 143, 137) and not rank.lines.end.get("reason")
            if taken and not own_end:
                displaced.append(len(seen))
            seen.append(Seen(rank.number, code, ended_at, rank.lines, cause, evidence))
        failed = [n for n, one in enumerate(seen) if n not in displaced and (one.exit_code or one.cause)]
        for n in displaced:
            one = seen[n]
            if failed:
                seen[n] = Seen(one.rank, one.exit_code, one.ended_at, one.lines, None, one.evidence, True)
            else:
                seen[n] = Seen(one.rank, one.exit_code, one.ended_at, one.lines, "pods-deleted", one.evidence)
        outcome = explain(seen, job=self.job_text)
        if displaced and not failed:
            outcome = with_cause(outcome, "pods-deleted", f"the pods of {self.job_text} were deleted while they ran")
        more = tuple(self._pod_events(outcome.first_failed_rank))
        if self.state[0] == "failed" and (self.state[1] or self.state[2]):
            more = (*more, f"{self.kind.name} condition Failed: {self.state[1]}: {self.state[2]}")
        return with_evidence(outcome, more)

    def _delete_job(self) -> None:
        self._delete(self.kind.path(self.request.namespace, self.request.name))

    def _delete(self, path: str) -> None:
        try:
            self.api.once("DELETE", path, query={"propagationPolicy": "Background"})
        except (Refused, Away) as error:
            with self.lock:
                self.say_lines([f"could not delete {path}: {error}"])


def with_evidence(outcome: Outcome, more: tuple[str, ...]) -> Outcome:
    """The same outcome with observations added."""
    from dataclasses import replace

    return replace(outcome, evidence=outcome.evidence + more)


def _rank_end(rank: Rank) -> RankEnd:
    return RankEnd(rank.number, None, None, "none", (), tuple(rank.lines.last)[-6:], True)
