"""What `images check` finds without building and without a network, each planted into a copy of this repository."""

import re

import pytest

from images.conftest import rewrite
from kfp_gate.errors import InvalidInput
from kfp_gate.images.check import (
    EVALUATION_STACK,
    STACK_IMAGES,
    Finding,
    base_findings,
    check,
    import_findings,
    lint_findings,
    refuse,
)
from kfp_gate.images.locks import read_locks
from kfp_gate.images.requirements import read_project


def found(project) -> set[str]:
    return {f"{finding.where}: {finding.found}" for finding in check(project, resolve=False)}


def without(path, package: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith(f"{package}==")]
    assert len(kept) == len(lines) - 1
    path.write_text("".join(kept))


def test_this_repository_is_clean(project):
    assert found(project) == set()


def test_worker_and_gate_lock_the_same_evaluation_stack(project):
    locks = read_locks(project)
    worker, gate = ({package: locks[image][package] for package in EVALUATION_STACK} for image in STACK_IMAGES)
    assert worker == gate


def test_a_package_that_only_a_function_body_imports(copy):
    """minio is imported by two methods of one class in storage.py, and nowhere at module level."""
    without(copy.root / "images" / "split_dataset" / "constraints.txt", "minio")
    findings = [finding for finding in import_findings(copy, read_locks(copy)) if "minio" in finding.found]
    assert any(re.match(r"kfp_gate/storage\.py:\d+: from minio import Minio: minio is", f.found) for f in findings)
    assert {finding.where for finding in findings} == {"images/split_dataset/constraints.txt"}


def test_an_image_without_kfp_cannot_run_a_step(copy):
    without(copy.root / "images" / "record_outcome" / "constraints.txt", "kfp")
    assert any("kfp.dsl.executor_main: kfp is not in the lock" in line for line in found(copy))


def test_the_replaced_package_counts_for_what_it_replaces(copy):
    locks = read_locks(copy)
    locks["worker"].pop("opencv-python-headless")
    lines = [finding.found for finding in import_findings(copy, locks) if "cv2" in finding.found]
    assert lines and all("opencv-python-headless" in line for line in lines)


def test_two_versions_and_a_hole_in_the_stack(copy):
    rewrite(copy.root / "images" / "worker" / "constraints.txt", "\ntorchvision==", "\ntorchvision==9.")
    without(copy.root / "images" / "validation_gate" / "constraints.txt", "pillow")
    lines = found(copy)
    assert any("torchvision has several versions: " in line and "in worker" in line for line in lines)
    assert any("pillow, part of the evaluation stack, is not locked" in line for line in lines)


def test_an_extra_that_changed_without_a_lock(copy):
    rewrite(copy.root / "pyproject.toml", "\nrecord-outcome = [", '\nrecord-outcome = ["idna>=3", ')
    lines = {line for line in found(read_project(copy.root)) if "requirements.in" in line}
    assert lines == {"images/record_outcome/requirements.in: differs from the extra 'record-outcome' of pyproject.toml"}


def test_a_new_image_needs_code_and_files(copy):
    (copy.root / "images" / "relabel").mkdir()
    rewrite(copy.root / "pyproject.toml", "\nrecord-outcome = [", "\nrelabel = []\nrecord-outcome = [")
    lines = found(read_project(copy.root))
    assert "images/relabel/requirements.in: differs from the extra 'relabel' of pyproject.toml" in lines
    assert any("in which no code of kfp-gate starts" in line for line in lines)


def test_exceptions_without_effect(copy):
    with (copy.root / "images" / "exceptions.toml").open("a") as file:
        file.write('\n[[pin]]\npackage = "nvidia-nccl-cu13"\nversion = "1.0"\nreason = "a test"\n')
        file.write('\n[[replace]]\npackage = "psycopg2"\nby = "psycopg2-binary"\nreason = "a test"\n')
    lines = found(read_project(copy.root))
    assert any("nvidia-nccl-cu13 is excepted at 1.0, but the locks hold" in line for line in lines)
    assert any("psycopg2 is replaced by 'psycopg2-binary', but the locks do not show it" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "floating"),
    [
        ("FROM python:3.11-slim\n", ["python:3.11-slim"]),
        ("from --platform=linux/amd64 python AS base\nFROM base\n", ["python"]),
        (f"FROM python:3.11@sha256:{'0' * 64} AS base\nFROM base AS build\nFROM scratch\n", []),
        (f"FROM python:3.11@sha256:{'0' * 63}\n", [f"python:3.11@sha256:{'0' * 63}"]),
        ("FROM base\nFROM python AS base\n", ["base", "python"]),
        ("# nothing\n", ["no FROM line"]),
    ],
)
def test_floating_bases(tmp_path, text, floating):
    path = tmp_path / "images" / "Containerfile"
    path.parent.mkdir()
    path.write_text(text)
    findings = base_findings(path)
    assert len(findings) == len(floating)
    assert all(name in finding.found for name, finding in zip(floating, findings, strict=True))


def test_hadolint_speaks(tmp_path):
    path = tmp_path / "images" / "Containerfile"
    path.parent.mkdir()
    path.write_text("FROM python:latest\nRUN pip install numpy\n")
    codes = {
        code for finding in lint_findings(path) for code in ("DL3007", "DL3013", "DL3042") if code in finding.found
    }
    assert codes == {"DL3007", "DL3013", "DL3042"}


def test_an_unknown_image_in_the_digests(copy):
    entry = f'{{"registry": "r", "digest": "sha256:{"0" * 64}", "content": "c", "version": "1"}}'
    (copy.root / "images" / "images.lock").write_text(f'{{"format": 1, "images": {{"gone": {entry}}}}}')
    assert "images/images.lock: 'gone' is no image" in found(copy)


def test_all_findings_in_one_message(snapshot):
    refuse([])
    with pytest.raises(InvalidInput) as caught:
        refuse(
            [
                Finding(
                    "images/worker/constraints.txt", "kfp_gate/storage.py:205: from minio import Minio: not locked"
                ),
                Finding("images/Containerfile", "floating base 'python:3.11'"),
            ]
        )
    snapshot("findings", str(caught.value))


def test_the_containerfile_ends_as_an_unprivileged_number_and_offline(project):
    text = (project.root / "images" / "Containerfile").read_text()
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001:0"]
    for switch in ("YOLO_AUTOINSTALL=false", "YOLO_OFFLINE=true", "PYTHONDONTWRITEBYTECODE=1"):
        assert switch in text
    installs = re.findall(r"pip .*(?:install|wheel) .*", text)
    assert len(installs) == 5 and all("--no-cache-dir" in line or "uninstall" in line for line in installs)
