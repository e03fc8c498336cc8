"""A real `mlflow server` for tests, and a proxy before it that loses, delays and interrupts on purpose."""

import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """`mlflow server` on sqlite, with artifacts through its proxy.

    Attributes:
        folder: holds `mlflow.db` (copied from a prepared one) and `artifacts`.
        arguments, environment: further ones of the server.
        before: a command that the server is started by, for instance `unshare`.
    """

    folder: Path
    prepared: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    before: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def start(self) -> "Server":
        self.folder.mkdir(parents=True, exist_ok=True)
        database = self.folder / "mlflow.db"
        if not database.exists():
            shutil.copy(self.prepared, database)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "KFP_GATE_"))}
        command = [
            *self.before, sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{database}",
            "--artifacts-destination", str(self.folder / "artifacts"), "--host", "127.0.0.1", "--port", str(self.port),
            "--workers", "1", *self.arguments,
        ]  # fmt: skip
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, cwd=self.folder,
                env={**environment, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                     **self.environment},
            )  # fmt: skip
        deadline = time.monotonic() + 90
        while not self._healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"the server did not start:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.2)
        return self

    def kill(self) -> None:
        """SIGKILL for the server and its workers, as when a node is lost."""
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()

    def _healthy(self) -> bool:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=2)
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False


Interference = Callable[[str, str], str]
"""Method and path to what happens: "" (nothing), "lose" (the request is carried out, its answer is lost), "drop" (it
never arrives), or a number of seconds by which the answer comes late."""


class Proxy:
    """A proxy on this machine. `interfere` is asked about every request, and may do things on its own."""

    def __init__(self, server: Server, interfere: Interference) -> None:
        proxy = self
        self.seen: list[tuple[str, str]] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.split("?")[0]
                proxy.seen.append((self.command, path))
                what = interfere(self.command, path)
                if what == "drop":
                    return self._cut()
                try:
                    upstream = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
                    headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "connection")}
                    upstream.request(self.command, self.path, body, headers)
                    answer = upstream.getresponse()
                    data = answer.read()
                except (OSError, http.client.HTTPException):
                    return self._cut()
                if what == "lose":
                    return self._cut()
                if what:
                    time.sleep(float(what))
                try:
                    self.send_response(answer.status)
                    for key, value in answer.getheaders():
                        if key.lower() not in ("transfer-encoding", "content-length", "connection", "server", "date"):
                            self.send_header(key, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def _cut(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _forward  # noqa: N815  # http.server's names

            def log_message(self, *_: object) -> None: ...

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.uri = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
