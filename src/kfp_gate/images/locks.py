"""Resolve all images together into one lock per image, without downloading a package.

uv reads package metadata alone. All images are resolved first as one set, so that a package has one version
everywhere; then each image takes its share of that set. What is locked already stays where it still fits:
uv prefers the versions it finds in the output file.
"""

import logging
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kfp_gate.errors import Broken, InvalidInput, Problem, Unavailable
from kfp_gate.images.requirements import Project, normalise, requirements

log = logging.getLogger(__name__)

PYTHON = "3.11"
PLATFORM = "x86_64-manylinux_2_28"
"""Debian bookworm has glibc 2.36; 2.28 is what the wheels of torch ask for."""

_HEADER = "# All that the image holds, installed with --no-deps. By `kfp-gate images lock`.\n"
_LINE = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([A-Za-z0-9.!+_-]+)")
_UNREACHABLE = ("error sending request", "dns error", "Could not connect", "Connection refused", "timed out")


@dataclass(frozen=True)
class Change:
    """One package of one image whose locked version differs from the file's. None: not in it."""

    image: str
    package: str
    before: str | None
    after: str | None


def parse_lock(text: str, *, where: str) -> dict[str, str]:
    """Normalised package name to version, from plain `name==version` lines.

    Raises:
        InvalidInput: another kind of line, or a package named twice; all such lines are listed.
    """
    versions: dict[str, str] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if not (line := line.split("#")[0].strip()):
            continue
        match = _LINE.fullmatch(line)
        name = normalise(match[1]) if match else ""
        if not match or name in versions:
            problems.append(Problem(f"line {number}", repr(line) + (" names a package again" if match else "")))
        else:
            versions[name] = match[2]
    if problems:
        raise InvalidInput(
            f"{len(problems)} unusable lines",
            expected="one name==version a line, each package once",
            where=where,
            next_step="run `kfp-gate images lock`",
            problems=problems,
        )
    return versions


def format_lock(versions: Mapping[str, str]) -> str:
    """The text of `constraints.txt`: a header and one `name==version` a line, sorted."""
    return _HEADER + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions))


def read_locks(project: Project) -> dict[str, dict[str, str]]:
    """The locks in the checkout, by image. An image without a `constraints.txt` has an empty lock."""
    locks = {}
    for image in project.images:
        path = project.folder(image) / "constraints.txt"
        locks[image] = parse_lock(path.read_text(encoding="utf-8"), where=str(path)) if path.is_file() else {}
    return locks


def resolve(project: Project, *, prefer: Mapping[str, str], upgrade: bool = False) -> dict[str, dict[str, str]]:
    """Locks of all images for linux x86_64 and Python 3.11, one version of a package across images.

    Args:
        prefer: versions to keep where requirements allow them; ignored with `upgrade`.
        upgrade: take the newest versions that fit together.

    Raises:
        InvalidInput: requirements contradict each other; the message holds the chain of reasons.
        Unavailable: the package index did not answer.
    """
    names = project.images
    exceptions = project.exceptions
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        wanted = {name: requirements(project, name) for name in names}
        pins = [f"{pin.package}=={pin.version}" for pin in exceptions.pins]
        gone = [f'{r.package}; python_version < "0"' for r in exceptions.replacements]
        (room / "uv.toml").write_text(
            "".join(
                f'[[dependency-metadata]]\nname = "{w.package}"\nversion = "{w.version}"\nrequires-dist = []\n'
                for w in exceptions.without_dependencies
            ),
            encoding="utf-8",
        )
        kept = {} if upgrade else prefer
        if exceptions.replacements:
            # Who asks for a replaced package is known only from a resolution that still has it.
            for name in names:
                plain = _compile(room, [wanted[name]], overrides=pins, prefer=kept)
                wanted[name] += "".join(f"{r.by}\n" for r in exceptions.replacements if normalise(r.package) in plain)
        together = _compile(room, wanted.values(), overrides=[*pins, *gone], prefer=kept)
        return {
            name: _compile(room, [wanted[name]], overrides=[*pins, *gone], prefer={}, constraints=together)
            for name in names
        }


