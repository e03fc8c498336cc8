"""Checkpoints in storage: what a reader may find at any moment, and what a slow or dead store costs."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.errors import Broken, Unavailable
from kfp_gate.storage import LocalStore
from kfp_gate.training.checkpoints import Checkpoints
from kfp_gate.training.stored_steps import fetch, find_latest, find_steps


def step(checkpoints: Checkpoints, epoch: int, *, best: bool = False, wait: bool = True) -> bool:
    folder = checkpoints.begin_step(epoch)
    (folder / "state.pt").write_bytes(f"state {epoch}".encode())
    if best:
        (folder / "best").mkdir()
        (folder / "best" / "best-0.pt").write_bytes(f"best {epoch}".encode())
    return checkpoints.commit(epoch, folder, wait=wait)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def checkpoints(store: Path, tmp_path: Path) -> Checkpoints:
    return Checkpoints(str(store), tmp_path / "local", bound_s=0.3)


def test_the_last_step_is_found_with_best_weights_of_an_earlier_one(
    checkpoints: Checkpoints, store: Path, tmp_path: Path
) -> None:
    step(checkpoints, 1, best=True)
    for epoch in (2, 3, 4, 5):
        step(checkpoints, epoch)
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 5
    files = fetch(str(store), latest, ["state.pt", "best/best-0.pt"], tmp_path / "got")
    assert files["state.pt"].read_bytes() == b"state 5"
    assert files["best/best-0.pt"].read_bytes() == b"best 1"


def test_old_steps_go_and_what_is_pointed_at_stays(checkpoints: Checkpoints, store: Path) -> None:
    step(checkpoints, 1, best=True)
    for epoch in range(2, 8):
        step(checkpoints, epoch, best=epoch == 3)
    kept = sorted(p.relative_to(store).as_posix().split("-")[0] for p in store.rglob("state.pt"))
    assert kept == ["steps/000006", "steps/000007"]
    assert [p.read_bytes() for p in store.rglob("best-0.pt")] == [b"best 3"]


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 3))
def test_a_half_uploaded_step_is_never_picked(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    """Uploading stops after `cut` objects of the second step, and a new process looks."""
    home = tmp_path_factory.mktemp("cut")
    first = Checkpoints(str(home / "store"), home / "a", bound_s=5)
    step(first, 1, best=True)

    class Dies(LocalStore):
        left = cut

        def _count(self) -> None:
            if self.left == 0:
                raise Unavailable("gone", expected="a store", where="store", next_step="wait")
            self.left -= 1

        def upload(self, path: Path, key: str) -> None:
            self._count()
            super().upload(path, key)

        def write(self, key: str, data: bytes) -> None:
            self._count()
            super().write(key, data)

    second = Checkpoints(str(home / "store"), home / "b", bound_s=5)
    second.store = Dies(home / "store")
    step(second, 2, best=True)
    latest = find_latest(str(home / "store"))
    # state, best, manifest; without the pointer the new step is not the latest yet.
    assert latest is not None and latest.epoch == 1
    assert fetch(str(home / "store"), latest, ["state.pt"], home / "got")["state.pt"].read_bytes() == b"state 1"
    assert second.lost.epochs == [2] and "gone" in second.lost.last_error


def test_without_its_pointer_the_newest_complete_step_is_found(checkpoints: Checkpoints, store: Path) -> None:
    step(checkpoints, 1)
    step(checkpoints, 2)
    (store / "latest.json").write_text("{broken", encoding="utf-8")
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 2
    next((store / "steps").glob("000002*/manifest.json")).unlink()
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 1
    shutil.rmtree(store / "steps")
    assert find_latest(str(store)) is None


def test_all_complete_steps_are_offered_newest_first(checkpoints: Checkpoints, store: Path) -> None:
    step(checkpoints, 1)
    step(checkpoints, 2)
    assert [s.epoch for s in find_steps(str(store))] == [2, 1]
    (store / "latest.json").unlink()
    assert [s.epoch for s in find_steps(str(store))] == [2, 1]


def test_a_changed_file_is_refused(checkpoints: Checkpoints, store: Path, tmp_path: Path) -> None:
    step(checkpoints, 1)
    latest = find_latest(str(store))
    assert latest is not None
    (store / latest.files["state.pt"].key).write_bytes(b"other")
    with pytest.raises(Broken, match="another sha256"):
        fetch(str(store), latest, ["state.pt"], tmp_path / "got")
    with pytest.raises(Broken, match="not in the manifest"):
        fetch(str(store), latest, ["best/best-7.pt"], tmp_path / "got")


def test_a_store_that_comes_back_gets_the_next_step_and_the_best_weights_it_missed(
    checkpoints: Checkpoints, store: Path, tmp_path: Path
) -> None:
    class Down(LocalStore):
        def upload(self, path: Path, key: str) -> None:
            raise Unavailable("no answer", expected="a store", where="store", next_step="wait")

    up = checkpoints.store
    checkpoints.store = Down(store)
    step(checkpoints, 1, best=True)
    assert checkpoints.lost.epochs == [1]
    checkpoints.store = up
    step(checkpoints, 2)
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 2
    files = fetch(str(store), latest, ["best/best-0.pt"], tmp_path / "got")
    assert files["best/best-0.pt"].read_bytes() == b"best 1"


def test_an_error_that_nobody_foresaw_is_said_too(checkpoints: Checkpoints, store: Path) -> None:
    class Odd(LocalStore):
        def upload(self, path: Path, key: str) -> None:
            raise RuntimeError("odd, password=hunter22")

    checkpoints.store = Odd(store)
    step(checkpoints, 1)
    assert checkpoints.lost.epochs == [1]
    assert checkpoints.lost.last_error == "odd, password=***"


def test_the_last_step_is_tried_once_more_at_the_end(checkpoints: Checkpoints, store: Path) -> None:
    class Down(LocalStore):
        def upload(self, path: Path, key: str) -> None:
            raise Unavailable("no answer", expected="a store", where="store", next_step="wait")

    up = checkpoints.store
    checkpoints.store = Down(store)
    step(checkpoints, 1)
    checkpoints.store = up
    checkpoints.finish()
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 1
    assert checkpoints.lost.epochs == []


def test_a_slow_store_holds_training_no_longer_than_the_bound(checkpoints: Checkpoints, store: Path) -> None:
    release = threading.Event()

    class Slow(LocalStore):
        def upload(self, path: Path, key: str) -> None:
            release.wait(30)
            super().upload(path, key)

    checkpoints.store = Slow(store)
    started = time.monotonic()
    assert step(checkpoints, 1, wait=False) is True
    assert step(checkpoints, 2, best=True, wait=False) is False
    waited = time.monotonic() - started
    assert checkpoints.bound_s <= waited < 10
    assert checkpoints.lost.epochs == [2] and "still running" in checkpoints.lost.last_error
    release.set()
    checkpoints.finish()
    step(checkpoints, 3)
    latest = find_latest(str(store))
    assert latest is not None and latest.epoch == 3
    assert (store / latest.files["best/best-0.pt"].key).read_bytes() == b"best 2"


def test_a_slow_upload_before_the_last_step_does_not_cost_the_last_step(checkpoints: Checkpoints, store: Path) -> None:
    release = threading.Event()

    class Slow(LocalStore):
        def upload(self, path: Path, key: str) -> None:
            release.wait(30)
            super().upload(path, key)

    checkpoints.store = Slow(store)
    step(checkpoints, 1, wait=False)
    folder = checkpoints.begin_step(2)
    (folder / "best").mkdir()
    (folder / "state.pt").write_bytes(b"state 2")
    (folder / "best" / "best-0.pt").write_bytes(b"best 2")
    assert checkpoints.commit(2, folder, finished=True) is False
    release.set()
    checkpoints.finish()
    latest = find_latest(str(store))
    assert latest is not None and (latest.epoch, latest.finished) == (2, True)
    assert (store / latest.files["best/best-0.pt"].key).read_bytes() == b"best 2"
    assert checkpoints.lost.epochs == []


def test_runs_that_share_a_place_do_not_take_each_other_s_training_for_their_own(store: Path, tmp_path: Path) -> None:
    first = Checkpoints(str(store), tmp_path / "a", bound_s=5, run="monday")
    step(first, 1)
    folder = first.begin_step(9)
    (folder / "state.pt").write_bytes(b"monday")
    first.commit(9, folder, finished=True, wait=True)
    assert find_latest(str(store), run="tuesday") is None
    second = Checkpoints(str(store), tmp_path / "b", bound_s=5, run="tuesday")
    step(second, 1)
    for run, epoch, finished in (("monday", 9, True), ("tuesday", 1, False)):
        found = find_latest(str(store), run=run)
        assert found is not None and (found.run, found.epoch, found.finished) == (run, epoch, finished)
    # `resume_from` takes what was written last, whoever wrote it.
    latest = find_latest(str(store))
    assert latest is not None and latest.run == "tuesday"


def test_a_restarted_run_continues_beside_what_is_there(checkpoints: Checkpoints, store: Path, tmp_path: Path) -> None:
    step(checkpoints, 1, best=True)
    latest = find_latest(str(store))
    assert latest is not None
    again = Checkpoints(str(store), tmp_path / "again", bound_s=1)
    again.adopt(latest)
    step(again, 2)
    found = find_latest(str(store))
    assert found is not None and found.epoch == 2
    assert (store / found.files["best/best-0.pt"].key).read_bytes() == b"best 1"
    assert json.loads((store / "latest.json").read_text())["step"].startswith("steps/000002-")


def test_the_probe_leaves_nothing(checkpoints: Checkpoints, store: Path) -> None:
    assert checkpoints.probe() >= 0
    assert not [p for p in store.rglob("*") if p.is_file()]
