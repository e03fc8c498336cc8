"""Which tool builds, and what is said when none can."""

import json
from pathlib import Path

import pytest

from kfp_gate.errors import Broken, InvalidInput, Unavailable
from kfp_gate.images.build import bill_of_materials, build
from kfp_gate.images.builders import Builder, find_builder
from kfp_gate.images.locks import read_locks


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A PATH that holds nothing but the given programs, each a line of shell."""

    def make(**programs: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        for name, line in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{line}\n")
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    return make


def test_no_tool_at_all(tools, snapshot):
    tools()
    with pytest.raises(Unavailable) as caught:
        find_builder()
    snapshot("no_builder", str(caught.value))


def test_a_client_without_an_engine_is_passed_over(tools):
    tools(docker="echo 'Cannot connect to the Docker daemon' >&2; exit 1", buildah="exit 0")
    assert find_builder().name == "buildah"
    with pytest.raises(Unavailable, match="docker: Cannot connect to the Docker daemon"):
        find_builder("docker")


def test_the_first_that_works_is_taken(tools):
    tools(docker="exit 0", podman="exit 0")
    assert find_builder().name == "docker"
    assert find_builder("podman").name == "podman"
    with pytest.raises(InvalidInput, match="one of docker, podman, buildah"):
        find_builder("kaniko")


def test_a_failed_build_shows_its_last_lines(tools, tmp_path):
    tools(buildah="i=0; while [ $i -lt 50 ]; do i=$((i+1)); echo line $i; done; exit 7")
    with pytest.raises(Broken) as caught:
        Builder("buildah", str(tmp_path / "bin" / "buildah")).build(tmp_path, tmp_path / "Containerfile", "t", {}, {})
    said = str(caught.value)
    assert "exit code 7 of buildah" in said and "line 50" in said and "line 20\n" not in said


def test_a_push_without_a_digest_is_not_recorded(tools, tmp_path):
    tools(docker="echo pushed", buildah="exit 0")
    for name in ("docker", "buildah"):
        with pytest.raises(Broken, match="digest '' after the push"):
            Builder(name, str(tmp_path / "bin" / name)).push("registry.example.com/t")


def test_arguments_reach_every_tool(tools, copy, tmp_path):
    """The command line as it is built; real builds are in test_real_builds."""
    log = tmp_path / "said"
    tools(docker=f'echo "$@" >> {log}; echo "latest: digest: sha256:{"a" * 64} size: 1"')
    (built,) = build(copy, ["preflight"], registry="r.example.com/t", push=True, options=["--pull"], bills=tmp_path)
    version, build_line, push_line = log.read_text().splitlines()
    assert version == "version"
    assert "--build-arg COMPONENT=validation_gate" in build_line and f"--pull {copy.root}" in build_line
    assert push_line == f"push {built.tag}" and built.tag.startswith("r.example.com/t/validation-gate:")
    assert json.loads((copy.root / "images" / "images.lock").read_text())["images"]["validation-gate"]["digest"] == (
        f"sha256:{'a' * 64}"
    )


def test_an_unknown_component_stops_before_anything_is_built(tools, copy):
    tools(docker="exit 0")
    with pytest.raises(InvalidInput, match="component 'gaet'"):
        build(copy, ["gaet"])


def test_a_bill_of_materials_is_the_lock_and_is_the_same_twice(project, tmp_path):
    first = bill_of_materials(project, "record-outcome", tmp_path / "a").read_bytes()
    assert bill_of_materials(project, "record-outcome", tmp_path / "b").read_bytes() == first
    bill = json.loads(first)
    assert {c["name"]: c["version"] for c in bill["components"]} == read_locks(project)["record-outcome"]
    assert bill["metadata"]["component"]["name"] == "kfp-gate"
