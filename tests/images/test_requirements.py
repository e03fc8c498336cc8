"""What an image holds follows from its extra; what departs from metadata has a reason."""

import pytest

from images.conftest import ROOT, rewrite
from kfp_gate.errors import InvalidInput
from kfp_gate.images.locks import format_lock, parse_lock
from kfp_gate.images.requirements import name_of, read_project, requirements


def test_requirements_are_the_library_the_extra_and_kfp(project):
    lines = requirements(project, "split-dataset").splitlines()[1:]
    assert set(project.dependencies) <= set(lines)
    assert set(project.extras["split-dataset"]) <= set(lines)
    assert [line for line in lines if name_of(line) == "kfp"] == ["kfp==2.17.3"]


def test_ranks_are_no_step_and_go_without_kfp(project):
    assert "kfp" not in {name_of(line) for line in requirements(project, "worker").splitlines()[1:]}


def test_an_extra_that_names_another_is_followed(copy):
    with (copy.root / "pyproject.toml").open() as file:
        text = file.read()
    head, mark, rest = text.partition("register-model = [")
    (copy.root / "pyproject.toml").write_text(head + mark + '"kfp-gate[record-outcome, split-dataset]", ' + rest)
    extra = read_project(copy.root).extras["register-model"]
    assert set(copy.extras["split-dataset"]) <= set(extra)
    assert not any(line.startswith("kfp-gate") for line in extra)


def test_an_image_without_an_extra(copy):
    (copy.root / "images" / "relabel").mkdir()
    with pytest.raises(InvalidInput, match=r"folder images/relabel without an extra 'relabel'"):
        requirements(copy, "relabel")


def test_an_exception_without_a_reason_is_refused(copy, snapshot):
    path = copy.root / "images" / "exceptions.toml"
    path.write_text('[[pin]]\npackage = "nvidia-nccl-cu13"\nversion = "2.30.4"\nreason = ""\n')
    with pytest.raises(InvalidInput) as caught:
        read_project(copy.root)
    snapshot("exception_without_reason", str(caught.value).replace(str(copy.root), "CHECKOUT"))


def test_a_folder_that_is_no_checkout(tmp_path):
    with pytest.raises(InvalidInput, match="a checkout of the kfp-gate repository"):
        read_project(tmp_path)


def test_lock_lines_that_are_no_pins_are_listed_together(snapshot):
    text = "numpy==2.4.6\ntorch>=2\nNumPy==2.4.7\n# a comment\npillow==13.0.0 ; python_version < '4'\n"
    with pytest.raises(InvalidInput) as caught:
        parse_lock(text, where="images/worker/constraints.txt")
    snapshot("lock_lines", str(caught.value))


def test_a_lock_reads_back_as_written():
    versions = {"b": "1!2.0+cu130", "a-b": "2024.1"}
    assert parse_lock(format_lock(versions), where="") == versions


def test_locks_hold_no_address_and_no_hash():
    for path in (ROOT / "images").glob("*/*"):
        if path.suffix in (".txt", ".in"):
            text = path.read_text()
            assert "://" not in text and "--" not in text.partition("\n")[2], path


def test_rewrite_refuses_to_change_nothing(tmp_path):
    (tmp_path / "a").write_text("a")
    with pytest.raises(AssertionError, match="stands 0 times"):
        rewrite(tmp_path / "a", "b", "c")
