"""What each image must hold, derived from the extras of `pyproject.toml`, and the exceptions from it.

`images/<component>/requirements.in` is generated: the library's own dependencies, the extra named after the
component, and kfp at the version that pipelines are authored with, because a step runs kfp's executor. The ranks
of a training job are no step, so `worker` goes without kfp.
"""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.images.names import folder_of

NOT_STEPS = ("worker",)
"""Images that run no Kubeflow step."""

_HEADER = "# From the extra [{extra}] of pyproject.toml, by `kfp-gate images lock`. Change it there.\n"
_NAME = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class Replacement:
    """Instead of `package`, whoever asks for it, an image holds `by` (a requirement)."""

    package: str
    by: str
    reason: str


@dataclass(frozen=True)
class Pin:
    """An image holds `package` at `version`, whatever other packages demand."""

    package: str
    version: str
    reason: str


@dataclass(frozen=True)
class WithoutDependencies:
    """`package` at `version` is installed and what it requires is not."""

    package: str
    version: str
    reason: str


@dataclass(frozen=True)
class Exceptions:
    """The content of `images/exceptions.toml`: where locks depart from package metadata on purpose."""

    replacements: tuple[Replacement, ...] = ()
    pins: tuple[Pin, ...] = ()
    without_dependencies: tuple[WithoutDependencies, ...] = ()


@dataclass(frozen=True)
class Project:
    """A checkout of this repository, as far as images are concerned."""

    root: Path
    dependencies: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]
    exceptions: Exceptions

    @property
    def images(self) -> tuple[str, ...]:
        """Image names (with dashes), one per folder below `images/`, sorted."""
        folders = (f.name for f in (self.root / "images").iterdir() if f.is_dir() and f.name.isidentifier())
        return tuple(sorted(f.replace("_", "-") for f in folders if not f.startswith("_")))

    def folder(self, image: str) -> Path:
        """Where the files of `image` lie."""
        return self.root / "images" / folder_of(image)


def normalise(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503): lower case, runs of `-_.` as one dash."""
    return re.sub(r"[-_.]+", "-", name).lower()


def name_of(requirement: str) -> str:
    """Normalised distribution name at the start of a requirement such as `torch==2.14.1`.

    Raises:
        InvalidInput: the text does not start with a name.
    """
    match = _NAME.match(requirement)
    if not match:
        raise InvalidInput(
            f"requirement {requirement!r}",
            expected="NAME, or NAME with a version such as NAME==1.2",
            where="a list of requirements",
            next_step="correct the line",
        )
    return normalise(match[1])


def read_project(root: Path) -> Project:
    """Read what `pyproject.toml` and `images/exceptions.toml` below `root` say about images.

    Raises:
        InvalidInput: `root` is no checkout, a file does not parse, or an exception lacks its reason.
    """
    pyproject = root / "pyproject.toml"
    if not pyproject.is_file() or not (root / "images" / "Containerfile").is_file():
        raise InvalidInput(
            f"{str(root)!r} without pyproject.toml or images/Containerfile",
            expected="a checkout of the kfp-gate repository",
            where="the folder the command runs in",
            next_step="run the command in a checkout, or name one with --root",
        )
    project = _load(pyproject)["project"]
    extras = project["optional-dependencies"]
    return Project(
        root=root,
        dependencies=tuple(project["dependencies"]),
        extras={name: tuple(_expanded(name, project["name"], extras)) for name in extras},
        exceptions=_exceptions(root / "images" / "exceptions.toml"),
    )


def requirements(project: Project, image: str) -> str:
    """The text of `requirements.in` of one image.

    Raises:
        InvalidInput: no extra has the image's name.
    """
    if image not in project.extras:
        raise InvalidInput(
            f"folder images/{folder_of(image)} without an extra {image!r}",
            expected="one extra per image in pyproject.toml",
            where="pyproject.toml, project.optional-dependencies",
            next_step=f"add the extra {image!r}, or remove the folder",
        )
    lines = {*project.dependencies, *project.extras[image]}
    if image not in NOT_STEPS:
        # Authoring may ask for kfp with extras of its own; a step needs kfp alone, at the same version.
        lines |= {re.sub(r"\[.*?\]", "", line) for line in project.extras["authoring"] if name_of(line) == "kfp"}
    return _HEADER.format(extra=image) + "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def _expanded(extra: str, distribution: str, extras: dict[str, list[str]]) -> list[str]:
    """Requirements of `extra`, where a reference to the project's own extras is replaced by what they hold."""
    own = re.compile(rf"{re.escape(distribution)}\[([^]]+)\]")
    lines = []
    for line in extras[extra]:
        match = own.fullmatch(line.replace(" ", ""))
        inner = [i for e in match[1].split(",") for i in _expanded(e, distribution, extras)] if match else [line]
        lines += inner
    return lines


def _exceptions(path: Path) -> Exceptions:
    if not path.is_file():
        return Exceptions()
    content = _load(path)
    known: dict[str, Any] = {"replace": Replacement, "pin": Pin, "without-dependencies": WithoutDependencies}
    made: dict[str, list[Any]] = {kind: [] for kind in known}
    for kind, entries in content.items():
        for number, entry in enumerate(entries if isinstance(entries, list) else [entries], 1):
            fields = list(known[kind].__annotations__) if kind in known else []
            if not isinstance(entry, dict) or sorted(entry) != sorted(fields) or not all(entry.values()):
                raise InvalidInput(
                    f"{kind!r} entry {number}: {entry!r}",
                    expected="tables [[replace]] (package, by, reason), [[pin]] (package, version, reason) and "
                    "[[without-dependencies]] (package, version, reason), no value empty",
                    where=str(path),
                    next_step="complete the entry: an exception without a reason is not kept",
                )
            made[kind].append(known[kind](**entry))
    return Exceptions(tuple(made["replace"]), tuple(made["pin"]), tuple(made["without-dependencies"]))


def _load(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise InvalidInput(
            f"text that is not TOML: {error}", expected="TOML", where=str(path), next_step="correct the file"
        ) from None
