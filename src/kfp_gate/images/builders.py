"""Docker, podman and buildah behind what a build needs: build, push, and the digest of what was pushed."""

import logging
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kfp_gate.errors import Broken, InvalidInput, Problem, Unavailable

log = logging.getLogger(__name__)

NAMES = ("docker", "podman", "buildah")
"""Order of preference. A docker client without an engine is passed over."""

_PROOF = {"docker": ["version"], "podman": ["info"], "buildah": ["info"]}
"""A call that fails where the tool is installed and cannot work."""

_PUSHED = re.compile(r"digest: (sha256:[0-9a-f]{64})")
_OUTPUT_LINES = 30


@dataclass(frozen=True)
class Builder:
    """A tool that works here."""

    name: str
    program: str

    def build(
        self,
        context: Path,
        containerfile: Path,
        tag: str,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        options: Sequence[str] = (),
    ) -> None:
        """Build `containerfile` as `tag`.

        Args:
            context: folder that COPY reads from.
            arguments: values of the file's ARG lines.
            labels: added to those of the file.
            options: handed on as they are, for instance `--volume=...` or `--from=...`.

        Raises:
            Broken: the build failed; the message holds the last lines of its output.
        """
        command = [self.program, "build", "--file", str(containerfile), "--tag", tag]
        command += [part for name, value in arguments.items() for part in ("--build-arg", f"{name}={value}")]
        command += [part for name, value in labels.items() for part in ("--label", f"{name}={value}")]
        if self.name != "docker":
            # The format of Docker's registry keeps labels and user in every tool; both tools default to another.
            command += ["--format", "docker"]
        self._run([*command, *options, str(context)], f"build {tag}")

    def push(self, tag: str, *, tls_verify: bool = True) -> str:
        """Push `tag` and return the digest that the registry knows it by.

        Args:
            tls_verify: False for a registry on this machine that has no certificate. Docker decides by itself.

        Raises:
            Broken: the push failed, or gave no digest.
        """
        if self.name == "docker":
            found = _PUSHED.search(self._run([self.program, "push", tag], f"push {tag}"))
            digest = found[1] if found else ""
        else:
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder, "digest")
                command = [self.program, "push", "--digestfile", str(file)]
                command += [] if tls_verify else ["--tls-verify=false"]
                self._run([*command, tag], f"push {tag}")
                digest = file.read_text(encoding="utf-8").strip() if file.is_file() else ""
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise Broken(
                f"digest {digest!r} after the push",
                expected="sha256:<64 hex>",
                where=f"{self.name} push {tag}",
                next_step="push again by hand and look at what the tool says",
            )
        return digest

    def _run(self, command: Sequence[str], what: str) -> str:
        """Run and return stdout; the output of both streams goes to the log as it comes."""
        log.info("%s: %s", self.name, what)
        lines = []
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            for line in process.stdout or ():
                lines.append(line.rstrip())
                log.info("%s", lines[-1])
        if process.returncode:
            raise Broken(
                "\n".join([f"exit code {process.returncode} of {self.name}", *lines[-_OUTPUT_LINES:]]),
                expected="a finished build or push",
                where=what,
                next_step="read the last lines; `kfp-gate images check` finds many causes without a build",
            )
        return "\n".join(lines)


def find_builder(name: str = "") -> Builder:
    """The first tool of `NAMES` that works here.

    Args:
        name: take this one and no other.

    Raises:
        InvalidInput: `name` is none of them.
        Unavailable: none works; the message says why, tool by tool.
    """
    if name and name not in NAMES:
        raise InvalidInput(
            f"builder {name!r}",
            expected=f"one of {', '.join(NAMES)}",
            where="--builder",
            next_step="choose one of them",
        )
    problems = []
    for candidate in [name] if name else NAMES:
        program = shutil.which(candidate)
        if program is None:
            problems.append(Problem(candidate, "not installed"))
            continue
        try:
            done = subprocess.run(
                [program, *_PROOF[candidate]], capture_output=True, text=True, check=False, timeout=60
            )
        except subprocess.TimeoutExpired:
            problems.append(Problem(candidate, "does not answer within 60 s"))
            continue
        if done.returncode == 0:
            return Builder(candidate, program)
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        problems.append(Problem(candidate, said[-1]))
    raise Unavailable(
        "no tool that can build an image",
        expected=f"{name or 'docker with a running engine, podman or buildah'}",
        where="PATH",
        next_step="install one of them, or start its engine",
        problems=problems,
    )
