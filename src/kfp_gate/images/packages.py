"""The packages of which every module is imported when an image is verified, and the modules left out, with reasons.

Modules are found by file and not by a package walk: a walk imports a sub-package to list it, so a broken one hides
its children. Packages that are not listed (torch, mlflow) are far larger than what we use of them, and carry hundreds
of modules for libraries that no image holds: of those, exactly what our code imports is tried.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import EXTENSION_SUFFIXES, SOURCE_SUFFIXES
from pathlib import Path


@dataclass(frozen=True)
class ListedPackage:
    """One package to import in full."""

    name: str
    """Import name; the distribution's is `distribution`."""
    distribution: str
    left_out: dict[str, str] = field(default_factory=dict)
    """Module, with all below it, to the reason why it is not imported."""


LISTED = (
    ListedPackage("jinja2", "jinja2"),
    ListedPackage(
        "kubernetes",
        "kubernetes",
        {
            "kubernetes.dynamic.test_client": "a test of theirs",
            "kubernetes.dynamic.test_discovery": "a test of theirs",
            "kubernetes.leaderelection.example": "asks for a cluster when imported",
            "kubernetes.leaderelection.leaderelection_test": "a test of theirs",
        },
    ),
    ListedPackage("minio", "minio"),
    ListedPackage(
        "PIL",
        "pillow",
        {
            "PIL.FpxImagePlugin": "a format that needs olefile, which datasets do not have",
            "PIL.MicImagePlugin": "a format that needs olefile, which datasets do not have",
            "PIL.ImageTk": "for windows; the slim base has no Tk",
            "PIL._imagingtk": "for windows; the slim base has no Tk",
            "PIL._tkinter_finder": "for windows; the slim base has no Tk",
            "PIL._typing": "for type checkers; does not import on Python 3.11",
        },
    ),
    ListedPackage("tenacity", "tenacity", {"tenacity.tornadoweb": "for programs on tornado"}),
    ListedPackage(
        "torchvision", "torchvision", {"torchvision.io.video": "imports a package that exists only where it is made"}
    ),
    ListedPackage(
        "ultralytics",
        "ultralytics",
        {
            "ultralytics.nn.text_model": "prompts by text, which need CLIP",
            "ultralytics.trackers": "tracking over video, which needs lap",
        },
    ),
    ListedPackage("yaml", "pyyaml"),
)

_EXTENSIONS = tuple(suffix for suffix in EXTENSION_SUFFIXES if suffix != ".so")
"""A bare `.so` is as often a library for other libraries as a module."""


def modules_of(package: ListedPackage) -> Iterator[str]:
    """Every module of an installed package by file, the left out ones excepted; the package itself comes first.

    Nothing is imported. A folder without `__init__.py` counts as well: Python imports it as a namespace.
    """
    yield package.name
    spec = importlib.util.find_spec(package.name)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        root = Path(folder)
        for file in sorted(root.rglob("*")):
            if not file.name.endswith((*SOURCE_SUFFIXES, *_EXTENSIONS)) or "__pycache__" in file.parts:
                continue
            parts = [*file.relative_to(root).parts[:-1], file.name.partition(".")[0]]
            if parts[-1] == "__main__" or not all(part.isidentifier() for part in parts):
                continue  # the one runs a program, the other cannot be named by an import
            module = ".".join([package.name, *(parts[:-1] if parts[-1] == "__init__" else parts)])
            if module != package.name and not _left_out(module, package):
                yield module


def _left_out(module: str, package: ListedPackage) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in package.left_out)