def changes(before: Mapping[str, Mapping[str, str]], after: Mapping[str, Mapping[str, str]]) -> list[Change]:
    """What differs between two sets of locks, ordered by image and package."""
    found = []
    for image in sorted({*before, *after}):
        old, new = before.get(image, {}), after.get(image, {})
        for package in sorted({*old, *new}):
            if old.get(package) != new.get(package):
                found.append(Change(image, package, old.get(package), new.get(package)))
    return found


def merged(locks: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """Package to version over all images; where two disagree, the first image by name wins (see `check`)."""
    versions: dict[str, str] = {}
    for image in sorted(locks):
        for package, version in locks[image].items():
            versions.setdefault(package, version)
    return versions


def lock(project: Project, *, upgrade: bool = False) -> list[Change]:
    """Write `requirements.in` and `constraints.txt` of every image.

    Args:
        upgrade: take the newest versions, instead of keeping what is locked and still fits.

    Returns:
        What changed in the constraints.

    Raises:
        InvalidInput, Unavailable: as `resolve`.
    """
    before = read_locks(project)
    after = resolve(project, prefer=merged(before), upgrade=upgrade)
    write_locks(project, after)
    return changes(before, after)


def write_locks(project: Project, locks: Mapping[str, Mapping[str, str]]) -> None:
    """Write the files of every image in `locks`."""
    for image, versions in locks.items():
        folder = project.folder(image)
        folder.mkdir(exist_ok=True)
        (folder / "requirements.in").write_text(requirements(project, image), encoding="utf-8")
        (folder / "constraints.txt").write_text(format_lock(versions), encoding="utf-8")


def _compile(
    room: Path,
    wanted: Iterable[str],
    *,
    overrides: Iterable[str],
    prefer: Mapping[str, str],
    constraints: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """One run of `uv pip compile` in the folder `room`; returns package to version."""
    sources = []
    for number, text in enumerate(wanted):
        (room / f"{number}.in").write_text(text, encoding="utf-8")
        sources.append(f"{number}.in")
    (room / "overrides.txt").write_text("".join(f"{line}\n" for line in overrides), encoding="utf-8")
    (room / "constraints.txt").write_text(format_lock(constraints or {}), encoding="utf-8")
    (room / "locked.txt").write_text(format_lock(prefer), encoding="utf-8")
    command = [sys.executable, "-m", "uv", "pip", "compile", *sources, "--output-file", "locked.txt"]
    command += ["--config-file", "uv.toml", "--override", "overrides.txt", "--constraint", "constraints.txt"]
    command += ["--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:"]
    command += ["--no-header", "--no-annotate", "--no-emit-index-url", "--quiet"]
    done = subprocess.run(command, cwd=room, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return parse_lock((room / "locked.txt").read_text(encoding="utf-8"), where="the output of uv")
    said = done.stderr.strip() or f"exit code {done.returncode}"
    if "No module named uv" in said:
        raise InvalidInput(
            "no uv in this environment",
            expected="uv, which resolves the locks",
            where=sys.executable,
            next_step="install the extra: pip install 'kfp-gate[dev]'",
        )
    if any(sign in said for sign in _UNREACHABLE):
        raise Unavailable(
            f"uv could not reach the package index: {said}",
            expected="package metadata",
            where="uv pip compile",
            next_step="try again, or set the index that this network allows in UV_DEFAULT_INDEX",
        )
    if "No solution found" in said or "unsatisfiable" in said:
        raise InvalidInput(
            f"requirements that contradict each other\n{said}",
            expected=f"versions that fit together on {PLATFORM} and Python {PYTHON}",
            where="pyproject.toml extras, images/exceptions.toml",
            next_step="relax one of the requirements named, or add an exception with its reason",
        )
    raise Broken(
        f"uv failed: {said}",
        expected="a resolution or a chain of reasons",
        where="uv pip compile",
        next_step="read uv's message; if it is no fault of the requirements, report it",
    )
