"""From what was seen of the ranks to the first that failed, its cause and what to check next.

The order of deaths is not enough: a rank that loses its peer dies within milliseconds of it, and Kubernetes
keeps times in whole seconds. Among ranks that failed close together, one whose own output says that a peer was
lost, or that a collective timed out, is taken for a consequence.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kfp_gate import errors
from kfp_gate.launching.outcome import Cause, Outcome, RankEnd
from kfp_gate.launching.triage import memory_evidence
from kfp_gate.launching.worker_lines import WorkerLines, progress_text

CLOSE_SECONDS = 3.0
"""Failures this close together are one event, seen on several ranks."""

CONSEQUENCES: frozenset[Cause] = frozenset({"peer-lost", "collective-timeout"})
SHOWN_LINES = 12
WORKER_KINDS = {"user": "InvalidInput", "unavailable": "Unavailable"}
"""The worker's names for the errors that its reader can act on."""

NEXT_CHECK: dict[Cause, str] = {
    "invalid-input": "change the input named above and run again",
    "service-unavailable": "check the service named above, then run again",
    "exception": "read the traceback; the innermost frame names the line",
    "out-of-memory": (
        "follow docs/oom.md: compare the shares above, then raise memory_per_node, "
        "or lower batch, image_size or workers"
    ),
    "gpu-out-of-memory": "lower batch or image_size, or use more ranks: the batch is the total over all ranks",
    "killed": "find who sent the signal: liveness probe, node-wide out of memory (kernel log), or a person",
    "child-killed": "a child of the worker was killed: follow docs/oom.md; data loader workers and /dev/shm first",
    "collective-timeout": "find the rank that did not reach the collective: it is the slow or dead one, not this one",
    "peer-lost": "no rank shows an earlier cause: check the network between the ranks and their nodes' kernel logs",
    "evicted": "raise the memory or ephemeral-storage request to what is used, then run again",
    "preempted": "use a higher priority class, or a queue with quota of its own",
    "node-lost": "check the node; the run resumes from the last complete checkpoint",
    "deadline": "raise the deadline, or train fewer epochs",
    "image-pull": "check the image's name, tag and registry, and the pull secret of the service account",
    "container-start": "check command, secrets, config maps and volumes that the pod names",
    "unschedulable": "compare the request with what the nodes offer: GPUs, memory, node selector, tolerations, volumes",
    "quota": "raise the namespace's quota, or ask for less",
    "pods-deleted": "find who deleted the pods: kubectl get events, a drain, or a person",
    "job-deleted": "find who deleted the job; run again to make a new one",
    "launcher-lost": "the launcher stopped: look at the step's pod; run again to resume",
    "no-model": "read the log of rank 0; a custom command must write its model to {out}/model",
    "exit-code": "read the last lines above; the program gave no reason",
    "unknown": "read the last lines above and the events of the namespace; nothing seen names a cause",
}


@dataclass(frozen=True)
class Seen:
    """What is known of one rank at its end. `cause` is set by a backend that knows more than exit code and output."""

    rank: int
    exit_code: int | None
    ended_at: float | None
    lines: WorkerLines
    cause: Cause | None = None
    evidence: tuple[str, ...] = ()
    stopped_by_us: bool = False


def explain(seen: Sequence[Seen], *, job: str = "", verb: str = "failed") -> Outcome:
    """The outcome of a launch in which at least one rank failed, or in which nobody knows."""
    ends = tuple(_end(one) for one in sorted(seen, key=lambda one: one.rank))
    first = _first(ends)
    if first is None:
        return Outcome(
            "failed", "unknown", None, f"the training {verb}, and no rank shows a failure", (),
            NEXT_CHECK["unknown"], ends, None, job,
        )  # fmt: skip
    one = next(item for item in seen if item.rank == first.rank)
    return Outcome(
        "failed", first.cause, first.rank, f"rank {first.rank} {_sentence(first, one)}", first.evidence,
        NEXT_CHECK[first.cause], ends, None, job, _worker_error(one),
    )  # fmt: skip


