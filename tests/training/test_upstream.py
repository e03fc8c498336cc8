"""Why each override of `kfp_gate.training.trainer` is there: these fail when upstream has mended its part.

Then the override named in the test can go.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.data.manifest import read_manifest
from kfp_gate.data.materialize import materialize
from kfp_gate.training import trainer as ours_source

from .scene import make_scene

pytestmark = pytest.mark.all_only

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def upstream(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    home = tmp_path_factory.mktemp("upstream")
    scene = make_scene(home / "scene", train=8, val=6)
    manifests = {"train": read_manifest(scene.train), "val": read_manifest(scene.val)}
    data = materialize(manifests, home / "data")
    done = subprocess.run(
        [sys.executable, str(HERE / "upstream_probe.py"), str(home), str(data.data_yaml)], capture_output=True,
        text=True,
        timeout=240,
    )  # fmt: skip
    assert "FOUND " in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.split("FOUND ")[1].splitlines()[0])
    return found


def test_constructor_the_world_is_the_number_of_local_devices(upstream: dict[str, Any]) -> None:
    assert upstream["world_size"] == 0 and upstream["best_is_by_device_count"]


def test_constructor_threads_ignore_omp_num_threads(upstream: dict[str, Any]) -> None:
    import os

    assert upstream["threads"] == min(8, max(1, (os.cpu_count() or 1) - 1))


def test_setup_train_device_ids_of_none(upstream: dict[str, Any]) -> None:
    assert upstream["device_ids"] in ("ValueError", "TypeError", "AttributeError", "RuntimeError")


def test_get_dataloader_a_second_set_of_loaders_for_validation(upstream: dict[str, Any]) -> None:
    assert upstream["val_loader_images"] == 6


def test_build_optimizer_chooses_by_the_number_of_images(upstream: dict[str, Any]) -> None:
    assert upstream["optimizer_of_few"] != upstream["optimizer_of_many"]


def test_get_validator_and_validate_rectangular_batches_and_own_numbers(upstream: dict[str, Any]) -> None:
    assert upstream["val_rect"] and upstream["validator_is_upstreams"]


def test_stopper_never_stops_at_zero(upstream: dict[str, Any]) -> None:
    assert not upstream["stops_at_zero"]


def test_accumulate_a_resumed_run_steps_at_its_first_batch(upstream: dict[str, Any]) -> None:
    assert upstream["resume_steps_at_once"]


def test_save_model_keeps_half_precision_and_no_random_state(upstream: dict[str, Any]) -> None:
    assert upstream["saved_dtype"] == "torch.float16"
    assert not [k for k in upstream["saved"] if "random" in k or "rng" in k]


def test_save_metrics_a_comma_in_a_name_breaks_the_table(upstream: dict[str, Any]) -> None:
    header, row = upstream["csv_columns"]
    assert header != row


def test_handle_nan_recovery_needs_a_file_and_asks_rank_0_alone(upstream: dict[str, Any]) -> None:
    assert "no valid last.pt" in upstream["nan_without_last"]
    assert not upstream["nan_elsewhere_is_seen"]


def test_final_eval_validates_where_only_rank_0_has_the_file(upstream: dict[str, Any]) -> None:
    assert upstream["final_eval_validates"]


def test_order_the_sampler_draws_a_permutation_that_nobody_uses(upstream: dict[str, Any]) -> None:
    assert not upstream["sampler_draws_once"]


def test_every_override_is_named_here() -> None:
    """A new override needs a reason and a test: this is the list of them."""
    names = {
        n
        for n, v in vars(ours_source.RankTrainer).items()
        if not n.startswith("__") and (callable(v) or isinstance(v, property))
    }
    upstreams = {n for base in ours_source.RankTrainer.__mro__[1:] for n in vars(base)}
    overridden = {n for n in names if n in upstreams} | {"accumulate"}
    assert overridden == {
        "_setup_ddp", "_setup_train", "_build_train_pipeline", "get_dataloader", "build_optimizer", "get_validator",
        "preprocess_batch",
        "optimizer_step", "accumulate", "validate", "_handle_nan_recovery", "save_metrics", "save_model", "final_eval",
        "plot_metrics",
    }  # fmt: skip
