"""Objects with uid, generation and resourceVersion, and the history of changes that watches read."""

import copy
import threading
import uuid
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """One kind of object."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool = True
    crd: str = ""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def qualified(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural


@dataclass(frozen=True)
class Change:
    version: int
    kind: str
    resource: Resource
    now: Object
    before: Object | None


class Store:
    """Thread-safe. Objects returned are copies."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.version = 100
        self.oldest = 100
        self.objects: dict[tuple[str, str, str], Object] = {}
        self.history: deque[Change] = deque()

    def get(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.lock:
            found = self.objects.get((resource.plural, namespace, name))
            return copy.deepcopy(found) if found else None

    def all(self, resource: Resource, namespace: str) -> list[Object]:
        with self.lock:
            keys = sorted(k for k in self.objects if k[0] == resource.plural and (not namespace or k[1] == namespace))
            return [copy.deepcopy(self.objects[key]) for key in keys]

    def put(self, resource: Resource, body: Object, *, kind: str = "") -> Object:
        """Create or replace; sets the resourceVersion and tells the watches."""
        with self.lock:
            meta = body["metadata"]
            key = (resource.plural, meta.get("namespace", ""), meta["name"])
            before = self.objects.get(key)
            meta.setdefault("uid", str(uuid.uuid4()))
            meta.setdefault("creationTimestamp", now())
            self.version += 1
            meta["resourceVersion"] = str(self.version)
            self.objects[key] = copy.deepcopy(body)
            self._record(
                Change(self.version, kind or ("MODIFIED" if before else "ADDED"), resource, self.objects[key], before)
            )
            return copy.deepcopy(body)

    def remove(self, resource: Resource, namespace: str, name: str) -> Object | None:
        with self.lock:
            body = self.objects.pop((resource.plural, namespace, name), None)
            if body is not None:
                self.version += 1
                last = copy.deepcopy(body)
                last["metadata"]["resourceVersion"] = str(self.version)
                self._record(Change(self.version, "DELETED", resource, last, body))
            return copy.deepcopy(body) if body else None

    def expire_history(self) -> None:
        """What a restart or a compaction does: old versions can no longer be watched from."""
        with self.lock:
            self.history.clear()
            self.version += 1
            self.oldest = self.version
            self.changed.notify_all()

    def _record(self, change: Change) -> None:
        self.history.append(change)
        while len(self.history) > 20_000:
            self.oldest = self.history.popleft().version
        self.changed.notify_all()


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
