"""The notebooks run from their first cell to their last, and are committed without what a run leaves in them.

Only the cell tagged `parameters` is replaced, as papermill would do it; everything else is executed as committed.
"""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBERED = {path.stem[:2]: path for path in NOTEBOOKS}


def _pipelines_api() -> Any:
    """The double of the pipelines' server, which lies beside the tests of `submit`."""
    name = "pipelines_api"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, ROOT / "tests" / "submitting" / f"{name}.py")
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _cells(path: Path) -> list[dict[str, Any]]:
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def _source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def test_all_notebooks_are_numbered() -> None:
    assert sorted(NUMBERED) == ["01", "02", "03", "04"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_outputs_are_stripped(path: Path) -> None:
    """Outputs hold images, paths and times: every run would be a change, and a secret could stay in one."""
    for cell in _cells(path):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, _source(cell)[:60]
        assert not set(cell["metadata"]) - {"tags"}, cell["metadata"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_one_cell_holds_all_parameters(path: Path) -> None:
    tagged = [cell for cell in _cells(path) if "parameters" in cell["metadata"].get("tags", [])]
    assert len(tagged) == 1
    assert all(re.match(r"^[a-z_, ]+ = \S", line) for line in _source(tagged[0]).splitlines())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_names_no_place_of_one_machine_and_links_what_exists(path: Path) -> None:
    text = "\n".join(map(_source, _cells(path)))
    assert not re.search(r"[\"'](/home|/root|/tmp|/Users|[A-Z]:\\\\)", text)
    for link in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / link).exists(), link


def _run(number: str, folder: Path, **parameters: Any) -> list[str]:
    """Execute a notebook in `folder`; the outputs of its code cells as text, HTML included."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(NUMBERED[number], as_version=4)
    place = next(i for i, c in enumerate(notebook.cells) if "parameters" in c.metadata.get("tags", []))
    notebook.cells[place].source += "\n" + "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    NotebookClient(
        notebook, timeout=400, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return ["".join(map(_text, c.outputs)) for c in notebook.cells if c.cell_type == "code"]


def _text(output: Any) -> str:
    data = output.get("data", {})
    image = "<png>" if "image/png" in data else ""
    return str(output.get("text", "")) + str(data.get("text/html", "")) + image


@pytest.mark.all_only
@pytest.mark.timeout(1200)  # a minute of work, five on a machine that ten others use
def test_components_one_by_one(tmp_path: Path) -> None:
    outputs = _run("01", tmp_path)
    told = "\n".join(outputs)
    made = tmp_path / "notebook-components"
    assert told.count("<png>") == 2, "the pictures of the set, and the training curve"
    assert "trained to the end: passed; stopped too early: refused" in told
    assert told.count("<iframe") == 5, "coverage, training, two reports side by side, one per class"
    verdict = json.loads((made / "trained-verdict").read_text(encoding="utf-8"))
    assert verdict["passed"] is True
    judged_again = outputs[-1]
    assert re.search(r"missed +class/bolt/map50", judged_again), judged_again[:600]
    assert re.search(r"met +class/cone/map50", judged_again), judged_again[:600]


@pytest.mark.all_only
def test_your_own_pipeline_is_compiled_and_sent(tmp_path: Path) -> None:
    double = _pipelines_api()
    refused = double.nodes(split_dataset="SUCCEEDED", validation_gate="SUCCEEDED") | {
        "condition-branches-2": "SUCCEEDED",
        "condition-3": "SKIPPED",
        "condition-4": "SUCCEEDED",
        "announce": "SUCCEEDED",
    }
    with double.PipelinesApi(script=[double.Snapshot("RUNNING"), double.Snapshot("SUCCEEDED", refused)]) as api:
        told = "\n".join(_run("02", tmp_path, endpoint=api.url, namespace="team"))
        assert api.sent == {"dataset": "s3://bucket/streets", "epochs": 20}
    assert "-Output'] == true\n    runs register-model" in told
    assert "did you mean epochs?" in told and "as a string, without a word" in told
    assert "refused by the gate" in told and "as an exit code: 3" in told


def test_your_own_pipeline_compiles_without_an_endpoint(tmp_path: Path) -> None:
    """The code cells in one fresh process: what a reader without a cluster sees."""
    import subprocess

    code = "\n".join(_source(c) for c in _cells(NUMBERED["02"]) if c["cell_type"] == "code")
    (tmp_path / "notebook.py").write_text(code, encoding="utf-8")  # kfp reads a component's source from its file
    done = subprocess.run([sys.executable, "notebook.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no endpoint: nothing was sent\n")


@pytest.mark.all_only
def test_your_own_training_command(tmp_path: Path) -> None:
    told = "\n".join(_run("03", tmp_path))
    assert "succeeded - 1 ranks ended well" in told
    assert "Refused" in told
    for cause in ("--- an exception: exception", "--- killed: killed", "--- no model: no-model"):
        assert cause in told, told[-3000:]
    assert "labels: class 7, but there are 4 names" in told


@pytest.mark.all_only
def test_why_it_is_slow(tmp_path: Path) -> None:
    outputs = _run("04", tmp_path)
    told = "\n".join(outputs)
    assert "transform TargetMaps takes" in outputs[2].splitlines()[0] + outputs[2].splitlines()[1]
    assert re.search(r"part transform:TargetMaps +\S+ \w+ +-> ", told)
    assert "TargetMaps" not in outputs[3].rpartition("now: ")[2], "the change ended it"
    assert told.count("<iframe") == 1
