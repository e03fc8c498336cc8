"""Prove, inside an image, that what it holds is what was locked, and that all of it can be imported.

Run as the last step of a build, and once more on a node with a GPU. Three questions, each answered in full:
is the installed set the locked one; does every import work that the image's code can reach, and every module of the
listed packages; and does a tiny evaluation run through the whole path.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from kfp_gate.errors import Broken, InvalidInput, Problem
from kfp_gate.images.check import distributions_of, reached_by
from kfp_gate.images.locks import Change, changes, parse_lock
from kfp_gate.images.names import folder_of, image_files, image_of
from kfp_gate.images.packages import LISTED, modules_of
from kfp_gate.images.probe import try_imports
from kfp_gate.images.requirements import normalise
from kfp_gate.images.sources import installed_tree

OWN = "kfp-gate"


@dataclass(frozen=True)
class ImportFailure:
    """One import that does not work."""

    what: str
    """The module, or the place in our code and its statement."""
    error: str
    package: str
    """The distribution that brings what was imported; empty if none is known."""
    found: str | None
    """Its version here. None: not installed."""
    locked: str | None
    """Its version in the image's lock. None: not in it."""

    def __str__(self) -> str:
        if self.package == OWN:
            return self.error
        name = self.package or "its package"
        return f"{self.error} ({name}: found {self.found or 'none'}, locked {self.locked or 'none'})"


@dataclass(frozen=True)
class Verification:
    """What was tried in an image, and what failed."""

    image: str
    tried: int
    """Number of imports tried."""
    failures: tuple[ImportFailure, ...]
    differences: tuple[Change, ...]
    """Locked (`before`) against installed (`after`)."""
    exact: bool
    """Whether differences are failures: true inside an image."""
    evaluation: str = ""
    """What the tiny evaluation ran on and gave; empty if this image does not evaluate."""
    evaluation_error: str = ""

    @property
    def passed(self) -> bool:
        return not self.failures and not self.evaluation_error and not (self.exact and self.differences)


def lock_of(image: str) -> dict[str, str]:
    """The lock of `image` as this installation carries it."""
    path = image_files().joinpath(folder_of(image_of(image)), "constraints.txt")
    return parse_lock(path.read_text(encoding="utf-8"), where=str(path))


def installed() -> dict[str, str]:
    """Normalised name to version of every distribution here but kfp-gate.

    An earlier entry of `sys.path` hides a later one, as it does for imports.
    """
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        if name := distribution.metadata["Name"]:
            versions.setdefault(normalise(name), distribution.version)
    versions.pop(OWN, None)
    return versions


def verify(image: str = "", *, evaluate: bool = True) -> Verification:
    """Verify this environment as `image`.

    Args:
        image: which image this is to be. Empty: the one that the environment says it is (KFP_GATE_IMAGE).
        evaluate: run the tiny evaluation too, where the image holds what it needs.

    Raises:
        InvalidInput: no image is named, or an unknown one.
    """
    here = os.environ.get("KFP_GATE_IMAGE", "")
    if not (image or here):
        raise InvalidInput(
            "no image named, and KFP_GATE_IMAGE is not set",
            expected="the name of the image that this environment is to be",
            where="kfp-gate images verify",
            next_step="run it inside an image, or name one: kfp-gate images verify --image split-dataset",
        )
    name = image_of(image or here)
    locked, found = lock_of(name), installed()
    tasks = list(dict.fromkeys([*_listed(locked), *_reached(name)]))
    errors = try_imports([(task.module, task.names) for task in tasks])
    failures = tuple(_failure(t, e, found, locked) for t, e in zip(tasks, errors, strict=True) if e and not t.optional)
    evaluation, evaluation_error = "", ""
    if evaluate and "torch" in locked:
        evaluation, evaluation_error = _evaluate()
    return Verification(
        image=name,
        tried=len(tasks),
        failures=failures,
        differences=tuple(changes({name: locked}, {name: found})),
        exact=bool(here) and image_of(here) == name,
        evaluation=evaluation,
        evaluation_error=evaluation_error,
    )


def refuse(verification: Verification) -> None:
    """Raise one `Broken` that lists everything that failed; nothing if the image passed."""
    if verification.passed:
        return
    problems = [Problem(failure.what, str(failure)) for failure in verification.failures]
    if verification.exact:
        problems += [
            Problem(d.package, f"found {d.after or 'none'}, locked {d.before or 'none'}")
            for d in verification.differences
        ]
    if verification.evaluation_error:
        problems.append(Problem("tiny evaluation", verification.evaluation_error))
    parts = [f"{len(verification.failures)} of {verification.tried} imports fail"] if verification.failures else []
    if verification.exact and verification.differences:
        parts.append(f"{len(verification.differences)} installed versions are not the locked ones")
    if verification.evaluation_error:
        parts.append("the tiny evaluation breaks")
    raise Broken(
        ", ".join(parts),
        expected="every import to work and the installed packages to be the locked ones",
        where=f"image {verification.image}, {sys.prefix}",
        next_step="correct the pin or the extra, run `kfp-gate images lock`, and build the image again",
        problems=problems,
    )


def summary(verification: Verification) -> str:
    """What passed, in one or two lines."""
    lines = [f"{verification.image}: {verification.tried} imports work"]
    if verification.exact:
        lines[0] += ", installed packages are the locked ones"
    elif verification.differences:
        lines[0] += f"; {len(verification.differences)} packages differ from the lock (not inside the image)"
    return "\n".join([*lines, *([verification.evaluation] if verification.evaluation else [])])


@dataclass(frozen=True)
class _Task:
    module: str
    names: tuple[str, ...]
    what: str
    optional: bool = False


def _listed(locked: Iterable[str]) -> list[_Task]:
    held = set(locked)
    return [_Task(m, (), m) for package in LISTED if package.distribution in held for m in modules_of(package)]


def _reached(image: str) -> list[_Task]:
    reached = reached_by(image, installed_tree())
    return [_Task(site.module, site.names, str(site), site.optional) for site in (*reached.own, *reached.sites)]


def _failure(task: _Task, error: str, found: dict[str, str], locked: dict[str, str]) -> ImportFailure:
    """Name the distribution at fault: the missing module's if the error names one, else the imported module's."""
    missing = error.partition("No module named ")[2].strip("'\" ;")
    candidates = [missing.partition(".")[0]] if missing else []
    candidates.append(task.module.partition(".")[0])
    for candidate in candidates:
        if candidate == OWN.replace("-", "_"):
            return ImportFailure(task.what, error, OWN, None, None)
        for name in sorted(distributions_of(candidate)):
            if name in found or name in locked:
                return ImportFailure(task.what, error, name, found.get(name), locked.get(name))
    name = normalise(candidates[0])
    return ImportFailure(task.what, error, name, None, None)


def _evaluate() -> tuple[str, str]:
    from kfp_gate.images.tiny_evaluation import run  # here: only two images hold what it imports

    try:
        return run(), ""
    except Exception as error:  # whatever breaks is the finding
        return "", f"{type(error).__name__}: {error}"
