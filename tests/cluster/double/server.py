"""The HTTP side: verbs, paths, Status answers, watches and log streams, over TLS, and faults on command."""

import base64
import contextlib
import copy
import json
import os
import re
import socket
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from double import schema
from double.store import Change, Object, Resource, Store, now

TOKEN = "test-token"
LOG_CHUNK = 1 << 16


class Answer(Exception):  # noqa: N818  # not an error: how a handler ends
    """An answer that ends the handling of a request."""

    def __init__(self, status: int, body: Object | str, headers: dict[str, str] | None = None) -> None:
        super().__init__(status)
        self.status, self.body, self.headers = status, body, headers or {}


class CloseAbruptly(Exception):  # noqa: N818  # a fault on command
    """End the connection in the middle."""


def failure(code: int, reason: str, message: str, details: Object | None = None) -> Object:
    body: Object = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
    }
    if details:
        body["details"] = details
    return body | {"code": code}


class Request:
    """A request as rules of faults and RBAC see it."""

    def __init__(self, method: str, path: str, query: dict[str, str]) -> None:
        self.method, self.path, self.query = method, path, query
        self.watch = query.get("watch", "").lower() in ("true", "1")
        self.log = path.endswith("/log")


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "Server"

    def setup(self) -> None:
        # The handshake happens here, in the connection's own thread: a slow client does not hold up the others.
        self.request = self.server.tls.wrap_socket(self.request, server_side=True)
        self.request.settimeout(120)
        with self.server.guard:
            self.server.connections.add(self.request)
        super().setup()

    def finish(self) -> None:
        with self.server.guard:
            self.server.connections.discard(self.request)
        with contextlib.suppress(OSError):  # the client, or a test, closed the connection
            super().finish()
        self.request.close()

    def log_message(self, *_arguments: object) -> None:
        return

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except (OSError, ValueError):
            self.close_connection = True

    def do_GET(self) -> None:  # the names that http.server calls
        self._serve("GET")

    do_POST = lambda self: self._serve("POST")  # noqa: E731, N815
    do_PUT = lambda self: self._serve("PUT")  # noqa: E731, N815
    do_PATCH = lambda self: self._serve("PATCH")  # noqa: E731, N815
    do_DELETE = lambda self: self._serve("DELETE")  # noqa: E731, N815

    def _serve(self, method: str) -> None:
        parts = urlsplit(self.path)
        query = {key: values[-1] for key, values in parse_qs(parts.query, keep_blank_values=True).items()}
        request = Request(method, parts.path, query)
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        self.streaming = False
        try:
            self.server.before(request)
            if self.headers.get("Authorization") != f"Bearer {self.server.token}":
                raise Answer(401, failure(401, "Unauthorized", "Unauthorized"))
            self._route(request, raw)
        except Answer as answer:
            if not self.streaming:
                self._answer(answer)
                self.server.after(request, answer.status)
        except CloseAbruptly:
            self.close_connection = True
            self.server.drop(self.connection)

    def _answer(self, answer: Answer) -> None:
        plain = isinstance(answer.body, str)
        data = answer.body.encode() if plain else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        if answer.status != 401:
            self.send_header("Cache-Control", "no-cache, private")
        if answer.status != 204:
            self.send_header("Content-Type", "text/plain; charset=utf-8" if plain else "application/json")
            self.send_header("Content-Length", str(len(data)))
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if answer.status != 204:
            self.wfile.write(data)
        self.wfile.flush()

    # -- routing ---------------------------------------------------------------------------------------

    def _route(self, request: Request, raw: bytes) -> None:
        path = request.path
        if path == "/version":
            raise Answer(200, {"major": "1", "minor": "36", "gitVersion": "v1.36.2"})
        if found := re.fullmatch(r"/openapi/v3/apis/([^/]+)/([^/]+)", path):
            raise self._openapi(*found.groups())
        if found := re.fullmatch(r"/apis/([^/]+)/([^/]+)/?", path):
            raise self._discovery(*found.groups())
        found = re.fullmatch(
            r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
            r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[^/]+))?",
            path,
        )
        resource = self.server.resource(found["group"] or "", found["version"], found["plural"]) if found else None
        if found is None or resource is None:
            raise Answer(404, "404 page not found\n")
        namespace, name, sub = found["namespace"] or "", found["name"] or "", found["sub"] or ""
        verb = _verb(request, bool(name))
        if not self.server.may(verb, resource.group, resource.plural, sub):
            what = resource.plural + (f"/{sub}" if sub else "")
            text = (
                f"{resource.qualified}{f' {chr(34)}{name}{chr(34)}' if name else ''} is forbidden: User "
                f'"system:serviceaccount:ns1:pipeline-runner" cannot {verb} resource "{what}" in API group '
                f'"{resource.group}"' + (f' in the namespace "{namespace}"' if namespace else " at the cluster scope")
            )
            details: Object = ({"name": name} if name else {}) | {"kind": resource.plural}
            if resource.group:
                details["group"] = resource.group
            raise Answer(403, failure(403, "Forbidden", text, details))
        if resource.plural == "selfsubjectaccessreviews":
            raise self._review(json.loads(raw))
        if request.watch and not sub:
            return self._watch(request, resource, namespace, name)
        if sub == "log" and resource.plural == "pods" and request.method == "GET":
            return self._log(request, namespace, name)
        if sub not in ("", "status"):
            raise Answer(404, "404 page not found\n")
        if request.method == "GET":
            raise self._read(request, resource, namespace, name)
        if request.method == "POST" and not name:
            raise self._create(request, resource, namespace, raw)
        if request.method in ("PUT", "PATCH") and name:
            raise self._update(request, resource, namespace, name, sub, raw)
        if request.method == "DELETE" and name:
            raise self._delete(request, resource, namespace, name, raw)
        raise Answer(
            405, failure(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")
        )

    def _discovery(self, group: str, version: str) -> Answer:
        found = [r for r in self.server.resources if (r.group, r.version) == (group, version)]
        if not found:
            return Answer(404, "404 page not found\n")
        items = [{"name": r.plural, "kind": r.kind, "namespaced": r.namespaced, "verbs": ["get"]} for r in found]
        return Answer(
            200,
            {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": f"{group}/{version}", "resources": items},
        )

    def _openapi(self, group: str, version: str) -> Answer:
        found = [r for r in self.server.resources if (r.group, r.version) == (group, version) and r.crd]
        if not found:
            return Answer(404, "404 page not found\n")
        schemas = {
            f"io.{r.kind}": self.server.schema(r)
            | {"x-kubernetes-group-version-kind": [{"group": group, "kind": r.kind, "version": version}]}
            for r in found
        }
        return Answer(200, {"openapi": "3.0.0", "components": {"schemas": schemas}})

    def _review(self, body: Object) -> Answer:
        asked = body["spec"]["resourceAttributes"]
        unknown = set(asked) - {"verb", "group", "resource", "subresource", "namespace", "name", "version"}
        if unknown:
            return Answer(400, failure(400, "BadRequest", f"strict decoding error: unknown field {sorted(unknown)}"))
        allowed = self.server.may(
            asked["verb"], asked.get("group", ""), asked["resource"], asked.get("subresource", "")
        )
        return Answer(201, body | {"status": {"allowed": allowed}})

    # -- objects ---------------------------------------------------------------------------------------

    def _read(self, request: Request, resource: Resource, namespace: str, name: str) -> Answer:
        store = self.server.store
        if name:
            found = store.get(resource, namespace, name)
            return Answer(200, found) if found else Answer(404, _not_found(resource, name))
        version = request.query.get("resourceVersion", "")
        with store.lock:
            if version.isdigit() and int(version) > store.version:
                return _too_large(int(version), store.version)
            if (
                request.query.get("resourceVersionMatch") == "Exact"
                and version.isdigit()
                and int(version) < store.oldest
            ):
                return Answer(200, self._list(resource, [], int(version)))
            items = [o for o in store.all(resource, namespace) if _selected(o, request.query)]
            start, at = 0, store.version
            if token := request.query.get("continue"):
                after = json.loads(base64.urlsafe_b64decode(token + "=" * (-len(token) % 4)))
                key = after["start"].lstrip("/").rstrip("\0")
                start, at = sum(o["metadata"]["name"] <= key for o in items), after["rv"]
            limit = int(request.query.get("limit") or 0)
            page = items[start : start + limit] if limit else items[start:]
            body = self._list(resource, page, at)
            if limit and start + limit < len(items):
                token = {"v": "meta.k8s.io/v1", "rv": at, "start": f"/{page[-1]['metadata']['name']}\0"}
                text = json.dumps(token, separators=(",", ":")).encode()
                body["metadata"]["continue"] = base64.urlsafe_b64encode(text).decode().rstrip("=")
            return Answer(200, body)

    def _list(self, resource: Resource, items: list[Object], version: int) -> Object:
        if not resource.crd:  # built-in kinds leave kind and apiVersion off their items
            items = [{k: v for k, v in item.items() if k not in ("kind", "apiVersion")} for item in items]
        return {
            "kind": f"{resource.kind}List",
            "apiVersion": resource.api_version,
            "metadata": {"resourceVersion": str(version)},
            "items": items,
        }

    def _create(self, request: Request, resource: Resource, namespace: str, raw: bytes) -> Answer:
        store = self.server.store
        body = _decode(raw)
        meta = body.setdefault("metadata", {})
        if "name" not in meta and "generateName" in meta:
            meta["name"] = meta["generateName"] + "".join("bcdfghjklmnpqrstvwxz2456789"[b % 27] for b in os.urandom(5))
        if not meta.get("name"):
            text = "metadata.name: Required value: name or generateName is required"
            raise Answer(422, failure(422, "Invalid", f'{resource.kind}.{resource.group} "" is invalid: {text}'))
        if meta.get("namespace", namespace) != namespace:
            return Answer(
                400,
                failure(
                    400,
                    "BadRequest",
                    "the namespace of the provided object does not match the namespace sent on the request",
                ),
            )
        for name in ("uid", "resourceVersion", "creationTimestamp", "generation", "deletionTimestamp"):
            meta.pop(name, None)
        meta["namespace"] = namespace
        headers = self._admit(request, resource, body, None)
        with store.lock:
            if store.get(resource, namespace, meta.get("name", "")):
                return Answer(
                    409,
                    failure(
                        409,
                        "AlreadyExists",
                        f'{resource.qualified} "{meta["name"]}" already exists',
                        {"name": meta["name"]}
                        | ({"group": resource.group} if resource.group else {})
                        | {"kind": resource.plural},
                    ),
                )
            body.pop("status", None)
            meta["generation"] = 1
            meta["creationTimestamp"] = now()
            meta["managedFields"] = [self._managed(resource, body, "spec", None)]
            if request.query.get("dryRun") == "All":
                return Answer(201, body | {"metadata": meta | {"uid": str(uuid.uuid4())}}, headers)
            made = store.put(resource, body)
        self.server.on_created(resource, made)
        return Answer(201, made, headers)

    def _update(self, request: Request, resource: Resource, namespace: str, name: str, sub: str, raw: bytes) -> Answer:
        store = self.server.store
        kind = (self.headers.get("Content-Type") or "").split(";")[0]
        with store.lock:
            old = store.get(resource, namespace, name)
            if old is None:
                return Answer(404, _not_found(resource, name))
            if request.method == "PATCH":
                if kind not in ("application/merge-patch+json", "application/strategic-merge-patch+json"):
                    return Answer(
                        415,
                        failure(
                            415, "UnsupportedMediaType", f"the body of the request was in an unknown format - {kind}"
                        ),
                    )
                new = _merge(copy.deepcopy(old), _decode(raw))
                given = new["metadata"].get("resourceVersion")
            else:
                new = _decode(raw)
                given = new.get("metadata", {}).get("resourceVersion")
                if given is None and resource.crd:
                    text = "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
                    return Answer(422, failure(422, "Invalid", f'{resource.qualified} "{name}" is invalid: {text}'))
            if given not in (None, old["metadata"]["resourceVersion"]):
                text = (
                    f'Operation cannot be fulfilled on {resource.qualified} "{name}": the object has been modified; '
                    "please apply your changes to the latest version and try again"
                )
                details = (
                    {"name": name} | ({"group": resource.group} if resource.group else {}) | {"kind": resource.plural}
                )
                return Answer(409, failure(409, "Conflict", text, details))
            for key in (
                "uid",
                "creationTimestamp",
                "generation",
                "managedFields",
                "namespace",
                "name",
                "deletionTimestamp",
            ):
                if key in old["metadata"]:
                    new["metadata"][key] = old["metadata"][key]
            if sub == "status":
                # The status subresource takes the status and nothing else; the main resource everything but it.
                new = copy.deepcopy(old) | ({"status": new["status"]} if "status" in new else {})
            else:
                new.pop("status", None)
                if "status" in old:
                    new["status"] = copy.deepcopy(old["status"])
            headers = self._admit(request, resource, new, old)
            new["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]
            if new == old or request.query.get("dryRun") == "All":
                return Answer(200, new, headers)
            if new.get("spec") != old.get("spec"):
                new["metadata"]["generation"] = old["metadata"].get("generation", 1) + 1
            if sub == "status":
                new["metadata"].setdefault("managedFields", []).append(self._managed(resource, new, "status", "status"))
            return Answer(200, store.put(resource, new), headers)

    def _delete(self, request: Request, resource: Resource, namespace: str, name: str, raw: bytes) -> Answer:
        store = self.server.store
        policy = request.query.get("propagationPolicy") or (_decode(raw).get("propagationPolicy") if raw else None)
        with store.lock:
            old = store.get(resource, namespace, name)
            if old is None:
                return Answer(404, _not_found(resource, name))
            if resource.plural == "pods":
                return Answer(200, self.server.delete_pod(old))
            if policy == "Foreground":
                meta = old["metadata"]
                if "deletionTimestamp" not in meta:
                    meta |= {
                        "deletionTimestamp": now(),
                        "deletionGracePeriodSeconds": 0,
                        "finalizers": [*meta.get("finalizers", []), "foregroundDeletion"],
                        "generation": meta.get("generation", 1) + 1,
                    }
                    old = store.put(resource, old)
                return Answer(200, old)
            store.remove(resource, namespace, name)
            details = {"name": name} | ({"group": resource.group} if resource.group else {})
            return Answer(
                200,
                {
                    "kind": "Status",
                    "apiVersion": "v1",
                    "metadata": {},
                    "status": "Success",
                    "details": details | {"kind": resource.plural, "uid": old["metadata"]["uid"]},
                },
            )

    def _admit(self, request: Request, resource: Resource, body: Object, old: Object | None) -> dict[str, str]:
        """Schema checks, in the server's order: unknown fields, defaults, structure, transition rules."""
        if not resource.crd:
            return {}
        shape = self.server.schema(resource)
        unknown = schema.prune(body, shape)
        mode = request.query.get("fieldValidation", "Warn")
        if unknown and mode == "Strict":
            listed = ", ".join(f'unknown field "{field}"' for field in unknown)
            text = (
                f'{resource.kind} in version "{resource.version}" cannot be handled as a {resource.kind}: '
                f"strict decoding error: {listed}"
            )
            raise Answer(400, failure(400, "BadRequest", text))
        if body.get("kind") != resource.kind or body.get("apiVersion") != resource.api_version:
            text = f"the object provided is unrecognized (must be of type {resource.kind})"
            raise Answer(400, failure(400, "BadRequest", text))
        schema.default(body, shape)
        causes = schema.validate(body, shape)
        if causes and schema.has_rules(shape):
            text = (
                "Invalid value: null: some validation rules were not checked because the object was invalid; "
                "correct the existing errors to complete validation"
            )
            causes.append(schema.Cause("FieldValueInvalid", text, "<nil>"))
        elif not causes:
            causes = schema.rules(body, old, shape)
        if causes:
            name = body["metadata"].get("name", "")
            listed = ", ".join(f"{cause.field}: {cause.message}" for cause in causes)
            text = f'{resource.kind}.{resource.group} "{name}" is invalid: ' + (
                f"[{listed}]" if len(causes) > 1 else listed
            )
            details = {
                "name": name,
                "group": resource.group,
                "kind": resource.kind,
                "causes": [cause.json() for cause in causes],
            }
            raise Answer(422, failure(422, "Invalid", text, details))
        escaped = [field.replace('"', '\\"') for field in unknown]
        if unknown and mode == "Warn":
            return {"Warning": ", ".join(f'299 - "unknown field \\"{field}\\""' for field in escaped)}
        return {}

    def _managed(self, resource: Resource, body: Object, part: str, subresource: str | None) -> Object:
        shape = ((self.server.schema(resource) if resource.crd else {}).get("properties") or {}).get(part)
        tree = {f"f:{part}": schema.fields_v1(body.get(part, {}), shape, dot=bool(resource.crd))}
        if (labels := body["metadata"].get("labels")) and part == "spec":
            tree["f:metadata"] = {"f:labels": schema.fields_v1(labels, None)}
        entry: Object = {
            "apiVersion": resource.api_version,
            "fieldsType": "FieldsV1",
            "fieldsV1": tree,
            "manager": (self.headers.get("User-Agent") or "unknown").split("/")[0],
            "operation": "Update",
            "time": now(),
        }
        return entry | ({"subresource": subresource} if subresource else {})

    # -- streams ---------------------------------------------------------------------------------------

    def _begin_stream(self, content_type: str) -> "Stream":
        self.send_response(200)
        self.send_header("Cache-Control", "no-cache, private")
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.streaming = True
        stream = Stream(self.wfile)
        with self.server.guard:
            self.server.streams.add(stream)
        return stream

    def _end_stream(self, stream: "Stream") -> None:
        with self.server.guard:
            self.server.streams.discard(stream)
        if stream.cut == "abrupt":
            raise CloseAbruptly
        stream.finish()

    def _watch(self, request: Request, resource: Resource, namespace: str, name: str) -> None:
        store, server = self.server.store, self.server
        query = dict(request.query)
        if name:
            query["fieldSelector"] = f"metadata.name={name}"
        version = query.get("resourceVersion", "")
        lasts = float(query.get("timeoutSeconds") or 2400)
        bookmarks = query.get("allowWatchBookmarks", "").lower() in ("true", "1")
        with store.lock:
            at = int(version) if version.isdigit() else 0
            if at > store.version:
                raise _too_large(at, store.version)
            stream = self._begin_stream("application/json")
            if 0 < at < store.oldest:
                text = f"too old resource version: {at} ({store.oldest})"
                stream.event("ERROR", failure(410, "Expired", text))
                return self._end_stream(stream)
            if at == 0:
                for item in store.all(resource, namespace):
                    if _selected(item, query):
                        stream.event("ADDED", item)
                at = store.version
                if query.get("sendInitialEvents", "").lower() in ("true", "1"):
                    notes = {"resourceVersion": str(at), "annotations": {"k8s.io/initial-events-end": "true"}}
                    stream.event(
                        "BOOKMARK", {"kind": resource.kind, "apiVersion": resource.api_version, "metadata": notes}
                    )
        until = time.monotonic() + lasts
        bookmark_at = time.monotonic() + server.bookmark_seconds
        try:
            while time.monotonic() < until and not stream.cut and not server.stopping:
                with store.lock:
                    new = [change for change in store.history if change.version > at]
                    expired = at < store.oldest
                    if not new and not expired:
                        store.changed.wait(min(0.1, max(0.0, until - time.monotonic())))
                if expired and not new:
                    stream.event("ERROR", failure(410, "Expired", f"too old resource version: {at} ({store.oldest})"))
                    break
                for change in new:
                    at = change.version
                    if change.resource == resource and (event := _event(change, namespace, query)):
                        stream.event(*event)
                if bookmarks and time.monotonic() >= bookmark_at:
                    bookmark_at = time.monotonic() + server.bookmark_seconds
                    body = {
                        "kind": resource.kind,
                        "apiVersion": resource.api_version,
                        "metadata": {"resourceVersion": str(at), "creationTimestamp": None},
                    }
                    stream.event("BOOKMARK", body)
        finally:
            self._end_stream(stream)

    def _log(self, request: Request, namespace: str, name: str) -> None:
        query = request.query
        pod = self.server.store.get(self.server.pods, namespace, name)
        if pod is None:
            raise Answer(404, _not_found(self.server.pods, name))
        if "sinceTime" in query and "sinceSeconds" in query:
            text = "Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified"
            details = {
                "name": name,
                "kind": "PodLogOptions",
                "causes": [{"reason": "FieldValueForbidden", "message": text, "field": "[]"}],
            }
            raise Answer(422, failure(422, "Invalid", f'PodLogOptions "{name}" is invalid: []: {text}', details))
        since = None
        if "sinceTime" in query:
            try:
                since = int(datetime.fromisoformat(query["sinceTime"]).timestamp()) * 1_000_000_000
            except ValueError:
                text = query["sinceTime"]
                raise Answer(
                    400,
                    failure(
                        400,
                        "BadRequest",
                        f'parsing time "{text}" as "2006-01-02T15:04:05Z07:00": cannot parse "{text}" as "2006"',
                    ),
                ) from None
        elif "sinceSeconds" in query:
            since = (int(time.time()) - int(query["sinceSeconds"])) * 1_000_000_000
        containers = [c["name"] for c in pod["spec"]["containers"]]
        container = query.get("container") or containers[0]
        if container not in containers:
            raise Answer(400, failure(400, "BadRequest", f"container {container} is not valid for pod {name}"))
        if not pod["spec"].get("nodeName"):
            raise Answer(204, "")
        previous = query.get("previous") == "true"
        status = next((s for s in pod["status"].get("containerStatuses") or () if s["name"] == container), {})
        waiting = (status.get("state") or {}).get("waiting")
        if waiting and not previous and not status.get("lastState"):
            text = f'container "{container}" in pod "{name}" is waiting to start: {waiting["reason"]}'
            raise Answer(400, failure(400, "BadRequest", text))
        log = self.server.container_log(pod["metadata"]["uid"], container, previous, bool(waiting))
        if log is None:
            text = f'previous terminated container "{container}" in pod "{name}" not found'
            raise Answer(400, failure(400, "BadRequest", text))
        follow = query.get("follow") == "true" and not previous
        stamped = query.get("timestamps") == "true"
        tail = int(query["tailLines"]) if "tailLines" in query else None
        position = log.start(since, tail)
        stream = self._begin_stream("text/plain")
        stream.allowance = self.server.log_allowance()
        try:
            while not stream.cut and not self.server.stopping:
                data = log.read(position, LOG_CHUNK, follow, 0.1)
                if data is None:
                    break
                if stream.allowance is not None and len(data) >= stream.allowance:
                    data, stream.cut = data[: stream.allowance], self.server.cut_style()
                if data:
                    stream.write(data if stamped else _without_stamps(data))
                    position += len(data)
                    if stream.allowance is not None:
                        stream.allowance -= len(data)
                elif not self.server.store.get(self.server.pods, namespace, name):
                    break  # the pod is gone: the kubelet closes the stream
        finally:
            self._end_stream(stream)


class Stream:
    """An open chunked answer. `cut` is set from outside: "clean" looks like an end, "abrupt" does not."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.cut = ""
        self.allowance: int | None = None

    def write(self, data: bytes) -> None:
        self.file.write(b"%x\r\n%b\r\n" % (len(data), data))
        self.file.flush()

    def event(self, kind: str, body: Object) -> None:
        self.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")

    def finish(self) -> None:
        self.file.write(b"0\r\n\r\n")
        self.file.flush()


class Server(ThreadingHTTPServer):
    """The listening part; `Cluster` adds what nodes and controllers do."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    resources: tuple[Resource, ...] = ()
    pods: Resource

    def __init__(self, tls: ssl.SSLContext, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.tls = tls
        self.token = TOKEN
        self.store = Store()
        self.guard = threading.Lock()
        self.streams: set[Stream] = set()
        self.connections: set[Any] = set()
        self.stopping = False
        self.bookmark_seconds = 1.0
        self.log_allowance: Callable[[], int | None] = lambda: None
        self.cut_style: Callable[[], str] = lambda: "clean"

    def handle_error(self, request: Any, client_address: Any) -> None:
        return  # clients that go away are part of the tests

    def drop(self, connection: Any) -> None:
        """Close without a farewell."""
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def before(self, request: Request) -> None: ...
    def after(self, request: Request, status: int) -> None: ...
    def on_created(self, resource: Resource, body: Object) -> None: ...


def _verb(request: Request, named: bool) -> str:
    if request.method == "GET":
        return "watch" if request.watch else "get" if named else "list"
    return {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[request.method]


def _selected(body: Object, query: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels") or {}
    for term in filter(None, query.get("labelSelector", "").split(",")):
        if "!=" in term:
            key, value = term.split("!=")
            if labels.get(key) == value:
                return False
        elif "=" in term:
            key, value = term.replace("==", "=").split("=")
            if labels.get(key) != value:
                return False
        elif term not in labels:
            return False
    for term in filter(None, query.get("fieldSelector", "").split(",")):
        key, _, value = term.partition("=")
        found: Any = body
        for part in key.split("."):
            found = (found or {}).get(part)
        if str(found) != value:
            return False
    return True


def _event(change: Change, namespace: str, query: dict[str, str]) -> tuple[str, Object] | None:
    if namespace and change.now["metadata"].get("namespace") != namespace:
        return None
    now_in = change.kind != "DELETED" and _selected(change.now, query)
    was_in = change.before is not None and _selected(change.before, query)
    if now_in:
        return ("MODIFIED" if was_in else "ADDED"), change.now
    return ("DELETED", change.now) if was_in else None


def _decode(raw: bytes) -> Object:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise Answer(400, failure(400, "BadRequest", f"couldn't decode the body: {error}")) from None
    return value if isinstance(value, dict) else {}


def _merge(target: Object, patch: Object) -> Object:
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            target[key] = _merge(target[key] if isinstance(target.get(key), dict) else {}, value)
        else:
            target[key] = value
    return target


def _not_found(resource: Resource, name: str) -> Object:
    details = {"name": name} | ({"group": resource.group} if resource.group else {}) | {"kind": resource.plural}
    return failure(404, "NotFound", f'{resource.qualified} "{name}" not found', details)


def _too_large(asked: int, current: int) -> Answer:
    text = f"Timeout: Too large resource version: {asked}, current: {current}"
    causes = [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}]
    body = failure(504, "Timeout", text, {"causes": causes, "retryAfterSeconds": 1})
    return Answer(504, body, {"Retry-After": "1"})


def _without_stamps(data: bytes) -> bytes:
    return re.sub(rb"(?m)^\d{4}-\d\d-\d\dT[0-9:.]+Z ", b"", data)
