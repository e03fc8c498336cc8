"""What the cluster's events say about a job. They may be denied; an outcome then says so and stays useful."""

from typing import Any

from kfp_gate.launching.api import Api, Away, Refused

UNREADABLE = "events could not be read (docs/cluster.md, permissions)"
TELLING = ("Killing", "Preempted", "Evicted", "TaintManagerEviction")
"""Events of the type Normal that matter all the same."""

SHOWN = 6


def creation_failures(api: Api, namespace: str, job: str) -> list[str]:
    """Why pods could not be created: events of jobs and sets whose names begin with the training job's."""
    found = _events(api, namespace, "reason=FailedCreate")
    if found is None:
        return [UNREADABLE]
    mine = [event for event in found if str(event.get("involvedObject", {}).get("name", "")).startswith(job)]
    return sorted({str(event.get("message", "")) for event in mine})


def pod_events(api: Api, namespace: str, uid: str) -> list[str]:
    """Warnings about one pod, in the cluster's own words, the latest last."""
    found = _events(api, namespace, f"involvedObject.uid={uid}")
    if found is None:
        return [UNREADABLE]
    texts = [
        f"event {event.get('reason')}: {event.get('message')}"
        for event in found
        if event.get("type") == "Warning" or event.get("reason") in TELLING
    ]
    return list(dict.fromkeys(texts))[-SHOWN:]


def _events(api: Api, namespace: str, selector: str) -> list[dict[str, Any]] | None:
    try:
        listing = api.once("GET", f"/api/v1/namespaces/{namespace}/events", query={"fieldSelector": selector})
    except (Refused, Away):
        return None
    return list(listing.get("items", ()))
