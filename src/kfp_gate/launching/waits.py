"""Pods that do not run: said in the cluster's own words while it lasts, given up when it cannot get better."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kfp_gate.launching.kinds import JobState
from kfp_gate.launching.outcome import Cause
from kfp_gate.launching.pods import HOPELESS_REASONS, Pod, waiting


@dataclass(frozen=True)
class Patience:
    """Seconds. How long each thing may take before it is said, or given up."""

    poll: float = 5.0
    say: float = 60.0
    start: float = 300.0
    settle: float = 120.0
    drain: float = 120.0
    stragglers: float = 30.0
    no_pods: float = 30.0


@dataclass(frozen=True)
class GaveUp:
    """Why a job is not waited for any longer."""

    cause: Cause
    rank: int | None
    summary: str
    evidence: tuple[str, ...]


REASONS: dict[Cause, str] = {
    "image-pull": "its image could not be pulled",
    "unschedulable": "no node takes it",
    "container-start": "its container could not be created",
    "quota": "the namespace's quota is used up",
}


class Waits:
    """Since when each pod waits, and what was said of it."""

    def __init__(self, patience: Patience, pending_seconds: float, job_text: str, say: Callable[[str], None]) -> None:
        self.patience, self.pending, self.job_text, self.say = patience, pending_seconds, job_text, say
        self._said: dict[str, tuple[str, float]] = {}
        self._since: dict[str, float] = {}

    def look(
        self, pods: Sequence[Pod], state: tuple[JobState, str, str], made: bool, failures: Callable[[], list[str]]
    ) -> GaveUp | None:
        """One look at the pods that are there.

        Args:
            pods: those that are not gone.
            state: of the job. A suspended one waits in its queue, for as long as it takes.
            made: whether any pod was ever made, as far as is known.
            failures: asked when there is none: why.
        """
        now = time.monotonic()
        if state[0] == "suspended":
            self._now_and_then("job", f"{self.job_text} waits in its queue: {state[2] or 'suspended'}")
            self._since.clear()
            return None
        if state[0] != "running":
            return None
        current = [(pod, reason) for pod in pods if (reason := waiting(pod))]
        kept = {pod.uid for pod, _ in current} | (set() if made else {"job"})
        self._since = {key: since for key, since in self._since.items() if key in kept}
        for pod, (cause, text) in current:
            since = self._since.setdefault(pod.uid, now)
            who = f"rank {pod.rank}" if pod.rank is not None else pod.name
            self._now_and_then(pod.uid, f"{who} waits ({cause if cause != 'unknown' else 'starting'}): {text}")
            limit = self.patience.start if cause in ("image-pull", "container-start") else self.pending
            if text.split(":")[0] in HOPELESS_REASONS or now - since > limit:
                return self._gave_up(cause, pod.rank, f"{who} never started", (text,), now - since)
        if made:
            return None
        since = self._since.setdefault("job", now)
        if now - since > self.patience.no_pods:
            found = failures()
            self._now_and_then("job", f"{self.job_text} has no pods yet: {'; '.join(found) or 'no reason known'}")
            if now - since > self.pending:
                cause = "quota" if any("quota" in text for text in found) else "unknown"
                return self._gave_up(cause, None, f"{self.job_text} never got its pods", tuple(found), now - since)
        return None

    def _gave_up(self, cause: Cause, rank: int | None, what: str, evidence: tuple[str, ...], waited: float) -> GaveUp:
        text = f"{what}: {REASONS.get(cause, 'no reason is known')} (waited {waited:.0f} s)"
        return GaveUp(cause, rank, text, evidence)

    def _now_and_then(self, key: str, text: str) -> None:
        """At once when it is news, else once a minute."""
        said, at = self._said.get(key, ("", float("-inf")))
        now = time.monotonic()
        if text != said or now - at >= self.patience.say:
            self._said[key] = (text, now)
            self.say(text)
