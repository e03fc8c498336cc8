"""Imports are tried by file, one by one, whatever a module does to the process."""

import textwrap
from pathlib import Path

import pytest

from kfp_gate.images.packages import ListedPackage, modules_of
from kfp_gate.images.probe import try_imports


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def make(files: dict[str, str]) -> None:
        for name, text in files.items():
            path = tmp_path / "brittle" / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        (tmp_path / "brittle" / "__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return make


def tried(package: ListedPackage) -> dict[str, str | None]:
    modules = list(modules_of(package))
    return dict(zip(modules, try_imports([(module, ()) for module in modules]), strict=True))


def test_every_end_of_a_process_is_named_and_the_rest_is_tried(package):
    package(
        {
            "a": "print('noise on stdout', flush=True)",
            "b": "import os\nos._exit(3)",
            "c": "import os, signal\nprint('last words', flush=True)\nos.kill(os.getpid(), signal.SIGSEGV)",
            "d": "raise SystemExit('leaves')",
            "e": "import nowhere_to_be_found",
            "f": "raise ValueError('first line\\nsecond line')",
            "g": "VALUE = 1",
        }
    )
    found = tried(ListedPackage("brittle", "brittle"))
    assert found == {
        "brittle": None,
        "brittle.a": None,
        "brittle.b": "ended the process with code 3",
        "brittle.c": "ended the process with code -11: last words",
        "brittle.d": "SystemExit: leaves",
        "brittle.e": "ModuleNotFoundError: No module named 'nowhere_to_be_found'",
        "brittle.f": "ValueError: first line",
        "brittle.g": None,
    }


def test_a_broken_sub_package_hides_nothing(package):
    """A package walk would not even list what lies below a sub-package that fails, nor a folder without __init__."""
    package(
        {
            "broken/__init__": "import nowhere_to_be_found",
            "broken/child": "",
            "namespace/child": "import nowhere_to_be_found",
            "left/out": "import nowhere_to_be_found",
            "good/__main__": "raise AssertionError('a program, not a module')",
        }
    )
    found = tried(ListedPackage("brittle", "brittle", {"brittle.left": "a test"}))
    failed = {name for name, error in found.items() if error}
    assert failed == {"brittle.broken", "brittle.broken.child", "brittle.namespace.child"}
    assert set(found) == failed | {"brittle"}


def test_names_are_tried_as_the_statement_would(package):
    package({"a": "VALUE = 1", "sub/b": ""})
    tasks = [("brittle.a", ("VALUE",)), ("brittle.a", ("OTHER",)), ("brittle.sub", ("b",)), ("brittle", ("*",))]
    assert try_imports(tasks) == [None, "ImportError: cannot import name 'OTHER' from 'brittle.a'", None, None]
