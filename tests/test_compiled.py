"""The committed YAML is what the pipelines compile to, and a cluster will accept it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import celpy
import pytest
import yaml
from kfp import components

from kfp_gate.errors import InvalidInput
from kfp_gate.pipelines import MAKERS, CompileOptions

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "compiled").glob("*.yaml"))


def _documents(file: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(file.read_text(encoding="utf-8")))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    subprocess.run([sys.executable, "-m", "kfp_gate.cli", "compile", "--out", str(folder)], check=True)
    return folder


def test_all_pipelines_are_compiled() -> None:
    assert [f.stem for f in FILES] == sorted(MAKERS)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_committed_yaml_is_fresh(file: Path, fresh: Path) -> None:
    same = (fresh / file.name).read_bytes() == file.read_bytes()
    assert same, f"{file.name} is stale: run `make compile` and commit compiled/"


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_kfp_loads_it_and_its_conditions_are_cel(file: Path) -> None:
    components.load_component_from_file(str(file))
    conditions = re.findall(r"condition: (.+(?:\n\s{12,}.+)*)", file.read_text(encoding="utf-8"))
    gated = file.stem not in ("rejudge", "diagnose")
    assert bool(conditions) == gated, "what comes after a verdict hangs on a condition"
    for text in conditions:
        expression = re.sub(r"\s+", " ", yaml.safe_load(text))
        assert expression.endswith("== true"), "only `== True` on an unnamed bool compiles to what was meant"
        celpy.Environment().compile(expression)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_only_split_and_training_are_cached(file: Path) -> None:
    cached = set()
    for tasks in _tasks(_documents(file)[0]):
        cached |= {n for n, t in tasks.items() if t.get("cachingOptions", {}).get("enableCache")}
    # Groups (the exit handler's, the condition's) carry kfp's own default and run nothing themselves.
    assert {n for n in cached if not n.startswith(("exit-handler", "condition"))} <= {
        "split-dataset",
        "launch-training",
    }


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_every_step_gets_an_image_resources_credentials_and_the_run_id(file: Path) -> None:
    pipeline, platform = _documents(file)
    executors = pipeline["deploymentSpec"]["executors"]
    for name, executor in executors.items():
        container = executor["container"]
        assert re.search(r":[0-9a-f]{12}$|@sha256:[0-9a-f]{64}$", container["image"]), name
        assert {"resourceCpuLimit", "resourceMemoryLimit"} <= set(container["resources"]), name
        settings = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"][name]
        assert all(s["optional"] for s in settings["secretAsEnv"]), name
        assert [f["name"] for f in settings["fieldPathAsEnv"]] == ["KFP_GATE_RUN_ID"], name
    on_gpu = {name for name, e in executors.items() if "accelerator" in e["container"]["resources"]}
    assert on_gpu == {"exec-preflight", "exec-validation-gate"} & set(executors)


def test_a_claim_is_mounted_where_data_is_read(tmp_path: Path) -> None:
    from kfp import compiler

    compiler.Compiler().compile(MAKERS["gate"](CompileOptions(mounts=("datasets:/data",))), str(tmp_path / "g.yaml"))
    settings = _documents(tmp_path / "g.yaml")[1]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert all(s["pvcMount"][0]["mountPath"] == "/data" for s in settings.values())


def test_the_registry_is_chosen_when_compiling(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kfp_gate.cli", "compile", "--out", str(tmp_path)]
    subprocess.run([*command, "--registry", "registry.example.com/team"], check=True)
    executors = _documents(tmp_path / "gate.yaml")[0]["deploymentSpec"]["executors"]
    assert all(e["container"]["image"].startswith("registry.example.com/team/") for e in executors.values())


def test_a_bad_mount_is_refused(tmp_path: Path) -> None:
    from kfp_gate.cli import compile_

    with pytest.raises(InvalidInput, match="datasets"):
        compile_(out=tmp_path, mount=["datasets"])


def _tasks(spec: dict[str, Any]) -> list[dict[str, Any]]:
    dags = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    return [dag["tasks"] for dag in dags]
