"""Who a process is, under torchrun, TrainJob, PyTorchJob, and alone."""

from pathlib import Path

import pytest

from kfp_gate.errors import InvalidInput
from kfp_gate.training.ranks import Ranks, read_ranks


def test_alone() -> None:
    assert read_ranks({}) == Ranks()


def test_torchrun_with_two_nodes_of_two() -> None:
    env = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1",
           "MASTER_ADDR": "node-0", "MASTER_PORT": "1234", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    assert read_ranks(env) == Ranks(3, 4, 1, 2, 1, "node-0", 1234, True)


def test_trainjob_with_one_process_per_pod() -> None:
    env = {"PET_NNODES": "3", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": "2", "PET_MASTER_ADDR": "job-0",
           "PET_MASTER_PORT": "29400"}  # fmt: skip
    assert read_ranks(env) == Ranks(2, 3, 0, 1, 2, "job-0", 29400)


def test_trainjob_that_leaves_the_number_of_processes_to_torchrun() -> None:
    found = read_ranks({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "1"})
    assert (found.rank, found.world_size, found.local_world_size) == (1, 2, 1)


def test_pytorchjob_with_one_process_per_pod_has_no_local_rank() -> None:
    found = read_ranks({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m", "MASTER_PORT": "23456"})
    assert (found.rank, found.world_size, found.local_rank, found.node_rank) == (1, 2, 0, 1)


def test_several_processes_per_pod_need_torchrun() -> None:
    """The node's index would be taken for the process's: two processes would both be rank 1."""
    with pytest.raises(InvalidInput, match="PET_NPROC_PER_NODE=2 without RANK"):
        read_ranks({"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "1"})


@pytest.mark.parametrize("env", [{"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "-1"}])
def test_contradictions_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(InvalidInput):
        read_ranks(env)


def test_a_rank_that_is_no_number_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kfp_gate.training import worker

    monkeypatch.setenv("RANK", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ended:
        worker.main(["--spec", str(tmp_path / "spec.json"), "--out", str(tmp_path)])
    assert ended.value.code == 2
    printed = capsys.readouterr().out
    assert 'KFP_GATE_FAILURE {"rank": 0, "kind": "user"' in printed and "Traceback" not in printed
