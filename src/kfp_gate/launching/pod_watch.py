"""The pods of one job, kept up to date: list, watch, and list again whenever the watch cannot be trusted."""

import json
import logging
import threading
from collections.abc import Callable
from typing import Any

from kfp_gate.launching.api import Api, Away, Refused
from kfp_gate.launching.pods import Pod

log = logging.getLogger(__name__)

WATCH_SECONDS = 240
"""Asked of the server, so that watches end by themselves; the read timeout is longer, for a dead network."""

QUIET_SECONDS = WATCH_SECONDS + 60.0


class PodWatch:
    """Latest known state of each pod that the selector matches, also of those that are gone.

    A pod that was deleted stays here with its last state: it is evidence.
    """

    def __init__(self, api: Api, namespace: str, selector: str, make: Callable[[dict[str, Any]], Pod]) -> None:
        self.api = api
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.selector = selector
        self.make = make
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.changed = threading.Event()
        self.listed = threading.Event()
        self.denied: Refused | None = None
        self._pods: dict[str, Pod] = {}
        self._gone: set[str] = set()

    def start(self) -> None:
        threading.Thread(target=self._run, name="pod-watch", daemon=True).start()

    def pods(self) -> list[tuple[Pod, bool]]:
        """All pods ever seen, each with whether it is gone."""
        with self.lock:
            return [(pod, uid in self._gone) for uid, pod in self._pods.items()]

    def update(self, body: dict[str, Any]) -> Pod:
        """Take in a reading of a pod, whoever made it."""
        pod = self.make(body)
        with self.lock:
            self._pods[pod.uid] = pod
        self.changed.set()
        return pod

    def read(self, name: str, uid: str) -> Pod | None:
        """A fresh reading; None if the pod is gone, also if another one has taken its name.

        Raises:
            Away, Refused: from the server.
        """
        try:
            body = self.api.once("GET", f"{self.path}/{name}")
        except Refused as refused:
            if refused.status != 404:
                raise
            self.lost(uid)
            return None
        if body.get("metadata", {}).get("uid") != uid:
            self.lost(uid)
            return None
        return self.update(body)

    def refresh(self) -> None:
        """List now. What is known of the pods is then no older than this call.

        Raises:
            Away, Refused: from the server.
        """
        self._list()

    def lost(self, uid: str) -> None:
        with self.lock:
            self._gone.add(uid)
        self.changed.set()

    def _run(self) -> None:
        pause = 0.2
        while not self.stop.is_set():
            try:
                version = self._list()
                pause = 0.2
                while not self.stop.is_set() and version:
                    version = self._watch(version)
                    # A watch that ends at once, again and again, must not become a busy loop.
                    self.stop.wait(0.05)
            except Away as away:
                log.debug("pods: %s", away)
                self.stop.wait(max(pause, min(away.retry_after, 30.0)))
                pause = min(pause * 2, 5.0)
            except Refused as refused:
                self.denied = refused
                self.changed.set()
                self.stop.wait(max(pause, 1.0))
                pause = min(pause * 2, 30.0)

    def _list(self) -> str:
        listing = self.api.once("GET", self.path, query={"labelSelector": self.selector})
        present = {self.update(body).uid for body in listing.get("items", ())}
        with self.lock:
            self._gone = set(self._pods) - present
        self.denied = None
        self.listed.set()
        self.changed.set()
        return str(listing.get("metadata", {}).get("resourceVersion", ""))

    def _watch(self, version: str) -> str:
        """Follow from `version`; returns where to go on, or "" when a new list is needed."""
        query = {
            "labelSelector": self.selector, "watch": "true", "resourceVersion": version,
            "allowWatchBookmarks": "true", "timeoutSeconds": WATCH_SECONDS,
        }  # fmt: skip
        try:
            response = self.api.open("GET", self.path, query=query, read_seconds=QUIET_SECONDS)
        except Refused as refused:
            if refused.status == 410:
                return ""
            raise
        try:
            rest = b""
            for data in _chunks(response):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.strip():
                        version = self._event(line, version)
                        if not version:
                            return ""
                if self.stop.is_set():
                    break
            return version
        finally:
            response.close()
            response.release_conn()

    def _event(self, line: bytes, version: str) -> str:
        try:
            event = json.loads(line)
            kind, body = event["type"], event["object"]
        except (ValueError, KeyError, TypeError):
            return ""  # cut inside an event by something between us and the server
        if kind == "ERROR":
            log.debug("watch of pods ended: %s", body.get("message"))
            return ""
        if kind != "BOOKMARK":
            pod = self.update(body)
            if kind == "DELETED":
                self.lost(pod.uid)
        return str(body.get("metadata", {}).get("resourceVersion", "")) or version


def _chunks(response: Any) -> Any:
    from urllib3.exceptions import HTTPError

    try:
        yield from response.stream(1 << 16, decode_content=False)
    except (HTTPError, OSError, ValueError) as error:
        raise Away(f"watch broken: {type(error).__name__}") from error
