"""How a launch ended: one value, whatever the backend, that says who failed first, why, and how we know."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kfp_gate.errors import Broken, InvalidInput, KfpGateError, Unavailable

Cause = Literal[
    "none",
    "invalid-input",
    "service-unavailable",
    "exception",
    "out-of-memory",
    "gpu-out-of-memory",
    "killed",
    "child-killed",
    "collective-timeout",
    "peer-lost",
    "evicted",
    "preempted",
    "node-lost",
    "deadline",
    "image-pull",
    "container-start",
    "unschedulable",
    "quota",
    "pods-deleted",
    "job-deleted",
    "launcher-lost",
    "no-model",
    "exit-code",
    "unknown",
]
"""What ended the first failed rank. `unknown` is a finding of its own: no evidence fits a named cause."""

RESTARTABLE: frozenset[Cause] = frozenset({"evicted", "preempted", "node-lost", "launcher-lost"})
"""Taken away from outside. Only these are tried again: any other failure would repeat itself."""


SHOWN_RANKS = 4


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended. `exit_code` is None when nobody saw it; a signal N shows as 128 + N.

    `ended_at` is seconds since the epoch, as exact as the backend knows it (Kubernetes: whole seconds).
    `stopped_by_us` ranks ended because another one had failed: they are never the first failure.
    """

    rank: int
    exit_code: int | None
    ended_at: float | None
    cause: Cause
    evidence: tuple[str, ...] = ()
    last_lines: tuple[str, ...] = ()
    stopped_by_us: bool = False


@dataclass(frozen=True)
class Outcome:
    """What a launch came to.

    `summary` is one sentence; `evidence` are the observations it rests on; `next_check` is what to look at
    next. `error` is the worker's own error where it left one, to be raised with the same text.
    """

    state: Literal["succeeded", "failed"]
    cause: Cause = "none"
    first_failed_rank: int | None = None
    summary: str = ""
    evidence: tuple[str, ...] = ()
    next_check: str = ""
    ranks: tuple[RankEnd, ...] = ()
    model: Path | None = None
    job: str = ""
    error: KfpGateError | None = field(default=None, compare=False)

    def raise_if_failed(self) -> None:
        """Nothing after a success; after a failure the error that says who has to act.

        Raises:
            InvalidInput: the worker refused an input (its own text), or the job cannot run as asked for.
            Unavailable: the machine or a service went away; the same launch may work later.
            Broken: anything else, with rank, cause, evidence and last log lines.
        """
        if self.state == "succeeded":
            return
        if self.error is not None:
            raise self.error
        kind: type[KfpGateError] = Broken
        if self.cause in ("image-pull", "unschedulable", "quota"):
            kind = InvalidInput
        elif self.cause in RESTARTABLE or self.cause == "service-unavailable":
            kind = Unavailable
        raise kind(
            self.text(), expected="every rank ends with exit code 0 and rank 0 leaves a model",
            where=self.where(), next_step=self.next_check,
        )  # fmt: skip

    def where(self) -> str:
        """Job and rank in words, for messages."""
        rank = "" if self.first_failed_rank is None else f"rank {self.first_failed_rank}"
        return ", ".join(part for part in (self.job, rank) if part) or "training ranks"

    def text(self) -> str:
        """The failure for a reader: summary, evidence, and the last lines of the rank that failed first.

        Where no rank is to blame, those of the first few ranks.
        """
        lines = [self.summary]
        lines += [f"  evidence: {line}" for line in self.evidence]
        blamed = [end for end in self.ranks if end.rank == self.first_failed_rank]
        for end in blamed or self.ranks[:SHOWN_RANKS]:
            if end.last_lines:
                lines.append(f"  last lines of rank {end.rank}:")
                lines += [f"    {line}" for line in end.last_lines]
        others = [end for end in self.ranks if end.rank != self.first_failed_rank and end.cause != "none"]
        lines += [f"  rank {end.rank}: {_ending(end)}" for end in others[:8]]
        if len(others) > 8:
            lines.append(f"  and {len(others) - 8} more ranks")
        return "\n".join(lines)


def _ending(end: RankEnd) -> str:
    if end.stopped_by_us:
        return "stopped after the failure"
    code = "no exit code seen" if end.exit_code is None else f"exit code {end.exit_code}"
    return f"{end.cause}, {code}"