def _first(ends: Sequence[RankEnd]) -> RankEnd | None:
    failed = [end for end in ends if end.cause != "none" and not end.stopped_by_us]
    if not failed:
        return None
    known = [end.ended_at for end in failed if end.ended_at is not None]
    begin = min(known, default=0.0)
    close = [end for end in failed if end.ended_at is None or end.ended_at - begin <= CLOSE_SECONDS]
    # A timeout of a collective shows minutes after its reason: any other cause, however late, is nearer to it.
    own = [end for end in close if end.cause not in CONSEQUENCES] or [
        end for end in failed if end.cause not in CONSEQUENCES and end.cause != "unknown"
    ]
    return min(own or close, key=lambda end: (end.ended_at is None, end.ended_at or begin, end.rank))


def _end(one: Seen) -> RankEnd:
    cause, evidence = _cause(one)
    return RankEnd(
        one.rank, one.exit_code, one.ended_at, cause, evidence, tuple(one.lines.last)[-SHOWN_LINES:], one.stopped_by_us
    )


def _cause(one: Seen) -> tuple[Cause, tuple[str, ...]]:
    lines, end = one.lines, one.lines.end
    if one.stopped_by_us or (one.exit_code == 0 and one.cause is None):
        return "none", ()
    evidence = list(one.evidence)
    number = end.get("signal")
    if not end and one.exit_code and 128 < one.exit_code < 160:
        number = one.exit_code - 128  # with an end line it is known; a worker may also exit with such a code itself
    kills = end.get("memory", {}).get("oom_kills")
    cause = one.cause
    if cause is None:
        cause = _cause_from_output(one, number, kills)
    if number and cause != "launcher-lost":
        evidence.append(f"ended by signal {number} ({_signal_name(number)})")
    elif one.exit_code is not None:
        evidence.append(f"exit code {one.exit_code}")
    if reason := end.get("reason"):
        evidence.append(str(reason))
    if lines.failure and cause != "invalid-input":
        said = (str(lines.failure.get("message", "")).splitlines() or [""])[0].removeprefix("found:").strip()[:300]
        phase = f" in phase {lines.failure['phase']}" if lines.failure.get("phase") else ""
        evidence.append(f"the worker reports ({lines.failure.get('kind', 'unknown')}{phase}): {said}")
    if lines.progress:
        evidence.append("last " + progress_text(lines.progress))
    if kills is not None and (number == signal.SIGKILL or cause in ("out-of-memory", "child-killed", "killed")):
        evidence.append(f"the kernel's counter of out-of-memory kills in this container rose by {kills}")
    if cause in ("out-of-memory", "child-killed", "killed"):
        evidence += memory_evidence(lines)
    if cause in ("exception", "gpu-out-of-memory", "peer-lost", "collective-timeout") and lines.traceback:
        evidence += [f"traceback: {line}" for line in lines.traceback[-8:]]
    return cause, tuple(evidence)


def _cause_from_output(one: Seen, number: int | None, kills: int | None) -> Cause:
    lines, end = one.lines, one.lines.end
    kind = lines.failure.get("kind")
    if "heartbeat" in f"{end.get('reason', '')}{lines.failure.get('message', '') if kind == 'terminated' else ''}":
        return "launcher-lost"
    delivery = (end.get("error") or {}).get("kind")
    if kind == "user" or delivery == "InvalidInput" or (one.exit_code == 2 and _printed_error(lines.last) is not None):
        return "invalid-input"
    if kind == "unavailable" or delivery == "Unavailable":
        return "service-unavailable"
    if kind == "peer":
        return "peer-lost"
    if kills and (number == signal.SIGKILL or one.exit_code):
        # The counter is the container's: the killed process may be a child, and the worker may have ended with 1.
        return "out-of-memory"
    if number == signal.SIGKILL:
        return "killed"
    if "child-killed" in lines.marks:
        return "child-killed"
    marked: tuple[Cause, ...] = ("gpu-out-of-memory", "collective-timeout", "peer-lost")
    for mark in marked:
        if mark in lines.marks:
            return mark
    if kind == "memory":
        return "out-of-memory"
    if lines.traceback or kind == "broken" or delivery:
        return "exception"
    if number or kind == "terminated":
        return "killed"
    return "exit-code" if one.exit_code is not None else "unknown"


