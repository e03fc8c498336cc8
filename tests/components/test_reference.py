"""The reference pages are what the components declare, their examples compile, their metadata has the ecosystem's form.

Renew the pages with `KFP_GATE_RENEW=1 pytest tests/components`.
"""

import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from kfp import compiler
from kfp.dsl.base_component import BaseComponent

from kfp_gate import components
from kfp_gate.reference import pages as component_docs
from kfp_gate.reference import stubs as component_stubs

ROOT = Path(__file__).parents[2]
HOME = ROOT / "components"
NAMES = sorted(components.__all__)
PIPELINES = {f.stem: f.read_text(encoding="utf-8") for f in sorted((ROOT / "compiled").glob("*.yaml"))}
SEMANTIC = re.compile(r"^(==|>=|<=|~=)?\d+\.\d+\.\d+$")


@pytest.fixture(scope="module")
def pages() -> dict[str, component_docs.Page]:
    def text(name: str, file: str) -> str:
        return (HOME / name / file).read_text(encoding="utf-8")

    return {
        name: component_docs.page(
            getattr(components, name), PIPELINES, text(name, "metadata.yaml"), text(name, "example.py")
        )
        for name in NAMES
    }


def _fresh(path: Path, text: str) -> None:
    if os.environ.get("KFP_GATE_RENEW"):
        path.write_text(text, encoding="utf-8")
    assert path.is_file() and path.read_text(encoding="utf-8") == text, (
        f"{path.name} is stale: {component_docs.RENEW} and commit"
    )


@pytest.mark.parametrize("name", NAMES)
def test_page_is_fresh(name: str, pages: dict[str, component_docs.Page]) -> None:
    _fresh(HOME / name / "README.md", component_docs.render(pages[name]))


def test_catalogue_is_fresh(pages: dict[str, component_docs.Page]) -> None:
    _fresh(HOME / "README.md", component_docs.catalogue([pages[name] for name in NAMES]))


@pytest.mark.parametrize("name", NAMES)
def test_page_says_what_the_interface_says(name: str) -> None:
    """Read from the page and from the signature, independently of the generator's own view."""
    page = (HOME / name / "README.md").read_text(encoding="utf-8")
    spec = getattr(components, name).component_spec
    for port in {**(spec.inputs or {}), **(spec.outputs or {})}:
        (row,) = [line for line in page.splitlines() if line.startswith(f"| `{port}` |")]
        assert row.count(" |") >= 3 and not row.endswith("|  |"), row
    assert "None" not in page.replace("None: what", "")
    for link in re.findall(r"\]\((\.\./[^)]+)\)", page):
        assert (HOME / name / link).resolve().exists(), link


def test_pages_tell_the_resources_of_the_compiled_pipelines(pages: dict[str, component_docs.Page]) -> None:
    (use,) = [u for u in pages["validation_gate"].uses if u.pipeline == "gate"]
    assert (use.cpu, use.memory, use.gpus, use.shared_memory, use.cached) == ("4", "16Gi", 1, "2Gi", False)
    cached = {(name, use.pipeline) for name, page in pages.items() for use in page.uses if use.cached}
    # The training of `diagnose` is a measurement: a stored one would tell of other machines.
    assert cached == {
        ("split_dataset", "gate"), ("split_dataset", "gate_existing_model"), ("split_dataset", "diagnose"),
        ("launch_training", "gate"),
    }  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_example_compiles_and_uses_its_component(name: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"kfp_gate.components.{name}.example")
    (pipeline,) = [
        value for value in vars(module).values() if isinstance(value, BaseComponent) and hasattr(value, "pipeline_func")
    ]
    compiler.Compiler().compile(pipeline, str(tmp_path / "example.yaml"))
    compiled = yaml.safe_load(next(iter((tmp_path / "example.yaml").read_text(encoding="utf-8").split("\n---\n"))))
    assert f"exec-{name.replace('_', '-')}" in compiled["deploymentSpec"]["executors"]


@pytest.mark.parametrize("name", NAMES)
def test_metadata_has_the_form_of_the_ecosystem(name: str) -> None:
    """The rules of kubeflow/pipelines-components: fields, their order, semantic versions, a date with a zone."""
    metadata: dict[str, Any] = yaml.safe_load((HOME / name / "metadata.yaml").read_text(encoding="utf-8"))
    assert list(metadata) == ["name", "stability", "dependencies", "tags", "lastVerified", "ci"]
    assert metadata["name"] == name
    assert metadata["stability"] in ("alpha", "beta", "stable")
    dependencies = metadata["dependencies"]
    assert set(dependencies) == {"kubeflow", "external_services"}
    assert "Pipelines" in [d["name"] for d in dependencies["kubeflow"]]
    for dependency in dependencies["kubeflow"] + dependencies["external_services"]:
        assert set(dependency) == {"name", "version"}
        assert SEMANTIC.match(dependency["version"]), dependency
    assert metadata["tags"] and all(isinstance(tag, str) for tag in metadata["tags"])
    assert isinstance(metadata["lastVerified"], datetime) and metadata["lastVerified"] <= datetime.now(UTC)
    assert metadata["ci"] == {"skip_dependency_probe": False}


