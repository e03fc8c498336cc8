"""Everything that real image builds need on one machine: a stand-in for the pinned base, buildah, a registry.

The base of the product is pinned by digest and comes from a registry that tests do not reach. A root file system made
by debootstrap stands in, laid out like the pinned one: Debian bookworm, `python` and pip below /usr/local. buildah
runs as root with chroot isolation and the vfs driver, in storage of its own below `folder`.

Debian packages: buildah, debootstrap, docker-registry, ca-certificates.
"""

import json
import os
import socket
import subprocess
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

CERTIFICATES = Path("/etc/ssl/certs")
BASE = "localhost/kfp-gate-test-base:1"
PACKAGES = "python3.11,python3.11-venv,python3-distutils,ca-certificates"


@dataclass(frozen=True)
class Workshop:
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "CONTAINERS_STORAGE_CONF": str(self.folder / "storage.conf"),
            "BUILDAH_ISOLATION": "chroot",
            "TMPDIR": str(self.folder / "tmp"),
        }

    @property
    def build_options(self) -> list[str]:
        """The base by name, and this machine's certificates for pip, which brings its own list otherwise."""
        return [
            f"--from={BASE}",
            f"--volume={CERTIFICATES}:{CERTIFICATES}:ro",
            f"--volume={self.folder / 'pip.conf'}:/etc/pip.conf:ro",
        ]

    def buildah(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["buildah", *arguments], capture_output=True, text=True, check=False, env=self.environment
        )
        assert not check or done.returncode == 0, f"buildah {' '.join(arguments)}: {done.stdout}\n{done.stderr}"
        return done

    def inspect(self, image: str) -> dict:
        return json.loads(self.buildah("inspect", "--type", "image", image).stdout)

    @contextmanager
    def container(self, image: str, volumes: Sequence[str] = ()) -> Iterator["Container"]:
        name = self.buildah("from", *(f"--volume={volume}" for volume in volumes), image).stdout.strip()
        try:
            yield Container(self, name)
        finally:
            self.buildah("rm", name)


@dataclass(frozen=True)
class Container:
    workshop: Workshop
    name: str

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run as the image's user, with its environment."""
        settings = [f"--env={name}={value}" for name, value in environment.items()]
        return self.workshop.buildah("run", *settings, self.name, "--", *command, check=check)

    def python(self, program: str) -> str:
        return self.run("python", "-c", textwrap.dedent(program)).stdout


def open_workshop(folder: Path) -> Workshop:
    """Make the storage and the stand-in base; about a minute."""
    workshop = Workshop(folder)
    (folder / "tmp").mkdir(parents=True)
    (folder / "pip.conf").write_text(f"[global]\ncert = {CERTIFICATES / 'ca-certificates.crt'}\n")
    (folder / "storage.conf").write_text(
        f'[storage]\ndriver = "vfs"\ngraphroot = "{folder / "graph"}"\nrunroot = "{folder / "run"}"\n'
    )
    root = folder / "root"
    with (folder / "debootstrap.log").open("w") as log:
        command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    assert done.returncode == 0, (folder / "debootstrap.log").read_text()[-2000:]
    subprocess.run(["chroot", root, "/usr/bin/python3.11", "-m", "venv", "--copies", "/usr/local"], check=True)
    name = workshop.buildah("from", "scratch").stdout.strip()
    workshop.buildah("add", "--quiet", name, str(root), "/")
    workshop.buildah("config", "--env", "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", name)
    workshop.buildah("commit", "--quiet", name, BASE)
    workshop.buildah("rm", name)
    return workshop


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A registry on this machine, without a certificate; yields host and port."""
    folder.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": address},
        "log": {"level": "error"},
    }
    (folder / "registry.yml").write_text(json.dumps(settings))
    with serving(["docker-registry", "serve", str(folder / "registry.yml")], f"http://{address}/v2/", folder / "log"):
        yield address


@contextmanager
def serving(command: Sequence[str], url: str, log: Path, seconds: float = 120) -> Iterator[None]:
    """Run a server until the block ends; the block starts when `url` answers."""
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            until = time.monotonic() + seconds
            while not answers(url):
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-2000:]
                time.sleep(0.2)
            yield
        finally:
            process.terminate()
            process.wait(timeout=30)


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except (URLError, OSError):
        return False
