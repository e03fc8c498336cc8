"""What is written for a run under Nsight Systems; that it runs is shown in test_close_look.py."""

import shlex
from pathlib import Path

import pytest

from kfp_gate.data.manifest import read_manifest
from kfp_gate.training.reproduction import write_reproduction
from kfp_gate.training.spec import TrainingSpec

from .scene import make_scene


def write(folder: Path, data: Path, **more: int | bool | str) -> tuple[list[str], TrainingSpec]:
    scene = make_scene(data, train=6, val=4)
    manifests = {"train": read_manifest(scene.train), "val": read_manifest(scene.val)}
    settings = {k: more.pop(k) for k in ("base_model", "batch") if k in more}
    spec = TrainingSpec(
        train_manifest=str(scene.train), val_manifest=str(scene.val), source_uri="s3://b/원뿔 images", profile_steps=7,
        checkpoint_uri="s3://b/run", run_id="run-1", tracking_uri="http://mlflow:5000", heartbeat_bound_s=30.0,
        overrides={"optimizer": "auto", "mosaic": 0.5}, **settings,  # type: ignore[arg-type]
    )  # fmt: skip
    arguments = {"ranks": 1, "local_ranks": 1, "cuda": True, **more}
    command = write_reproduction(folder, spec, manifests, optimizer={"optimizer": "MuSGD", "lr0": 0.01}, **arguments)  # type: ignore[arg-type]
    return shlex.split(command), TrainingSpec.read(folder / "spec.json")


def test_a_run_of_its_own_that_touches_nothing_of_the_first(tmp_path: Path) -> None:
    command, again = write(tmp_path / "profile", tmp_path / "data", batch=16)
    assert command[:2] == ["nsys", "profile"] and "--capture-range=cudaProfilerApi" in command
    assert command[-5:] == ["kfp-gate-worker", "--spec", "spec.json", "--out", "again"]
    assert (again.train_manifest, again.val_manifest, again.source_uri) == (
        "train.parquet", "val.parquet", "s3://b/원뿔 images",
    )  # fmt: skip
    assert (again.profile_steps, again.probe_steps, again.batch) == (7, 1, 16)
    assert again.overrides == {"optimizer": "MuSGD", "mosaic": 0.5, "lr0": 0.01}
    assert not any((again.checkpoint_uri, again.run_id, again.tracking_uri, again.heartbeat_bound_s))
    assert len(read_manifest(tmp_path / "profile" / "train.parquet")) == 6
    assert str(tmp_path) not in (tmp_path / "profile" / "spec.json").read_text()


@pytest.mark.parametrize(("ranks", "local", "batch", "found"), [(4, 2, 64, 32), (4, 1, 64, 16), (3, 3, 10, 9)])
def test_as_many_ranks_as_one_machine_had_with_their_share_of_the_batch(
    tmp_path: Path, ranks: int, local: int, batch: int, found: int
) -> None:
    command, again = write(tmp_path / "p", tmp_path / "data", ranks=ranks, local_ranks=local, batch=batch)
    assert again.batch == found
    assert ("torchrun" in command) == (local > 1)
    assert f"--nproc-per-node={local}" in command or local == 1


def test_on_a_cpu_nothing_waits_for_a_cuda_profiler(tmp_path: Path) -> None:
    command, _ = write(tmp_path / "p", tmp_path / "data", cuda=False)
    assert not any("cuda" in word for word in command)


def test_weights_of_this_machine_are_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base.pt").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    _, again = write(tmp_path / "p", tmp_path / "data", base_model="base.pt")
    assert again.base_model == str(tmp_path / "base.pt")