def test_metadata_asks_for_no_newer_kfp_than_is_pinned() -> None:
    pinned = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    version = re.search(r"kfp\[kubernetes\]==([\d.]+)", str(pinned["project"]["optional-dependencies"]["authoring"]))
    assert version
    for name in NAMES:
        metadata = yaml.safe_load((HOME / name / "metadata.yaml").read_text(encoding="utf-8"))
        (asked,) = [d["version"] for d in metadata["dependencies"]["kubeflow"] if d["name"] == "Pipelines"]
        as_numbers = [tuple(map(int, v.removeprefix(">=").split("."))) for v in (asked, version[1])]
        assert as_numbers == sorted(as_numbers)


# Autocompletion, types, and what an import costs

FOREIGN = (
    "torch", "torchvision", "mlflow", "ultralytics", "numpy", "pyarrow", "PIL", "cv2", "hotcoco", "minio", "pandas",
    "scipy", "matplotlib", "sklearn",
)  # fmt: skip


def _in_a_fresh_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.strip()


def test_authoring_needs_nothing_of_the_machinery() -> None:
    """Modules that kfp itself loads are its own affair; nothing of ours adds one of these."""
    listing = "import sys; print(*sorted({m.partition('.')[0] for m in sys.modules} & set(%r)))" % (FOREIGN,)  # noqa: UP031
    assert _in_a_fresh_python(f"import kfp_gate.components, kfp_gate.pipelines; {listing}") == ""


def test_authoring_loads_only_names_and_errors_of_the_library() -> None:
    code = "import kfp_gate.components, sys; print(*sorted(m for m in sys.modules if m.startswith('kfp_gate.')))"
    rooms = {m for m in _in_a_fresh_python(code).split() if not m.startswith("kfp_gate.components")}
    allowed = ("errors", "images", "images.digests", "images.names", "image_files")
    assert rooms <= {f"kfp_gate.{name}" for name in allowed}


def test_completion_shows_only_components() -> None:
    """What a prompt asks for after `from kfp_gate.components import <TAB>`: jedi reads, IPython calls dir()."""
    code = (
        "import kfp_gate.components as c; print(*dir(c)); print(*sorted(c.__all__)); from kfp_gate.components import *"
    )
    shown, listed = _in_a_fresh_python(code).splitlines()
    assert sorted(shown.split()) == listed.split() == NAMES


def test_a_prompt_shows_what_a_component_takes() -> None:
    shown = inspect.signature(components.register_model)
    assert list(shown.parameters) == list(components.register_model.component_spec.inputs)
    assert shown.parameters["alias"].default == "champion"
    assert "verdict" in (components.register_model.__doc__ or "")
    assert "status" not in inspect.signature(components.record_outcome).parameters


def test_stub_is_fresh() -> None:
    """An editor and a type checker read this and not the decorated functions, whose types kfp erases."""
    found = component_stubs.stub([getattr(components, name) for name in NAMES], component_docs.RENEW)
    _fresh(HOME / "__init__.pyi", found)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The package laid out as a wheel lays it out."""
    shutil.copytree(ROOT / "src" / "kfp_gate", tmp_path / "site" / "kfp_gate")
    shutil.copytree(HOME, tmp_path / "site" / "kfp_gate" / "components")
    return tmp_path / "site"


@pytest.mark.all_only
def test_ipython_and_editors_complete_components_only(site: Path) -> None:
    """The completers themselves: IPython's for a prompt, jedi for editors and notebooks."""
    import jedi
    from IPython.core.completerlib import module_completion

    start = "from kfp_gate.components import "
    assert sorted(set(module_completion(start))) == NAMES
    project = jedi.Project(str(site))
    listed = jedi.Script(start, project=project, path=str(site / "x.py")).complete(1, len(start))
    assert sorted(c.name for c in listed if not c.name.startswith("_")) == NAMES
    code = "from kfp_gate.components import register_model\nregister_model("
    (call,) = jedi.Script(code, project=project, path=str(site / "x.py")).get_signatures(2, len("register_model("))
    taken = {p.name for p in call.params}
    assert taken == set(components.register_model.component_spec.inputs)


@pytest.mark.all_only
def test_a_users_mypy_checks_a_pipeline(tmp_path: Path, site: Path) -> None:
    """Every wrong line is found, the right ones are accepted."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "py.typed" in setup["package-data"]["kfp_gate"]
    (tmp_path / "own.py").write_text(
        "from kfp_gate.components import launch_training, split_dataset\n"
        "split = split_dataset(dataset='s3://b/d', test_share=0.2)\n"
        "launch_training(train=split.outputs['train'], val=split.outputs['val'], epochs=20)\n"
        "split_dataset()\n"
        "split_dataset(dataset='d', test_shares=0.2)\n"
        "split_dataset(dataset='d', seed='one')\n"
        "from kfp_gate.components import lunch_training\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--ignore-missing-imports", "--cache-dir", str(tmp_path / "cache"), "own.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(site)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = re.findall(r"own\.py:(\d+): error: .*\[(.+)\]", done.stdout)
    assert found == [("4", "call-arg"), ("5", "call-arg"), ("6", "arg-type"), ("7", "attr-defined")], done.stdout
