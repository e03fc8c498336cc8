"""A real S3 service for tests: OpenStack Swift with its s3api, from Debian packages, on free local ports.

    apt-get install swift-proxy swift-account swift-container swift-object memcached

It checks signatures, keeps objects on disk and answers as a service does: wrong secrets and missing buckets fail.
Started by the fixture `s3_server`, stopped at the end of the session.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PROXY, *_BACKENDS = ("proxy", "account", "container", "object")
ACCESS_KEY, SECRET_KEY = "team:writer", "writing-secret"
STRANGER_KEY, STRANGER_SECRET = "other:person", "reading-secret"

# Swift reads its hash suffix from a fixed path that only root may write; ours is read instead, so that nothing outside
# the temporary folder is touched.
_LAUNCH = """
import sys
import swift.common.utils as utils
utils.SWIFT_CONF_FILE = {conf!r}
sys.argv = [{name!r}, {server_conf!r}, "-v"]
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""


@dataclass
class S3Server:
    """A running service.

    Attributes:
        endpoint: its address, to be set as AWS_ENDPOINT_URL_S3.
        folder: its files and logs.
    """

    endpoint: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def environment(self, access: str = ACCESS_KEY, secret: str = SECRET_KEY) -> dict[str, str]:
        """Variables with which kfp-gate uses this service."""
        return {
            "AWS_ENDPOINT_URL_S3": self.endpoint, "AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret,
            "AWS_REGION": "us-east-1",
        }  # fmt: skip

    def client(self):
        """A minio client of the owner."""
        from minio import Minio

        address = self.endpoint.removeprefix("http://")
        return Minio(endpoint=address, access_key=ACCESS_KEY, secret_key=SECRET_KEY, secure=False, region="us-east-1")

    def bucket(self, name: str, folder: Path | None = None) -> str:
        """Make a bucket, with the files of a folder if one is given. Returns its s3:// URI."""
        client = self.client()
        client.make_bucket(bucket_name=name)
        for path in sorted(folder.rglob("*")) if folder else ():
            if path.is_file():
                key = path.relative_to(folder).as_posix()
                client.fput_object(bucket_name=name, object_name=key, file_path=str(path))
        return f"s3://{name}"

    def stop(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(folder: Path) -> S3Server:
    """Start the four servers of a one-disk Swift, and the cache they share.

    Raises:
        RuntimeError: the packages are missing or a server did not come up; its log is in the message.
    """
    missing = [p for p in ("swift-proxy-server", "memcached") if not shutil.which(p)]
    if missing:
        raise RuntimeError(f"{missing[0]} is not installed: {__doc__}")
    *free, cache = _free_ports(5)
    ports = dict(zip((PROXY, *_BACKENDS), free, strict=True))
    (folder / "nodes" / "disk").mkdir(parents=True)
    conf = folder / "swift.conf"
    conf.write_text("[swift-hash]\nswift_hash_path_prefix = tests\nswift_hash_path_suffix = tests\n")
    for kind in _BACKENDS:
        builder = folder / f"{kind}.builder"
        for step in (
            ["create", "4", "1", "0"],
            ["add", f"r1z1-127.0.0.1:{ports[kind]}/disk", "1"],
            ["rebalance"],
        ):
            subprocess.run(["swift-ring-builder", builder, *step], check=True, capture_output=True)
        (folder / f"{kind}.conf").write_text(
            f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {ports[kind]}\nuser = {getpass.getuser()}\n"
            "workers = 0\n"
            f"swift_dir = {folder}\ndevices = {folder}/nodes\nmount_check = false\nrecon_cache_path = {folder}\n"
            f"log_level = WARNING\n[pipeline:main]\npipeline = {kind}-server\n[app:{kind}-server]\n"
            f"use = egg:swift#{kind}\n"
        )
    (folder / "proxy.conf").write_text(
        f"[DEFAULT]\nbind_ip = 127.0.0.1\nbind_port = {ports[PROXY]}\nuser = {getpass.getuser()}\nworkers = 0\n"
        f"swift_dir = {folder}\nlog_level = WARNING\n"
        "[pipeline:main]\n"
        "pipeline = catch_errors gatekeeper listing_formats cache s3api tempauth bulk slo proxy-server\n"
        "[app:proxy-server]\nuse = egg:swift#proxy\nallow_account_management = true\naccount_autocreate = true\n"
        "[filter:s3api]\nuse = egg:swift#s3api\nlocation = us-east-1\ncheck_bucket_owner = false\n"
        f"[filter:cache]\nuse = egg:swift#memcache\nmemcache_servers = 127.0.0.1:{cache}\n"
        "[filter:tempauth]\nuse = egg:swift#tempauth\n"
        f"user_{ACCESS_KEY.replace(':', '_')} = {SECRET_KEY} .admin\n"
        f"user_{STRANGER_KEY.replace(':', '_')} = {STRANGER_SECRET}\n"
        + "".join(
            f"[filter:{name}]\nuse = egg:swift#{name}\n"
            for name in ("catch_errors", "gatekeeper", "listing_formats", "bulk", "slo")
        )
    )
    server = S3Server(f"http://127.0.0.1:{ports[PROXY]}", folder)
    # s3api keeps bucket existence there and does not work without.
    command = ["memcached", "-l", "127.0.0.1", "-p", str(cache), "-U", "0", "-m", "16"]
    if getpass.getuser() == "root":
        command += ["-u", "root"]
    with (folder / "memcached.log").open("wb") as log:
        server.processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    for kind in ports:
        script = shutil.which(f"swift-{kind}-server")
        code = _LAUNCH.format(conf=str(conf), name=script, server_conf=f"{folder}/{kind}.conf", script=script)
        log = (folder / f"{kind}.log").open("wb")
        # Debian's own interpreter: the packages are its, not the virtual environment's.
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
        server.processes.append(
            subprocess.Popen(["/usr/bin/python3", "-c", code], stdout=log, stderr=log, env=environment, cwd=folder)
        )
    for (kind, port), process in zip(ports.items(), server.processes[1:], strict=True):
        _wait(port, server, process, folder / f"{kind}.log")
    return server


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One service for all tests of the session; each test makes its own bucket."""
    # Swift needs extended attributes, which /dev/shm may lack: the default temporary folder is on disk.
    folder = Path(tempfile.mkdtemp(prefix="swift-"))
    server = start(folder)
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """The service with the owner's credentials in the environment."""
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


class CuttingProxy:
    """A TCP proxy that closes connections after some bytes of the answer, to cut downloads in the middle.

    Args:
        endpoint: of the real service.
        after: bytes of each answer that are let through, headers included.
        cuts: how many connections are cut; later ones pass.
    """

    def __init__(self, endpoint: str, after: int, cuts: int) -> None:
        host, port = endpoint.removeprefix("http://").split(":")
        self.target, self.after, self.cuts, self.cut = (host, int(port)), after, cuts, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(self.target)
            threading.Thread(target=self._pump, args=(client, upstream), daemon=True).start()
            threading.Thread(target=self._answer, args=(upstream, client), daemon=True).start()

    @staticmethod
    def _pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                # The signature covers the Host header, which names this proxy's port: it goes through unchanged.
                target.sendall(data)
        except OSError:
            pass
        finally:
            target.close()

    def _answer(self, source: socket.socket, target: socket.socket) -> None:
        passed = 0
        try:
            while data := source.recv(65536):
                passed += len(data)
                if passed > self.after and self.cut < self.cuts:
                    self.cut += 1
                    target.sendall(data[: max(0, len(data) - (passed - self.after))])
                    break
                target.sendall(data)
        except OSError:
            pass
        finally:
            for one in (source, target):
                # shutdown before close: the other thread still waits in recv on it
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for one in sockets:
        one.close()
    return ports


def _wait(port: int, server: S3Server, process: "subprocess.Popen[bytes]", log: Path, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.1)
    server.stop()
    raise RuntimeError(f"{log.stem} did not come up on port {port}:\n{log.read_text(errors='replace')[-3000:]}")
