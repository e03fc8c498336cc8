"""Import statements, and where the source of our own modules lies."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, order=True)
class ImportSite:
    """One import statement of our code that takes something from a package that is not ours."""

    file: str
    """Relative to the package's parent, with slashes: `kfp_gate/storage.py`."""
    line: int
    module: str
    """What is imported, or imported from: `PIL.Image`."""
    names: tuple[str, ...] = ()
    """The names after `from module import`, or none."""
    optional: bool = False
    """The code goes on without it: the statement stands in a `try` that catches its failure."""

    @property
    def package(self) -> str:
        """Top-level name: `PIL`."""
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        statement = f"from {self.module} import {', '.join(self.names)}" if self.names else f"import {self.module}"
        return f"{self.file}:{self.line}: {statement}"


@dataclass(frozen=True)
class SourceTree:
    """Where the modules of one distribution lie, which in a checkout is not under one folder."""

    packages: Mapping[str, Path]
    """Package to folder, for instance `kfp_gate` and `kfp_gate.components`."""

    def file_of(self, module: str) -> Path | None:
        """The source file of `module`, or None if it is none of ours."""
        if package := self.package_of(module):
            path = self.packages[package].joinpath(*module.removeprefix(package).split(".")[1:])
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    return file
        return None

    def owns(self, module: str) -> bool:
        """Whether `module` belongs to one of the packages, whether or not its file exists."""
        return bool(self.package_of(module))

    def package_of(self, module: str) -> str:
        """The innermost of the packages that `module` belongs to; empty if it is none of ours."""
        inside = (p for p in self.packages if module == p or module.startswith(f"{p}."))
        return max(inside, key=len, default="")


@dataclass(frozen=True)
class Reached:
    """What a walk found."""

    sites: tuple[ImportSite, ...]
    """Imports from other distributions, the standard library left out, in the order of files and lines."""
    own: tuple[ImportSite, ...]
    """Imports between our own modules."""
    modules: tuple[str, ...]
    """Our own modules that are imported."""
    missing: tuple[ImportSite, ...]
    """Imports of our own modules that do not exist."""


def installed_tree() -> SourceTree:
    """The tree of kfp-gate as it is installed here: a wheel's folder, or a checkout's."""
    folders = {}
    for package in ("kfp_gate", "kfp_gate.components"):
        spec = importlib.util.find_spec(package)  # finds a package without running it: components need kfp
        if spec and spec.submodule_search_locations:
            folders[package] = Path(spec.submodule_search_locations[0])
    return SourceTree(folders)


def checkout_tree(root: Path) -> SourceTree:
    """The tree of kfp-gate in a checkout."""
    return SourceTree({"kfp_gate": root / "src" / "kfp_gate", "kfp_gate.components": root / "components"})
