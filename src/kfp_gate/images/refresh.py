"""Derive the locks from an environment in which an image's imports and a tiny evaluation work.

For the day when metadata and reality part: somebody finds versions that work together on a real GPU, and those become
the lock, with the deviations that metadata forbids named so that each gets its reason.
"""

from collections.abc import Mapping
from dataclasses import replace

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.images import locks, verify
from kfp_gate.images.requirements import Project


def refresh(project: Project, image: str, *, evaluate: bool = True) -> list[locks.Change]:
    """Make the versions installed here the lock of `image`, and of the other images where they share packages.

    Args:
        image: this environment is to be that image.
        evaluate: run the tiny evaluation too.

    Returns:
        What changed in the locks of all images.

    Raises:
        Broken: this environment does not pass as that image; nothing is written.
        InvalidInput: requirements forbid a version that is installed here; nothing is written, and the message lists
            the pins that `images/exceptions.toml` would need.
        Unavailable: the package index did not answer.
    """
    passed = verify.verify(image, evaluate=evaluate)
    verify.refuse(replace(passed, exact=False))
    return adopt(project, passed.image, verify.installed())


def adopt(project: Project, image: str, versions: Mapping[str, str]) -> list[locks.Change]:
    """Make `versions` the lock of `image`, as `refresh` does, without asking whether they work.

    Raises:
        InvalidInput, Unavailable: as `refresh`.
    """
    before = locks.read_locks(project)
    after = locks.resolve(project, prefer=locks.merged(before) | dict(versions))
    forbidden = [
        Problem(package, f"{versions[package]} is installed, requirements give {version}")
        for package, version in after[image].items()
        if package in versions and versions[package] != version
    ]
    if forbidden:
        raise InvalidInput(
            f"{len(forbidden)} installed version{'s' if len(forbidden) > 1 else ''} that requirements forbid",
            expected="installed versions that the resolver may choose",
            where=f"the environment of {image}",
            next_step="add a [[pin]] with its reason to images/exceptions.toml for each that is meant, and repeat",
            problems=forbidden,
        )
    locks.write_locks(project, after)
    return locks.changes(before, after)
