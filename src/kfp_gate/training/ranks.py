"""Which rank this process is, from whatever started it.

torchrun and Kubeflow's TrainJob runtime set `RANK`, `WORLD_SIZE`, `LOCAL_RANK` in every process. A pod of a
TrainJob that starts its processes itself finds `PET_*` instead. A PyTorchJob with one process per pod sets
`RANK` and `WORLD_SIZE`; with several processes per pod its `RANK` is the *node's* index and torchrun in the
pod gives each process its own.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kfp_gate.errors import InvalidInput


@dataclass(frozen=True)
class Ranks:
    """The place of one process among all.

    Attributes:
        rank: 0..world_size-1, unique over all nodes.
        world_size: number of processes over all nodes.
        local_rank: index among the processes of this node.
        local_world_size: number of processes of this node.
        node_rank: index of this node.
        address: host of rank 0.
        port: its port.
        agent_store: the store at that address is torchrun's own, nobody else may open it.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    address: str = "127.0.0.1"
    port: int = 29500
    agent_store: bool = False

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def read_ranks(environment: Mapping[str, str] | None = None) -> Ranks:
    """The ranks that an environment describes; a single process if it describes none.

    Raises:
        InvalidInput: values that are no numbers or contradict each other, or `PET_*` with several processes per
            node in a process that torchrun has not started.
    """
    env = os.environ if environment is None else environment

    def number(name: str, default: int) -> int:
        text = env.get(name, "")
        try:
            return int(text) if text != "" else default
        except ValueError:
            raise _refused(f"{name}={text!r}", "a whole number") from None

    if "WORLD_SIZE" in env or "RANK" in env:
        world, rank = number("WORLD_SIZE", 1), number("RANK", 0)
        local_world = number("LOCAL_WORLD_SIZE", 1)
        local = number("LOCAL_RANK", 0)
        node = number("GROUP_RANK", number("PET_NODE_RANK", rank // max(local_world, 1)))
    elif "PET_NNODES" in env:
        # "auto", "gpu" and "cpu" leave the number to torchrun, which did not start this process: it is the only one.
        automatic = env.get("PET_NPROC_PER_NODE", "") in ("auto", "gpu", "cpu")
        nodes, local_world = number("PET_NNODES", 1), 1 if automatic else number("PET_NPROC_PER_NODE", 1)
        if local_world > 1:
            raise _refused(
                f"PET_NPROC_PER_NODE={local_world} without RANK", "one process per pod, or torchrun as the command"
            )
        world, rank, local = nodes, number("PET_NODE_RANK", 0), 0
        node = rank
    else:
        return Ranks()
    if not (world >= 1 and 0 <= rank < world and 0 <= local < max(local_world, local + 1)):
        raise _refused(f"rank {rank} of {world}, local rank {local} of {local_world}", "0 <= rank < world size")
    return Ranks(
        rank=rank, world_size=world, local_rank=local, local_world_size=local_world, node_rank=node,
        address=env.get("MASTER_ADDR") or env.get("PET_MASTER_ADDR") or "127.0.0.1",
        port=number("MASTER_PORT", number("PET_MASTER_PORT", 29500)),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )  # fmt: skip


def _refused(found: str, expected: str) -> InvalidInput:
    return InvalidInput(
        found, expected=expected, where="the process's environment",
        next_step="start the worker with torchrun, as a TrainJob or PyTorchJob, or without any of these variables",
    )  # fmt: skip
