"""Files by URI: a local folder, and a real S3 service with all that goes wrong with one."""

import hashlib
import os
import time

import pytest
from s3_server import STRANGER_KEY, STRANGER_SECRET, CuttingProxy, s3, s3_server  # noqa: F401 - fixtures

from kfp_gate import storage
from kfp_gate.errors import InvalidInput, Unavailable
from kfp_gate.storage import local_folder, open_store

BIG = bytes(range(256)) * 20_000  # 5 MB


def test_local_store_writes_reads_lists_and_deletes(tmp_path):
    store = open_store(str(tmp_path / "new folder"))
    store.write("a/원뿔 50%.txt", b"one")
    store.write("a.txt", b"two")
    assert [(e.key, e.size) for e in store.list()] == [("a/원뿔 50%.txt", 3), ("a.txt", 3)]
    assert [e.key for e in store.list("a/")] == ["a/원뿔 50%.txt"]
    assert store.read("a.txt") == b"two" and store.open("a.txt").read() == b"two"
    store.delete("a.txt")
    assert not store.exists("a.txt")
    with pytest.raises(InvalidInput, match="does not exist"):
        store.read("a.txt")


def test_local_listing_survives_loops_and_dangling_links(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/x.txt").write_text("x")
    (tmp_path / "real/up").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    keys = [e.key for e in open_store(str(tmp_path)).list()]
    assert "real/x.txt" in keys and "linked/x.txt" in keys and "gone.txt" not in keys
    assert len(keys) < 10


def test_a_pipe_among_the_files_is_not_listed(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"x")
    os.mkfifo(tmp_path / "b.jpg")
    assert [e.key for e in open_store(str(tmp_path)).list()] == ["a.jpg"]


def test_a_failed_local_write_leaves_the_old_content_and_no_litter(tmp_path, monkeypatch):
    store = open_store(str(tmp_path))
    store.write("x", b"old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        store.write("x", b"new")
    assert store.read("x") == b"old"
    assert [e.key for e in store.list()] == ["x"]


@pytest.mark.parametrize("uri", ["s3://key:secret@host/bucket", "ftp://host/x"])
def test_unusable_uris_are_refused_without_repeating_secrets(uri):
    with pytest.raises(InvalidInput) as caught:
        open_store(uri)
    assert "secret" not in str(caught.value)


def test_a_service_that_is_not_there_is_unavailable_within_seconds(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hidden-secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setattr(storage, "FIRST_DELAY_S", 0.01)
    started = time.monotonic()
    for call in (lambda s: s.read("k"), lambda s: list(s.list()), lambda s: s.write("k", b""), lambda s: s.exists("k")):
        with pytest.raises(Unavailable) as caught:
            call(open_store("s3://bucket/prefix"))
        assert "hidden-secret" not in str(caught.value)
    assert time.monotonic() - started < 20


@pytest.mark.all_only
def test_s3_round_trip_with_unicode_keys_and_multipart(s3, tmp_path):  # noqa: F811
    s3.bucket("round-trip")
    store = open_store("s3://round-trip/data sets/원뿔")
    store.write("a b/50%.txt", b"one")
    (tmp_path / "big").write_bytes(BIG * 2)
    store.upload(tmp_path / "big", "big.bin")
    assert [(e.key, e.size) for e in store.list()] == [("a b/50%.txt", 3), ("big.bin", 2 * len(BIG))]
    assert store.read("a b/50%.txt") == b"one"
    store.download("big.bin", tmp_path / "copy/big")
    assert (tmp_path / "copy/big").read_bytes() == BIG * 2
    assert store.exists("big.bin") and not store.exists("missing")
    store.delete("big.bin")
    assert [e.key for e in store.list()] == ["a b/50%.txt"]
    store.write("empty", b"")
    assert store.read("empty") == b""


@pytest.mark.all_only
@pytest.mark.parametrize(
    ("access", "secret", "code"),
    [
        ("team:writer", "wrong-secret", "SignatureDoesNotMatch"),
        ("nobody:here", "any-secret", "SignatureDoesNotMatch"),
        (STRANGER_KEY, STRANGER_SECRET, "AccessDenied"),
    ],
)
def test_refused_credentials_are_the_callers_to_mend(s3, monkeypatch, access, secret, code):  # noqa: F811
    if "refusals" not in {b.name for b in s3.client().list_buckets()}:
        s3.bucket("refusals")
        s3.client().put_object(bucket_name="refusals", object_name="k", data=__import__("io").BytesIO(b"x"), length=1)
    for name, value in s3.environment(access, secret).items():
        monkeypatch.setenv(name, value)
    store = open_store("s3://refusals")
    for call in (lambda: store.read("k"), lambda: list(store.list()), lambda: store.write("k", b"")):
        with pytest.raises(InvalidInput, match=code) as caught:
            call()
        assert secret not in str(caught.value)


@pytest.mark.all_only
def test_missing_bucket_and_missing_object_are_told_apart(s3):  # noqa: F811
    s3.bucket("present")
    with pytest.raises(InvalidInput, match="no bucket 'absent'"):
        open_store("s3://absent/x").read("k")
    with pytest.raises(InvalidInput, match="no bucket 'absent'"):
        list(open_store("s3://absent/x").list())
    with pytest.raises(InvalidInput, match="does not exist"):
        open_store("s3://present/x").read("k")


@pytest.mark.parametrize("uri", ["s3://x/y", "s3:///x", "s3://A B/c", "s3://127.0.0.1/x", "s3://one/../two"])
def test_names_that_no_store_takes(uri, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    store = open_store(uri)
    for use in (lambda: store.read("k"), lambda: store.write("k", b"")):
        with pytest.raises(InvalidInput, match=r"(bucket|object) name"):
            use()


@pytest.mark.all_only
def test_a_download_cut_three_times_goes_on_where_it_stopped(s3, monkeypatch, tmp_path):  # noqa: F811
    s3.bucket("cuts")
    open_store("s3://cuts").write("big", BIG)
    monkeypatch.setattr(storage, "FIRST_DELAY_S", 0.01)
    proxy = CuttingProxy(s3.endpoint, after=1_500_000, cuts=3)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    open_store("s3://cuts").download("big", tmp_path / "big")
    assert proxy.cut == 3
    assert hashlib.sha256((tmp_path / "big").read_bytes()).digest() == hashlib.sha256(BIG).digest()
    # A store that cuts each answer at once is given up after the attempts, and leaves no half file.
    proxy.after, proxy.cuts, proxy.cut = 1000, 10**9, 0
    with pytest.raises(Unavailable):
        open_store("s3://cuts").download("big", tmp_path / "other")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["big"]
    proxy.close()


@pytest.mark.all_only
def test_an_object_replaced_during_a_download_is_not_stitched_together(s3, monkeypatch):  # noqa: F811
    s3.bucket("replaced")
    store = open_store("s3://replaced")
    store.write("big", BIG)
    monkeypatch.setattr(storage, "FIRST_DELAY_S", 0.01)
    proxy = CuttingProxy(s3.endpoint, after=2_000_000, cuts=1)
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
    with open_store("s3://replaced").open("big") as handle:
        first = handle.read(1_000_000)
        store.write("big", BIG[::-1])
        with pytest.raises(InvalidInput, match="replaced while it was read"):
            handle.read()
    assert first == BIG[:1_000_000]
    proxy.close()


@pytest.mark.all_only
def test_a_key_that_leaves_the_folder_is_refused_before_anything_is_fetched(s3, tmp_path):  # noqa: F811
    """`s3://bucket/prefix//x` is an object too, and as a path it would be /x of this machine."""
    s3.bucket("outside")
    target = tmp_path / "elsewhere"
    store = open_store("s3://outside/run")
    store.write(f"/{target}", b"x")
    store.write("records.npz", b"x")
    with pytest.raises(InvalidInput, match="object '/"):
        local_folder("s3://outside/run", tmp_path / "copy")
    assert not list(tmp_path.iterdir())
    store.delete(f"/{target}")
    assert [p.name for p in local_folder("s3://outside/run", tmp_path / "copy").iterdir()] == ["records.npz"]
