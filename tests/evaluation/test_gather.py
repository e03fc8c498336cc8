"""Ranks give rank 0 all records, through the process group, whatever the shards."""

import os
import socket
from pathlib import Path

import numpy as np
import pytest

from kfp_gate.evaluation.columns import Records, columns
from kfp_gate.evaluation.metrics import compute
from kfp_gate.evaluation.records import Matcher

from .coco import generate, records_of

SHARDS = {
    "one rank": [list(range(40))],
    "two even": [list(range(0, 40, 2)), list(range(1, 40, 2))],
    "three uneven": [list(range(31)), [31], list(range(32, 40))],
    "three, one empty": [[5, 3], [], [i for i in range(40) if i not in (3, 5)]],
    "two, rank 0 empty": [[], list(range(40))],
}


def shard(indices: list[int], detail: bool, crowds: bool) -> Records:
    """Images 0 to 39; only image 7 may hold crowds, so that one shard alone has that column."""
    pictures = generate(np.random.default_rng(3), images=40, score_levels=6)
    matcher = Matcher(4, detail=detail)
    for i in indices:
        p = pictures[i]
        crowd = np.arange(len(p.crowd)) % 2 == 0 if crowds and i == 7 else p.crowd
        matcher.add(i, p.boxes, p.scores, p.classes, p.truth_boxes, p.truth_classes, crowd=crowd, size=(640, 640))
    return matcher.finish()


def rank_main(rank: int, port: int, shards: list[list[int]], detail: bool, crowds: bool, out: str) -> None:
    import torch.distributed as dist

    from kfp_gate.evaluation import gather

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=len(shards))
    gather.CHUNK_BYTES = 1000  # many messages
    found = gather.gather_records(shard(shards[rank], detail, crowds))
    if rank == 0:
        np.savez(out, **columns(found))
    else:
        assert found is None
    dist.destroy_process_group()


def run_ranks(shards: list[list[int]], detail: bool, crowds: bool, out: Path) -> Records:
    import torch.multiprocessing as mp

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.start_processes(
        rank_main, (port, shards, detail, crowds, str(out)), nprocs=len(shards), start_method="fork", join=True
    )
    with np.load(out) as arrays:
        return Records(**{n: arrays[n] for n in arrays.files})


@pytest.mark.parametrize("case", SHARDS)
@pytest.mark.parametrize(("detail", "crowds"), [(False, False), (True, True)])
def test_equal_to_one_process(case: str, detail: bool, crowds: bool, tmp_path: Path) -> None:
    alone = shard(list(range(40)), detail, crowds)
    gathered = run_ranks(SHARDS[case], detail, crowds, tmp_path / "out.npz")
    for name, column in columns(alone).items():
        np.testing.assert_array_equal(column, columns(gathered)[name], err_msg=name)
    names = ["a", "b", "c", "d"]
    assert dict(compute(gathered, names)) == dict(compute(alone, names))


def test_eight_bytes_a_detection() -> None:
    records = records_of(generate(np.random.default_rng(0)), 4, detail=False)
    per_detection = [c for c in columns(records).values() if len(c) == len(records.scores)]
    assert sum(c.nbytes for c in per_detection) == 8 * len(records.scores)
