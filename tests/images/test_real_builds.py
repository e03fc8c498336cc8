"""The CPU images, built for real, and their components run inside them as a cluster would run them.

About fifteen minutes alone on two cores. See `workshop.py` for what stands in for the pinned base.
"""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import yaml
from observing.replay import write_timeline

from images.conftest import ROOT, rewrite
from images.workshop import Workshop, open_workshop, registry, serving
from kfp_gate import __version__
from kfp_gate.demo import CLASSES, make_dataset
from kfp_gate.errors import Broken
from kfp_gate.images.build import build
from kfp_gate.images.digests import parse_digests
from kfp_gate.images.locks import read_locks
from kfp_gate.images.names import content_hash, folder_of, lock_digest, reference
from kfp_gate.images.requirements import Project, read_project

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

CPU_IMAGES = (
    "split-dataset", "launch-training", "judge-evaluation", "register-model", "record-outcome", "diagnose-training",
)  # fmt: skip
LARGEST = 1000
"""Bytes above the base, in MB: pyarrow and mlflow-skinny are most of it; torch would be thousands."""


@pytest.fixture(autouse=True)
def readable(tmp_path: Path) -> None:
    """Images run as a user of their own, who must be able to read what a test hands in."""
    tmp_path.chmod(0o755)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("workshop")
    yield open_workshop(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A copy of this repository: a build with push writes into it."""
    root = tmp_path_factory.mktemp("checkout") / "kfp-gate"
    names = ("pyproject.toml", "README.md", "LICENSE", ".dockerignore", "src", "components", "pipelines", "images")
    root.mkdir()
    for name in names:
        source = ROOT / name
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, root / name, ignore=skip) if source.is_dir() else shutil.copy(source, root / name)
    (root / "images" / "images.lock").write_text("")
    return read_project(root)


@pytest.fixture(scope="module")
def built(workshop: Workshop, checkout: Project, tmp_path_factory: pytest.TempPathFactory):
    """The CPU images, built one after the other and pushed to a registry on this machine."""
    logging.getLogger("kfp_gate.images").setLevel(logging.INFO)
    before = dict(os.environ)
    os.environ.update(workshop.environment)
    pushed = []
    try:
        with registry(tmp_path_factory.mktemp("registry") / "r") as address:
            for image in CPU_IMAGES:
                (one,) = build(
                    checkout, [image], registry=f"{address}/team", push=True, builder="buildah",
                    options=workshop.build_options, tls_verify=False,
                )  # fmt: skip
                pushed.append((one, parse_digests((checkout.root / "images" / "images.lock").read_text())))
            # What the registry gives for the digest is the image that was built.
            for one, _ in pushed:
                workshop.buildah("pull", "--tls-verify=false", f"{address}/team/{one.image}@{one.digest}")
    finally:
        os.environ.clear()
        os.environ.update(before)
    return pushed


@pytest.fixture(scope="module")
def tags(built) -> dict[str, str]:
    return {one.image: one.tag for one, _ in built}


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("mlflow")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts"),
    ]  # fmt: skip
    with serving(command, f"http://127.0.0.1:{port}/health", folder / "log"):
        yield f"http://127.0.0.1:{port}"


def run_step(
    workshop: Workshop, tag: str, component: str, parameters: dict, artifacts: dict[str, Path], out: Path,
    volumes: list[str], pipeline: str = "gate", **environment: str,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Run a component in its image by the command and the source that stand in the compiled pipeline.

    Parameters that are not given take the compiled pipeline's defaults; every output gets a place in `out`.
    """
    spec = next(yaml.safe_load_all((ROOT / "compiled" / f"{pipeline}.yaml").read_text()))
    name = component.replace("_", "-")
    container = spec["deploymentSpec"]["executors"][f"exec-{name}"]["container"]
    types = spec["components"][f"comp-{name}"]

    def artifact(kind: str, key: str, path: Path) -> dict:
        schema = types[f"{kind}Definitions"]["artifacts"][key]["artifactType"]
        return {"artifacts": [{"name": key, "uri": str(path), "type": schema, "metadata": {}}]}

    out.mkdir(parents=True)
    out.chmod(0o777)
    defined = types["inputDefinitions"].get("parameters", {})
    defaults = {key: value["defaultValue"] for key, value in defined.items() if "defaultValue" in value}
    outputs = types.get("outputDefinitions", {}).get("artifacts", {})
    executor_input = {
        "inputs": {
            "parameterValues": defaults | parameters,
            "artifacts": {key: artifact("input", key, path) for key, path in artifacts.items()},
        },
        "outputs": {
            "artifacts": {key: artifact("output", key, out / key) for key in outputs},
            "outputFile": str(out / "executor_output.json"),
        },
    }
    command = [*container["command"], *container["args"]]
    command = [part.replace("{{$}}", json.dumps(executor_input)) for part in command]
    with workshop.container(tag, [f"{out}:{out}:rw", *volumes]) as box:
        return box.run(*command, check=False, **environment)


def test_labels_user_and_environment(workshop, checkout, tags):
    for image, tag in tags.items():
        docker = workshop.inspect(tag)["Docker"]["config"]
        assert docker["User"] == "10001:0"
        labels = docker["Labels"]
        assert labels["org.opencontainers.image.version"] == __version__
        assert labels["kfp-gate.lock"] == lock_digest(image, checkout.root / "images")
        assert labels["kfp-gate.component"] == folder_of(image)
        variables = dict(line.split("=", 1) for line in docker["Env"])
        assert variables["YOLO_AUTOINSTALL"] == "false" and variables["YOLO_OFFLINE"] == "true"
        assert variables["KFP_GATE_IMAGE_LOCK"] == labels["kfp-gate.lock"]


def test_the_installed_set_is_the_lock_and_nothing_installs_or_is_root(workshop, checkout, tags):
    locks = read_locks(checkout)
    for image, tag in tags.items():
        with workshop.container(tag) as box:
            listed = box.python(
                """
                import importlib.metadata as m, re, sys
                for d in m.distributions(path=[p for p in sys.path if p.startswith("/opt/kfp-gate")]):
                    print(re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), d.version)
                """
            )
            assert dict(line.split() for line in listed.splitlines()) == locks[image] | {"kfp-gate": __version__}
            assert box.run("id", "-u").stdout.strip() == "10001"
            assert box.run("sh", "-c", "touch /opt/kfp-gate/lib/x", check=False).returncode != 0
            assert box.run("sh", "-c", "command -v pip pip3", check=False).stdout == ""
            for python in ("python", "/usr/local/bin/python"):
                assert "No module named pip" in box.run(python, "-m", "pip", "--version", check=False).stderr


def test_sizes(workshop, tags):
    base = workshop.inspect("localhost/kfp-gate-test-base:1")
    sizes = {}
    for image, tag in tags.items():
        listed = workshop.buildah("images", "--json", tag).stdout
        sizes[image] = json.loads(listed)[0]["size"]
    print(sizes, base["FromImage"])
    # buildah prints sizes for people: "512 MB".
    megabytes = {
        image: float(text.split()[0]) * {"MB": 1, "GB": 1000}[text.split()[1]] for image, text in sizes.items()
    }
    assert all(300 < size < 300 + LARGEST for size in megabytes.values()), megabytes


def test_bills_of_materials_name_the_lock(checkout, built):
    locks = read_locks(checkout)
    for one, _ in built:
        bill = json.loads(one.bill_of_materials.read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert {c["name"]: c["version"] for c in bill["components"]} == locks[one.image]


def test_split_dataset_runs_in_its_image(workshop, tags, tmp_path):
    data = make_dataset(tmp_path / "data 원뿔", clips=20, frames=3)
    done = run_step(
        workshop, tags["split-dataset"], "split_dataset",
        {"dataset": str(data)}, {}, tmp_path / "out", [f"{tmp_path}:{tmp_path}:ro"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    from kfp_gate.data.manifest import read_manifest

    manifests = {name: read_manifest(tmp_path / "out" / name) for name in ("train", "val", "test")}
    assert sum(map(len, manifests.values())) == 60
    assert all(manifest.classes == CLASSES for manifest in manifests.values())
    assert "<html" in (tmp_path / "out" / "coverage").read_text().lower()
    groups = [{row.group for row in manifest.rows()} for manifest in manifests.values()]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]


def test_split_dataset_runs_on_photographs(workshop, tags, tmp_path):
    photographs = ROOT.parent / "shared" / "data" / "aerial-trees"
    if not photographs.is_dir():
        pytest.skip("the photographs are not part of a clone")
    done = run_step(
        workshop, tags["split-dataset"], "split_dataset",
        {"dataset": str(photographs)}, {}, tmp_path / "out", [f"{photographs}:{photographs}:ro"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    output = json.loads((tmp_path / "out" / "executor_output.json").read_text())
    assert output["artifacts"]["train"]["artifacts"][0]["metadata"]["digest"]


def test_bad_input_ends_the_step_with_code_2_and_no_traceback(workshop, tags, tmp_path):
    parameters = {"dataset": str(tmp_path / "nowhere")}
    done = run_step(workshop, tags["split-dataset"], "split_dataset", parameters, {}, tmp_path / "out", [])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "nowhere" in done.stdout + done.stderr


def test_register_model_and_record_outcome_run_in_their_images(workshop, tags, tmp_path, mlflow):
    from mlflow import MlflowClient

    from kfp_gate.evaluation.model_folder import ModelCard, read_card, write_model_folder
    from kfp_gate.gate.verdict import Entry, Separation, Verdict, write_verdict

    (tmp_path / "weights.pt").write_bytes(b"the registry hashes weights and never opens them")
    card = ModelCard("", classes=("cone", "원뿔 (소형)", "50%"), image_size=64)
    seen = pa.table({"sha256": ["00"], "phash": ["11"], "group": ["g"]})
    model = tmp_path / "model"
    write_model_folder(model, tmp_path / "weights.pt", card, [seen])
    sha256 = read_card(model).sha256
    verdict = Verdict(
        True, (Entry("map50:min", "map50", "min", 0.5, "met", 0.75),), (), {"sha256": sha256, "classes": []},
        {"digest": "t", "split": "test"}, Separation("proven", 1),
    )  # fmt: skip
    write_verdict(verdict, tmp_path / "verdict.json")
    (tmp_path / "report.html").write_text("<p>report</p>")
    for path in (model, *model.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)

    environment = {"KFP_GATE_RUN_ID": "run-1", "MLFLOW_TRACKING_URI": mlflow}
    done = run_step(
        workshop, tags["register-model"], "register_model",
        {"registered_model": "cones", "alias": "champion", "tracking_uri": mlflow, "experiment": "in images"},
        {"verdict": tmp_path / "verdict.json", "report": tmp_path / "report.html", "model": model},
        tmp_path / "registered", [f"{tmp_path}:{tmp_path}:ro"], **environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(mlflow)
    version = client.get_model_version_by_alias("cones", "champion")
    assert version.tags["sha256"] == sha256

    state = {"state": "SUCCEEDED", "pipelineJobResourceName": "p", "pipelineTaskName": "t", "error": {}}
    done = run_step(
        workshop, tags["record-outcome"], "record_outcome",
        {"status": state, "tracking_uri": mlflow, "experiment": "in images", "registered_model": "cones"}, {},
        tmp_path / "recorded", [], **environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    experiment = client.get_experiment_by_name("in images")
    runs = client.search_runs([experiment.experiment_id])
    assert any("registered" in value for run in runs for value in run.data.tags.values()), [r.data.tags for r in runs]


def test_launch_training_says_what_it_lacks_outside_a_cluster(workshop, tags, tmp_path):
    (tmp_path / "train").write_bytes(b"")
    done = run_step(
        workshop, tags["launch-training"], "launch_training", {"backend": "trainjob"},
        {"train": tmp_path / "train", "val": tmp_path / "train"}, tmp_path / "out",
        [f"{tmp_path}:{tmp_path}:ro"],
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stdout + done.stderr
    assert "next step:" in done.stdout + done.stderr
    assert "ModuleNotFoundError" not in done.stdout + done.stderr


def test_diagnose_training_runs_in_its_image(workshop, tags, tmp_path):
    record = tmp_path / "record"
    record.mkdir()
    write_timeline("healthy", record / "timeline.jsonl")
    done = run_step(
        workshop, tags["diagnose-training"], "diagnose_training", {}, {"record": record}, tmp_path / "out",
        [f"{tmp_path}:{tmp_path}:ro"], pipeline="diagnose",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out" / "diagnosis").read_text())
    assert found["state"] == "not_enough" and found["answer"] in done.stdout, "a timeline without steps"
    assert "<html" in (tmp_path / "out" / "report").read_text()


def test_build_push_record_compile_is_one_chain(built, checkout, tmp_path):
    digests = {}
    for one, recorded in built:
        # Building one image added its entry and left the others as they were.
        assert re.fullmatch(r"sha256:[0-9a-f]{64}", one.digest)
        assert {name: entry for name, entry in recorded.items() if name != one.image} == digests
        digests = recorded
    assert set(digests) == set(CPU_IMAGES)
    for one, _ in built:
        name = reference(one.image, files=checkout.root / "images")
        assert name == f"{one.tag.partition(':' + content_hash(one.image))[0]}@{one.digest}"

    # An installed copy of the checkout compiles with these names; what was not pushed keeps its tag.
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(checkout.root)]
    subprocess.run(pip, check=True)
    program = "import sys; from kfp_gate.cli import main; sys.argv[1:] = sys.argv[1:]; main()"
    command = [sys.executable, "-c", program, "compile", "--out", str(tmp_path / "compiled")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(target)}, cwd=tmp_path)
    specs = [next(yaml.safe_load_all(file.read_text())) for file in sorted((tmp_path / "compiled").iterdir())]
    images = {
        name.removeprefix("exec-"): executor["container"]["image"]
        for spec in specs
        for name, executor in spec["deploymentSpec"]["executors"].items()
        if "container" in executor
    }
    for image in CPU_IMAGES:
        assert images[image].endswith(f"/team/{image}@{digests[image].digest}")
    assert images["validation-gate"] == f"kfp-gate/validation-gate:{content_hash('validation-gate')}"


def test_a_build_without_a_needed_package_names_the_import(workshop, checkout, tmp_path, monkeypatch):
    root = tmp_path / "spoilt"
    shutil.copytree(checkout.root, root)
    rewrite(root / "images" / "split_dataset" / "constraints.txt", "\nminio==7.2.20\n", "\n")
    for name, value in workshop.environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Broken) as caught:
        build(
            read_project(root), ["split_dataset"], registry="localhost", builder="buildah",
            options=workshop.build_options, bills=tmp_path / "bills",
        )  # fmt: skip
    said = str(caught.value)
    assert re.search(r"kfp_gate/storage\.py:\d+: from minio import Minio", said), said
    assert "No module named 'minio' (minio: found none, locked none)" in said