def _sentence(end: RankEnd, one: Seen) -> str:
    lines = one.lines
    texts: dict[Cause, str] = {
        "invalid-input": "refused its input",
        "service-unavailable": "could not reach a service it needs",
        "exception": f"failed first, with {lines.exception or 'an error of its own'}",
        "out-of-memory": "failed first: out of memory in its container",
        "gpu-out-of-memory": "failed first: out of memory on its GPU",
        "killed": "failed first: it was killed by a signal that it did not send itself",
        "child-killed": "failed first: one of its child processes was killed",
        "collective-timeout": "waited for another rank until the collective timed out",
        "peer-lost": "lost the connection to another rank",
        "evicted": "failed first: its pod was evicted from the node",
        "preempted": "failed first: its pod was preempted by one of higher priority",
        "node-lost": "failed first: its node was lost",
        "deadline": "was stopped: the deadline passed",
        "image-pull": "never started: its image could not be pulled",
        "container-start": "never started: its container could not be created",
        "unschedulable": "never started: no node takes it",
        "quota": "never started: the namespace's quota is used up",
        "pods-deleted": "was deleted while it ran",
        "launcher-lost": "ended itself because its launcher was gone",
        "exit-code": f"failed first, with exit code {one.exit_code} and no reason",
    }
    return texts.get(end.cause, "failed for a reason that nothing seen explains")


def _worker_error(one: Seen) -> errors.KfpGateError | None:
    """The worker's own error with its own text, if it left one that the caller can act on."""
    record = one.lines.end.get("error")
    if record is None and (named := WORKER_KINDS.get(str(one.lines.failure.get("kind")))):
        printed = _printed_error(str(one.lines.failure.get("message", "")).splitlines())
        record = printed and printed | {"kind": named}
    if record is None and one.exit_code == 2:
        record = _printed_error(one.lines.last)
    if not record:
        return None
    kinds = {"InvalidInput": errors.InvalidInput, "Unavailable": errors.Unavailable}
    kind = kinds.get(str(record.get("kind")))
    if kind is None:
        return None
    problems = [
        errors.Problem(str(item.get("where", "")), str(item.get("found", "")))
        for item in record.get("problems", ())
        if isinstance(item, dict)
    ]
    return kind(
        str(record.get("found", "")), expected=str(record.get("expected", "")), where=str(record.get("where", "")),
        next_step=str(record.get("next_step", "")), problems=problems,
    )  # fmt: skip


def _printed_error(lines: Iterable[str]) -> dict[str, Any] | None:
    """The last four-part message among the lines, taken apart again."""
    record: dict[str, Any] = {}
    for line in lines:
        head, _, rest = line.partition(":")
        key = head.strip().rpartition(" ")[2] if head.strip() != "next step" else "next_step"
        if key == "found":
            record = {"kind": "InvalidInput", "problems": [], "found": rest.strip()}
        elif key in ("expected", "where", "next_step"):
            record[key] = rest.strip()
        elif "found" in record and "expected" not in record and line.startswith("  ") and ": " in line:
            where, _, found = line.strip().partition(": ")
            record["problems"].append({"where": where, "found": found})
        elif "found" in record and "expected" not in record and not line.strip().startswith("..."):
            record["found"] += f"\n{line}"
    return record if {"found", "expected", "where", "next_step"} <= set(record) else None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown signal"


def with_cause(outcome: Outcome, cause: Cause, summary: str, evidence: tuple[str, ...] = ()) -> Outcome:
    """The same outcome under a cause that is known for the job as a whole, such as its deadline."""
    return replace(
        outcome, cause=cause, first_failed_rank=None, summary=summary, evidence=evidence + outcome.evidence,
        next_check=NEXT_CHECK[cause], error=None,
    )  # fmt: skip
