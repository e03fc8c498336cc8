"""What every component promises: its signature, its imports, its documentation.

`tests/components/signatures.json` freezes names, types and defaults: changing one breaks pipelines that others
have written. Renew it on purpose with `KFP_GATE_RENEW=1 pytest tests/components/test_contract.py`.
"""

import ast
import importlib
import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

from kfp_gate import components

ROOT = Path(__file__).parents[2]
SIGNATURES = Path(__file__).with_name("signatures.json")
NAMES = sorted(components.__all__)


def _source(name: str) -> ast.Module:
    return ast.parse((ROOT / "components" / name / "component.py").read_text(encoding="utf-8"))


def _interface(name: str) -> dict[str, dict[str, object]]:
    spec = getattr(components, name).component_spec
    return {
        "inputs": {k: [i.type, i.default if i.optional else "required"] for k, i in (spec.inputs or {}).items()},
        "outputs": {k: o.type for k, o in (spec.outputs or {}).items()},
    }


def test_signatures_are_frozen() -> None:
    now = {name: _interface(name) for name in NAMES}
    if os.environ.get("KFP_GATE_RENEW"):
        SIGNATURES.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    assert now == json.loads(SIGNATURES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", NAMES)
def test_module_level_imports_are_the_standard_library_and_kfp(name: str) -> None:
    modules = []
    for node in _source(name).body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    allowed = {*sys.stdlib_module_names, "kfp"}
    # The image's name is needed where the component is declared, and its module needs the standard library alone.
    assert [m for m in modules if m.split(".")[0] not in allowed] == ["kfp_gate.images.names"]


@pytest.mark.parametrize("name", NAMES)
def test_what_a_body_imports_exists(name: str) -> None:
    function = next(n for n in _source(name).body if isinstance(n, ast.FunctionDef))
    imported = [
        n for n in ast.walk(function) if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("kfp_gate")
    ]
    assert imported, "a component that calls no library would hold the logic itself"
    for node in imported:
        module = importlib.import_module(node.module or "")
        missing = [a.name for a in node.names if not _has(module, node.module or "", a.name)]
        assert not missing, f"{node.module} has no {missing}"


def _has(module: object, path: str, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{path}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_input_and_output_is_documented(name: str) -> None:
    spec = getattr(components, name).component_spec
    ports = {**(spec.inputs or {}), **(spec.outputs or {})}
    assert [p for p, s in ports.items() if not s.description] == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_installed_at_run_time(name: str) -> None:
    container = getattr(components, name).component_spec.implementation.container
    assert "pip install" not in " ".join(container.command)


def test_the_package_list_is_complete() -> None:
    """A folder that is missing from the list would be absent from the wheel and only there."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    homes = {"kfp_gate": "src/kfp_gate", "kfp_gate.components": "components", "kfp_gate.pipelines": "pipelines"}
    images = [lock.parent.name for lock in (ROOT / "images").glob("*/constraints.txt")]
    expected = {"kfp_gate.image_files", "kfp_gate.templates", *(f"kfp_gate.image_files.{name}" for name in images)}
    for package, home in homes.items():
        for init in (ROOT / home).rglob("__init__.py"):
            below = init.parent.relative_to(ROOT / home).parts
            expected.add(".".join((package, *below)))
    assert set(setup["packages"]) == expected
