"""The launcher's sign of life, from its writer to the rank that ends when it stops."""

import shutil
import sys
import textwrap
import time

from kfp_gate.launching.beating import Beats
from kfp_gate.launching.rank import END_PREFIX
from kfp_gate.training.heartbeat import Heartbeat


def run_rank(tmp_path, program: str, *options: str):
    """The wrapper as a pod runs it."""
    import subprocess

    return subprocess.Popen(
        [sys.executable, "-m", "kfp_gate.launching.rank", "--work", str(tmp_path / "work"), *options, "--",
         sys.executable, "-c", textwrap.dedent(program), "{spec}", "{out}"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={"PATH": "/usr/bin:/bin", "RANK": "0", "KFP_GATE_SPEC": '{"epochs": 1}'},
    )  # fmt: skip


def test_a_rank_ends_when_the_launcher_is_silent(tmp_path):
    Beats(str(tmp_path)).beat()
    rank = run_rank(
        tmp_path, "import time; print('up', flush=True); time.sleep(60)",
        "--heartbeat", str(tmp_path), "--heartbeat-bound", "1",
    )  # fmt: skip
    out, _ = rank.communicate(timeout=30)
    assert rank.returncode == 143
    assert "the launcher's heartbeat has not changed for" in out.split(END_PREFIX)[1]


def test_an_unreadable_store_is_not_a_stale_heartbeat(tmp_path):
    store = tmp_path / "store"
    Beats(str(store)).beat()
    watch = Heartbeat(str(store), bound_s=0.3)
    assert watch.stale() == ""
    shutil.move(store, tmp_path / "away")
    time.sleep(0.5)
    assert watch.stale() == ""
    # Back again, with the beat of before the outage: the bound begins only now.
    shutil.move(tmp_path / "away", store)
    assert watch.stale() == ""
    time.sleep(0.4)
    assert "has not changed" in watch.stale()


def test_a_store_that_fails_is_said_and_ends_nothing(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    beats = Beats(str(blocked / "below"))
    beats.beat()
    assert "heartbeat not written" in caplog.text


def test_rank_0_delivers_model_and_record_and_the_launcher_fetches_them(tmp_path):
    from kfp_gate.launching.delivery import download_folder

    rank = run_rank(
        tmp_path,
        """
        import sys, pathlib
        spec, out = map(pathlib.Path, sys.argv[1:])
        assert spec.read_text() == '{"epochs": 1}'
        for name in ("model/a b.pt", "model/sub/원뿔.json", "training/record.json"):
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(name)
        """,
        "--deliver", str(tmp_path / "delivery"),
    )  # fmt: skip
    out, _ = rank.communicate(timeout=30)
    assert rank.returncode == 0, out
    download_folder(str(tmp_path / "delivery/model"), tmp_path / "fetched")
    assert (tmp_path / "fetched/sub/원뿔.json").read_text() == "model/sub/원뿔.json"
    assert not (tmp_path / "fetched/delivered.json").exists()


def test_a_delivery_that_was_changed_is_refused(tmp_path):
    import pytest

    from kfp_gate.errors import Broken
    from kfp_gate.launching.delivery import download_folder, upload_folder

    (tmp_path / "m").mkdir()
    (tmp_path / "m/model.pt").write_text("weights")
    upload_folder(tmp_path / "m", str(tmp_path / "d"))
    (tmp_path / "d/model.pt").write_text("other weights")
    with pytest.raises(Broken, match="differs from the digest"):
        download_folder(str(tmp_path / "d"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_success_without_a_model_does_not_count_as_delivered(tmp_path):
    rank = run_rank(tmp_path, "pass", "--deliver", str(tmp_path / "delivery"))
    out, _ = rank.communicate(timeout=30)
    assert rank.returncode == 1
    assert "rank 0 left no model" in out
