"""The locks resolve, to themselves; what does not fit together is named. These ask the package index for metadata."""

import pytest

from images.conftest import rewrite
from kfp_gate.errors import InvalidInput, Unavailable
from kfp_gate.images import locks
from kfp_gate.images.check import resolution_findings
from kfp_gate.images.refresh import adopt
from kfp_gate.images.requirements import read_project

pytestmark = pytest.mark.all_only


def lock_file(project, image: str):
    return project.folder(image) / "constraints.txt"


def test_the_locks_are_a_fixpoint(project):
    held = locks.read_locks(project)
    assert resolution_findings(project, held) == []
    # And nothing is kept that an empty start would not also need.
    assert all(held[image] for image in project.images)


def test_locking_again_changes_no_file(copy):
    before = {path: path.read_bytes() for path in (copy.root / "images").rglob("*") if path.is_file()}
    assert locks.lock(copy) == []
    assert {path: path.read_bytes() for path in before} == before


def test_a_pin_by_hand_that_requirements_forbid_is_named(copy):
    rewrite(lock_file(copy, "worker"), "\ntorchvision==0.29.1\n", "\ntorchvision==0.29.0\n")
    found = {f"{f.where}: {f.found}" for f in resolution_findings(copy, locks.read_locks(copy))}
    assert found == {
        "images/worker/constraints.txt: torchvision is locked at 0.29.0, resolves to 0.29.1",
    }


def test_a_package_that_nothing_needs_and_one_that_is_gone(copy):
    rewrite(lock_file(copy, "record_outcome"), "\nzipp==", "\nsix==1.17.0\nzipp==")
    rewrite(lock_file(copy, "register_model"), "\nminio==7.2.20\n", "\n")
    found = {f.found for f in resolution_findings(copy, locks.read_locks(copy)) if "register" in f.where}
    assert "minio is locked at no version, resolves to 7.2.20" in found


def test_requirements_that_contradict_each_other_give_the_chain(copy):
    rewrite(copy.root / "pyproject.toml", "\nrecord-outcome = [", '\nrecord-outcome = ["numpy<2", ')
    with pytest.raises(InvalidInput) as caught:
        locks.lock(read_project(copy.root))
    assert "numpy" in str(caught.value) and "contradict each other" in str(caught.value)


def test_an_index_that_does_not_answer(copy, tmp_path, monkeypatch):
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/")
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(Unavailable, match="could not reach the package index"):
        locks.lock(copy)


def test_an_excepted_pin_survives_locking_and_upgrading(copy):
    """The pin contradicts what torch demands of it: the reason for the file of exceptions."""
    held = locks.read_locks(copy)["worker"]["nvidia-nccl-cu13"]
    other = "2.28.9"
    assert other != held
    with (copy.root / "images" / "exceptions.toml").open("a") as file:
        file.write(f'\n[[pin]]\npackage = "nvidia-nccl-cu13"\nversion = "{other}"\nreason = "a test"\n')
    changed = locks.lock(read_project(copy.root))
    assert {(c.package, c.before, c.after) for c in changed} == {("nvidia-nccl-cu13", held, other)}
    locks.lock(read_project(copy.root), upgrade=True)
    upgraded = locks.read_locks(copy)
    assert upgraded["worker"]["nvidia-nccl-cu13"] == upgraded["validation-gate"]["nvidia-nccl-cu13"] == other
    assert upgraded["worker"]["kfp" if "kfp" in upgraded["worker"] else "torch"]
    assert "opencv-python" not in upgraded["worker"] and "kubernetes" in upgraded["launch-training"]


def test_an_environment_that_passed_becomes_the_lock_of_all(copy):
    """What `images refresh` does after it verified: one version everywhere, only what the image needs."""
    versions = locks.read_locks(copy)["split-dataset"] | {"tenacity": "9.1.2", "pytest": "8.0.0"}
    changed = adopt(copy, "split-dataset", versions)
    assert {(c.package, c.after) for c in changed} == {("tenacity", "9.1.2")}
    assert {c.image for c in changed} == set(copy.images)
    assert locks.read_locks(copy)["worker"]["tenacity"] == "9.1.2"
    assert "pytest" not in locks.read_locks(copy)["split-dataset"]


def test_an_environment_that_requirements_forbid_is_refused_with_its_pins(copy, snapshot):
    before = {path: path.read_bytes() for path in (copy.root / "images").rglob("*.txt")}
    versions = locks.read_locks(copy)["worker"] | {"torchvision": "0.29.0"}
    with pytest.raises(InvalidInput) as caught:
        adopt(copy, "worker", versions)
    snapshot("refresh_forbidden", str(caught.value))
    assert {path: path.read_bytes() for path in before} == before
