"""The attempts at one training: found, created at most once each, and remembered with how they ended.

A launcher may be killed at any moment and started again. What it needs to know then is in the cluster: the jobs
that bear the run's label, the digest each was created with, and the outcome written on those that ended.
"""

import json
from dataclasses import dataclass
from typing import Any

from kfp_gate import errors
from kfp_gate.errors import InvalidInput
from kfp_gate.launching.api import MERGE_PATCH, Api, Refused, denied
from kfp_gate.launching.kinds import Kind
from kfp_gate.launching.outcome import Outcome
from kfp_gate.launching.worker_pod import LABEL_ATTEMPT, LABEL_RUN, NOTE_DIGEST, NOTE_OUTCOME, JobRequest

MAX_NOTE_BYTES = 24_000


@dataclass(frozen=True)
class Attempt:
    """One job of a run, as read from the cluster."""

    number: int
    name: str
    body: dict[str, Any]

    @property
    def deleting(self) -> bool:
        return "deletionTimestamp" in self.body.get("metadata", {})

    @property
    def digest(self) -> str:
        return str((self.body.get("metadata", {}).get("annotations") or {}).get(NOTE_DIGEST, ""))

    @property
    def remembered(self) -> Outcome | None:
        """The outcome that a launcher wrote on this job before it went on."""
        text = (self.body.get("metadata", {}).get("annotations") or {}).get(NOTE_OUTCOME)
        try:
            note = json.loads(text) if text else None
        except ValueError:
            return None
        return None if not isinstance(note, dict) else _from_note(note)


def find(api: Api, kind: Kind, namespace: str, base: str) -> list[Attempt]:
    """All jobs of the run, the latest attempt last.

    Raises:
        InvalidInput: they may not be listed.
    """
    path = kind.path(namespace)
    try:
        listing = api.call("GET", path, query={"labelSelector": f"{LABEL_RUN}={base}"})
    except Refused as refused:
        raise denied(refused, f"listing {kind.plural}", path) from None
    found = []
    for body in listing.get("items", ()):
        number = str((body.get("metadata", {}).get("labels") or {}).get(LABEL_ATTEMPT, "1"))
        found.append(Attempt(int(number) if number.isdigit() else 1, body["metadata"]["name"], body))
    return sorted(found, key=lambda attempt: attempt.number)


def create(api: Api, kind: Kind, request: JobRequest, manifest: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """Create the job, or attach to the one that is there. Returns it and whether it was made now.

    A request whose answer was lost is simply made again: the server then says that the name is taken, and the
    digest says by whom.

    Raises:
        InvalidInput: the manifest was refused, or a job of this name trains something else.
        Unavailable: the server stays away.
    """
    path = kind.path(request.namespace)
    try:
        return api.call("POST", path, query={"fieldValidation": "Strict"}, body=manifest), True
    except Refused as refused:
        if refused.reason != "AlreadyExists":
            raise denied(refused, f"creating {kind.name} {request.name}", path) from None
    body = api.find(kind.path(request.namespace, request.name))
    if body is None:  # deleted between the two requests
        return create(api, kind, request, manifest)
    check_same(Attempt(request.attempt, request.name, body), request, kind)
    return body, False


def check_same(attempt: Attempt, request: JobRequest, kind: Kind) -> None:
    """Refuse to attach to a job that trains something else.

    Raises:
        InvalidInput: the digests differ.
    """
    if attempt.digest != request.digest():
        raise InvalidInput(
            f"a {kind.name} of this run and task exists with another specification (digest {attempt.digest[:12]!r})",
            expected=f"the same specification (digest {request.digest()[:12]!r})",
            where=f"{kind.name} {request.namespace}/{attempt.name}",
            next_step="use another task name for a second training of one run, or delete that job",
        )  # fmt: skip


def remember(api: Api, kind: Kind, namespace: str, name: str, outcome: Outcome) -> None:
    """Write how an attempt ended on its job, before anything follows from it.

    Raises:
        InvalidInput: the job may not be changed.
        Unavailable: the server stays away.
    """
    note = _to_note(outcome)
    while len(text := json.dumps(note)) > MAX_NOTE_BYTES and (note["evidence"] or note["last_lines"]):
        note["evidence"], note["last_lines"] = note["evidence"][:-1], note["last_lines"][1:]
    path = kind.path(namespace, name)
    try:
        api.call("PATCH", path, body={"metadata": {"annotations": {NOTE_OUTCOME: text}}}, content_type=MERGE_PATCH)
    except Refused as refused:
        if refused.status != 404:  # deleted meanwhile: nothing to write on
            raise denied(refused, f"writing on {kind.name} {name}", path) from None


def _to_note(outcome: Outcome) -> dict[str, Any]:
    first = [end for end in outcome.ranks if end.rank == outcome.first_failed_rank]
    note: dict[str, Any] = {
        "state": outcome.state,
        "cause": outcome.cause,
        "first_failed_rank": outcome.first_failed_rank,
        "summary": outcome.summary,
        "evidence": list(outcome.evidence),
        "next_check": outcome.next_check,
        "job": outcome.job,
        "last_lines": list(first[0].last_lines) if first else [],
    }
    if outcome.error is not None:
        error = outcome.error
        note["error"] = {
            "kind": type(error).__name__, "found": error.found, "expected": error.expected, "where": error.where,
            "next_step": error.next_step, "problems": [[p.where, p.found] for p in error.problems[:40]],
        }  # fmt: skip
    return note


def _from_note(note: dict[str, Any]) -> Outcome | None:
    from kfp_gate.launching.outcome import RankEnd

    if note.get("state") not in ("succeeded", "failed"):
        return None
    rank = note.get("first_failed_rank")
    ends = (
        (RankEnd(rank, None, None, note["cause"], (), tuple(note.get("last_lines", ()))),) if rank is not None else ()
    )
    error = None
    if record := note.get("error"):
        kind = {"InvalidInput": errors.InvalidInput, "Unavailable": errors.Unavailable}.get(
            record["kind"], errors.Broken
        )
        error = kind(
            record["found"], expected=record["expected"], where=record["where"], next_step=record["next_step"],
            problems=[errors.Problem(*pair) for pair in record.get("problems", ())],
        )  # fmt: skip
    return Outcome(
        note["state"], note["cause"], rank, note["summary"], tuple(note["evidence"]), note["next_check"], ends, None,
        note.get("job", ""), error,
    )  # fmt: skip
