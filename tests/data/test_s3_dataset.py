"""Datasets on a real S3 service: split there, and materialised here."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest
from s3_server import CuttingProxy, s3, s3_server  # noqa: F401 - fixtures
from scenes import clips, picture, write_yolo
from test_formats import coco_json, pictures

from kfp_gate import storage
from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.data.splitting import split_dataset, split_to_folder
from kfp_gate.errors import InvalidInput, Unavailable

pytestmark = pytest.mark.all_only


def digests(result):
    return {split: m.digest for split, m in result.manifests.items()}


def test_a_dataset_splits_on_s3_as_on_disk_and_its_manifests_live_there(s3, tmp_path):  # noqa: F811
    root = write_yolo(tmp_path / "set", clips(12, 3))
    s3.bucket("yolo", tmp_path)
    remote = split_to_folder("s3://yolo/set", "s3://yolo/out")
    assert digests(remote) == digests(split_dataset(str(root)))
    manifests = {s: read_manifest(f"s3://yolo/out/{s}.parquet") for s in remote.manifests}
    assert {m.source_uri for m in manifests.values()} == {"s3://yolo/set"}
    local = materialize(manifests, tmp_path / "local")
    for split, manifest in manifests.items():
        for row, path in zip(manifest.rows(), local.images[split], strict=True):
            assert not path.is_symlink() and path.read_bytes() == (root / row.image).read_bytes()
    again = split_dataset("s3://yolo/set", previous="s3://yolo/out", seed=9)
    assert digests(again) == digests(remote)


def test_packed_coco_annotations_on_s3(s3, tmp_path):  # noqa: F811
    import json
    import zipfile

    root = pictures(tmp_path / "set", "images")
    with zipfile.ZipFile(root / "annotations.zip", "w") as out:
        out.writestr("labels.json", json.dumps(coco_json()))
    s3.bucket("coco", tmp_path)
    assert digests(split_dataset("s3://coco/set")) == digests(split_dataset(str(root)))
    assert split_dataset("s3://coco/set/").coverage.images.sum() == 24


def test_wrong_secret_and_missing_bucket_stop_with_one_message(s3, monkeypatch):  # noqa: F811
    with pytest.raises(InvalidInput, match="no bucket 'nowhere'"):
        split_dataset("s3://nowhere/set")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(InvalidInput, match="SignatureDoesNotMatch") as caught:
        split_dataset("s3://nowhere/set")
    assert "wrong-secret" not in str(caught.value)


def test_downloads_survive_cuts_resume_and_notice_changed_objects(s3, monkeypatch, tmp_path):  # noqa: F811
    images = {f"images/{i:02}__0.png": [(0, 0.5, 0.5, 0.25, 0.25)] for i in range(20)}
    root = write_yolo(tmp_path / "set", images, size=(640, 480))
    s3.bucket("cut-set", root)
    manifests = split_dataset("s3://cut-set").manifests
    monkeypatch.setattr(storage, "FIRST_DELAY_S", 0.01)
    size = (root / "images/00__0.png").stat().st_size
    proxy = CuttingProxy(s3.endpoint, after=size // 2, cuts=12)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    local = materialize(manifests, tmp_path / "local", downloads=4)
    assert proxy.cut == 12
    fetched = {p.name: p.read_bytes() for paths in local.images.values() for p in paths}
    assert sorted(fetched.values()) == sorted(p.read_bytes() for p in (root / "images").iterdir())

    # A service that dies half way: what is complete stays, nothing else has its final name, and the next call goes on.
    proxy.cuts, proxy.cut, proxy.after = 10**9, 0, 200
    for path in [p for paths in local.images.values() for p in paths][:8]:
        path.unlink()
    with pytest.raises(Unavailable):
        materialize(manifests, tmp_path / "local", downloads=4)
    kept = [p for paths in local.images.values() for p in paths if p.exists()]
    assert len(kept) == 12 and all(p.read_bytes() == fetched[p.name] for p in kept)
    stamps = {p: p.stat().st_mtime_ns for p in kept}
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.endpoint)
    materialize(manifests, tmp_path / "local", downloads=4)
    assert {p: p.stat().st_mtime_ns for p in kept} == stamps  # not fetched again
    proxy.close()

    # Objects changed since the manifest: another size, the same size, gone.
    rows = list(manifests["train"].rows())[:3]
    client = s3.client()
    for row, data in ((rows[0], b"short"), (rows[1], bytes(rows[1].bytes))):
        client.put_object(bucket_name="cut-set", object_name=row.image, data=io.BytesIO(data), length=len(data))
    client.remove_object(bucket_name="cut-set", object_name=rows[2].image)
    with pytest.raises(InvalidInput, match="3 images are not what the manifest describes") as caught:
        materialize(manifests, tmp_path / "other")
    found = {p.where: p.found for p in caught.value.problems}
    assert found == {
        rows[0].image: f"5 bytes, the manifest says {rows[0].bytes}",
        rows[1].image: "same size, other content",
        rows[2].image: "missing",
    }


RANK = """
import sys
from pathlib import Path
from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import materialize
manifests = {s: read_manifest(f"s3://ranks/out/{s}.parquet") for s in ("train", "val", "test")}
print("ready", flush=True)
local = materialize(manifests, Path(sys.argv[1]), downloads=2)
print(sum(len(paths) for paths in local.images.values()))
"""


def test_a_rank_killed_while_it_downloads_does_not_hold_up_the_others(s3, tmp_path):  # noqa: F811
    root = write_yolo(tmp_path / "set", clips(40, 2), size=(320, 240))
    s3.bucket("ranks", tmp_path)
    split_to_folder("s3://ranks/set", "s3://ranks/out")
    command = [sys.executable, "-c", RANK, str(tmp_path / "local")]
    ranks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) for _ in range(3)]
    for rank in ranks:
        assert rank.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 60
    while not list((tmp_path / "local").glob("images/*/*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    ranks[0].send_signal(signal.SIGKILL)
    answers = [rank.communicate(timeout=120)[0].strip() for rank in ranks[1:]]
    assert answers == ["80", "80"]
    local = sorted(p.read_bytes() for p in (tmp_path / "local/images").glob("*/*"))
    assert local == sorted(p.read_bytes() for p in (root / "images").iterdir())


def test_a_disk_that_is_too_small_is_noticed_before_the_first_byte(s3, monkeypatch, tmp_path):  # noqa: F811
    import collections
    import shutil

    root = write_yolo(tmp_path / "set", clips(6, 1))
    picture(1).save(root / "images/clip000__000.png")
    s3.bucket("small-disk", root)
    manifests = split_dataset("s3://small-disk").manifests
    usage = collections.namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    with pytest.raises(InvalidInput, match="0 MiB free"):
        materialize(manifests, tmp_path / "local")
    assert not list((tmp_path / "local/images").glob("*/*"))
