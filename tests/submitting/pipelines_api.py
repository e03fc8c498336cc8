"""The REST API of Kubeflow Pipelines, as far as a client that submits and follows uses it.

A real HTTP server in a thread. Runs are refused by the rules of the backend (v2_template.go: unknown and missing
parameters, and values of another type than declared). What a run does is a script of snapshots: each GET of the run
moves to the next one, and the last one stays. Faults (a dropped connection, a status, silence) are spent one by one.
"""

import json
import math
import socket
import struct
import threading
import time
import uuid
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

PREFIX = "/apis/v2beta1/"
DROP, SILENCE = "drop", "silence"


@dataclass
class Snapshot:
    """State of the run and of the nodes of its workflow, by display name."""

    state: str | None
    nodes: dict[str, str] = field(default_factory=dict)
    error: str = ""


@dataclass
class PipelinesApi:
    """What the server was sent, and what it will say."""

    script: list[Snapshot] = field(default_factory=lambda: [Snapshot("SUCCEEDED")])
    faults: list[str | int] = field(default_factory=list)
    fault_paths: tuple[str, ...] = ("runs/",)
    tokens: tuple[str, ...] = ()
    shows_pipeline: bool = True
    silence: float = 5.0
    requests: list[tuple[str, str]] = field(default_factory=list)
    experiments: dict[str, dict[str, Any]] = field(default_factory=dict)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    reads: int = 0
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> "PipelinesApi":
        api = self

        class Handler(_Handler):
            pass

        Handler.api = api
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def only_run(self) -> dict[str, Any]:
        (run,) = self.runs.values()
        return run

    @property
    def sent(self) -> dict[str, Any]:
        """Parameters of the only run, as they arrived."""
        return self.only_run["runtime_config"].get("parameters", {})


def refusal(spec: dict[str, Any], given: dict[str, Any]) -> str:
    """Why the backend would not take these parameters; empty: it takes them."""
    declared = spec["root"].get("inputDefinitions", {}).get("parameters", {})
    for name, value in given.items():
        if name not in declared:
            return f"parameter {name} is not in the pipeline spec"
        kind = declared[name]["parameterType"]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = {
            "STRING": isinstance(value, str),
            "BOOLEAN": isinstance(value, bool),
            "NUMBER_INTEGER": number and math.isfinite(value) and float(value).is_integer(),
            "NUMBER_DOUBLE": number and math.isfinite(value),
            "LIST": isinstance(value, list),
            "STRUCT": isinstance(value, dict),
        }[kind]
        if not fits:
            wanted = {"STRING": "string", "STRUCT": "struct"}.get(kind, kind.lower())
            return f"input parameter {name} requires type {wanted}, but the parameter value is not of {wanted} type"
    missing = [n for n, p in declared.items() if not p.get("isOptional") and "defaultValue" not in p and n not in given]
    return (
        f"parameter {missing[0]} is not optional, yet has neither default value nor user provided value"
        if missing
        else ""
    )


class _Handler(BaseHTTPRequestHandler):
    api: PipelinesApi
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self._begin()
        if path is None:
            return
        parts, query = path.split("?")[0].split("/"), parse_qs(urlsplit(self.path).query)
        if parts == ["healthz"]:
            self._answer(200, {"multi_user": False})
        elif parts == ["experiments"]:
            wanted = json.loads(unquote(query["filter"][0]))["predicates"][0]
            name = wanted.get("stringValue") or wanted.get("string_value")
            found = [e for e in self.api.experiments.values() if e["display_name"] == name]
            self._answer(200, {"experiments": found, "total_size": len(found)} if found else {})
        elif parts[0] == "runs" and len(parts) == 2:
            run = self.api.runs.get(parts[1])
            if run is None:
                self._error(404, f"Failed to get run: Run {parts[1]} not found")
            else:
                self._answer(200, self._snapshot(run))
        else:
            self._error(404, f"Not Found {self.path}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        path = self._begin()
        if path is None:
            return
        if path == "experiments":
            made = {**body, "experiment_id": str(uuid.uuid4()), "created_at": "2026-01-01T00:00:00Z"}
            self.api.experiments[made["experiment_id"]] = made
            self._answer(200, made)
        elif path == "runs":
            spec = body["pipeline_spec"]
            why = refusal(spec.get("pipeline_spec", spec), body["runtime_config"].get("parameters", {}))
            if why:
                self._error(400, f"Failed to create a run: {why}")
                return
            made = {
                **body,
                "run_id": str(uuid.uuid4()),
                "created_at": "2026-01-01T00:00:00Z",
                "storage_state": "AVAILABLE",
            }
            self.api.runs[made["run_id"]] = made
            self._answer(200, {**made, "state": "PENDING"})
        else:
            self._error(404, f"Not Found {self.path}")

    def _begin(self) -> str | None:
        path = self.path.removeprefix(PREFIX)
        with self.api.lock:
            self.api.requests.append((self.command, path.split("?")[0]))
            hit = self.api.faults and path.startswith(self.api.fault_paths)
            fault = self.api.faults.pop(0) if hit else None
        if self.api.tokens and self.headers.get("authorization", "") not in [f"Bearer {t}" for t in self.api.tokens]:
            fault = fault or 401
        if fault is None:
            return path
        if isinstance(fault, int):
            self._error(fault, {401: "invalid token", 503: "no healthy upstream"}.get(fault, "an error"))
            return None
        if fault == SILENCE:
            time.sleep(self.api.silence)
        # With linger 0 the client sees a reset and no orderly end.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()
        self.close_connection = True
        return None

    def _snapshot(self, run: dict[str, Any]) -> dict[str, Any]:
        with self.api.lock:
            now = self.api.script[min(self.api.reads, len(self.api.script) - 1)]
            self.api.reads += 1
        details = [
            {
                "run_id": run["run_id"], "task_id": f"node-{i}", "display_name": name, "state": state,
                "create_time": f"2026-01-01T00:{i:02}:00Z", "start_time": f"2026-01-01T00:{i:02}:00Z",
                "end_time": f"2026-01-01T00:{i:02}:42Z" if state in ("SUCCEEDED", "FAILED", "SKIPPED") else None,
            }
            for i, (name, state) in enumerate(now.nodes.items())
        ]  # fmt: skip
        answer = {**run, "state": now.state, "run_details": {"task_details": details}}
        if now.error:
            answer["error"] = {"code": 13, "message": now.error}
        if not self.api.shows_pipeline:
            del answer["pipeline_spec"]
        return answer

    def _error(self, status: int, message: str) -> None:
        self._answer(status, {"error": message, "code": 3, "message": message, "details": []})

    def _answer(self, status: int, content: Any) -> None:
        body = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True


def nodes(**steps: str) -> dict[str, str]:
    """Nodes of a workflow as Argo names them: around each step its driver and its executor."""
    found = {"gate-x7k2q": "RUNNING", "root-driver": "SUCCEEDED", "root": "RUNNING", "exit-handler-1": "RUNNING"}
    for name, state in steps.items():
        key = name.replace("_", "-")
        found[f"{key}-driver"] = "SUCCEEDED"
        found[key] = state
        found["executor"] = state
    return found
