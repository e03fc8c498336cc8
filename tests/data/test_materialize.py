"""A manifest becomes a folder that trains: again, elsewhere, from many processes, and never from changed files."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from scenes import clips, picture, write_yolo

from kfp_gate.data.manifest import write_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.data.splitting import split_dataset
from kfp_gate.errors import InvalidInput


@pytest.fixture
def made(tmp_path):
    root = write_yolo(tmp_path / "set", clips(12, 2))
    return root, split_dataset(str(root)).manifests


def tree(folder):
    return {
        p.relative_to(folder).as_posix(): str(p.readlink()) if p.is_symlink() else p.read_bytes()
        for p in sorted(folder.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_a_read_only_source_stays_untouched_and_a_second_call_changes_nothing(made, tmp_path):
    root, manifests = made
    before = tree(root)
    first = materialize(manifests, tmp_path / "local")
    content = tree(tmp_path / "local")
    assert materialize(manifests, tmp_path / "local") == first
    assert tree(tmp_path / "local") == content and tree(root) == before
    assert not any(name.startswith(".part-") for name in content)


def test_the_source_may_be_mounted_elsewhere(made, tmp_path):
    root, manifests = made
    root.rename(tmp_path / "moved")
    with pytest.raises(InvalidInput, match="24 images are not what the manifest describes"):
        materialize(manifests, tmp_path / "lost")
    local = materialize(manifests, tmp_path / "local", source_uri=str(tmp_path / "moved"))
    assert all(p.is_file() for paths in local.images.values() for p in paths)


def test_changed_images_are_named(made, tmp_path):
    root, manifests = made
    first, second = (next(manifests[s].rows()).image for s in ("train", "test"))
    picture(77, (80, 80)).save(root / first)
    data = bytearray((root / second).read_bytes())
    data[-20] ^= 1
    (root / second).write_bytes(bytes(data))
    with pytest.raises(InvalidInput) as caught:
        materialize(manifests, tmp_path / "local")
    assert [p.where for p in caught.value.problems] == [first]
    with pytest.raises(InvalidInput) as caught:
        materialize(manifests, tmp_path / "local", verify_local=True)
    assert {p.where for p in caught.value.problems} == {first, second}


def test_images_of_an_earlier_manifest_do_not_stay(made, tmp_path):
    root, manifests = made
    materialize(manifests, tmp_path / "local")
    (tmp_path / "local/labels/train.cache").write_bytes(b"stale")
    other = split_dataset(str(root), seed=5).manifests
    local = materialize(other, tmp_path / "local")
    for split in other:
        assert sorted(local.images[split]) == sorted((tmp_path / "local/images" / split).iterdir())
        assert len(list((tmp_path / "local/labels" / split).iterdir())) == len(other[split])
    assert not (tmp_path / "local/labels/train.cache").exists()


def test_a_folder_with_other_files_is_not_taken_over(made, tmp_path):
    _, manifests = made
    (tmp_path / "local/images").mkdir(parents=True)
    (tmp_path / "local/images/mine.txt").write_text("precious")
    with pytest.raises(InvalidInput, match="not ours"):
        materialize(manifests, tmp_path / "local")
    assert (tmp_path / "local/images/mine.txt").read_text() == "precious"


def test_test_alone_gives_a_yaml_that_ultralytics_accepts(made, tmp_path):
    _, manifests = made
    local = materialize({"test": manifests["test"]}, tmp_path / "local")
    assert yaml.safe_load(local.data_yaml.read_text())["val"] == "images/test"


def test_hard_file_names_keep_their_labels(tmp_path):
    names = [
        "a/images/원뿔 (소형)__1.png",
        "b/원뿔 (소형)__1.png",
        "c/x.y.z__2.PNG",
        "d/" + "long" * 55 + "__3.png",
        "e/%s [1]__4.png",
    ]
    root = write_yolo(tmp_path / "set", {n: [(i % 2, 0.5, 0.5, 0.25, 0.25)] for i, n in enumerate(names)})
    manifests = split_dataset(str(root), group_rule="none").manifests
    local = materialize(manifests, tmp_path / "local")
    seen = {}
    for split, manifest in manifests.items():
        for row, path in zip(manifest.rows(), local.images[split], strict=True):
            assert path.resolve() == (root / row.image).resolve() and path.suffix == ".png"
            assert "images" not in path.name and len(path.name.encode()) < 120
            label = Path(str(path).replace("/images/", "/labels/")).with_suffix(".txt")
            seen[row.image] = label.read_text()
    assert seen == {n: f"{i % 2} 0.5 0.5 0.25 0.25\n" for i, n in enumerate(names)}


RANK = """
import sys
from pathlib import Path
from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import materialize
manifests = {s: read_manifest(f"{sys.argv[1]}/{s}.parquet") for s in ("train", "val", "test")}
local = materialize(manifests, Path(sys.argv[2]))
assert all(p.is_file() for paths in local.images.values() for p in paths)
print(sum(len(paths) for paths in local.images.values()))
"""


def test_several_ranks_of_one_node_share_a_folder(made, tmp_path):
    _, manifests = made
    for split, manifest in manifests.items():
        write_manifest(manifest, tmp_path / "manifests" / f"{split}.parquet")
    command = [sys.executable, "-c", RANK, str(tmp_path / "manifests"), str(tmp_path / "local")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [rank.communicate(timeout=120)[0].strip() for rank in ranks] == ["24"] * 3
    assert all(rank.returncode == 0 for rank in ranks)
