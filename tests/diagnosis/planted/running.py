"""Runs a planting: its ranks in processes of their own, with what the planting needs around them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_gate.launching.processes import free_port
from kfp_gate.training.spec import TrainingSpec

from .groups import control_groups
from .plantings import PLANTINGS, SETTINGS
from .scenes import make_images
from .slow_files import slow_files

LIMIT_S = 240


class CannotBePlantedError(Exception):
    """This machine does not let the cause be planted; the message says why."""


@dataclass(frozen=True)
class Ran:
    """A planting that ran: the worker's OUT, wall seconds, and how it was planted where that was not the usual way."""

    out: Path
    seconds: float
    note: str = ""


def run(name: str, home: Path, *, settings: Mapping[str, Any] | None = None) -> Ran:
    """Train.

    Args:
        name: a key of `PLANTINGS`.
        home: a new folder.
        settings: changes of the spec over the planting's own.

    Raises:
        CannotBePlantedError: no FUSE, no control groups, or not the right to use them.
        RuntimeError: a rank failed, or did not where it should, with the end of its log.
    """
    planting, started = PLANTINGS[name], time.monotonic()
    train, val = make_images(home / "data", planting.images)
    elsewhere = ""
    with ExitStack() as stack:
        source = home / "data"
        if planting.mount is not None:
            try:
                source = stack.enter_context(slow_files(home / "data", home / "slow", **vars(planting.mount)))
            except OSError as error:
                elsewhere = f"without a mount ({error.strerror}): the reader itself waits"
                if planting.elsewhere is None:
                    raise CannotBePlantedError(f"no file system can be mounted here: {error.strerror}") from None
        try:
            groups = stack.enter_context(control_groups(cores=planting.cores, memory=planting.memory))
        except OSError as error:
            raise CannotBePlantedError(f"no control group can be made here: {error}") from None
        spec = TrainingSpec(**{
            "train_manifest": str(train), "val_manifest": str(val), "source_uri": str(source), **SETTINGS,
            **planting.settings, **(settings or {}),
        })  # fmt: skip
        (home / "spec.json").write_text(spec.to_json(), encoding="utf-8")
        plan = {"planting": name, "spec": str(home / "spec.json"), "out": str(home / "out"),
                "groups": [str(g) for g in groups], "elsewhere": bool(elsewhere)}  # fmt: skip
        (home / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
        for _ in range(planting.crowd):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        _train(planting.ranks, home, fails=planting.fails)
    return Ran(home / "out", time.monotonic() - started, elsewhere)


def _train(ranks: int, home: Path, *, fails: bool) -> None:
    port, processes, logs = free_port(), [], []
    for rank in range(ranks):
        paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        if ranks > 1:
            environment |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                            "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}  # fmt: skip
        logs.append(home / f"rank{rank}.log")
        with logs[-1].open("w", encoding="utf-8") as handle:
            command = [sys.executable, "-m", "planted.rank", str(home / "plan.json")]
            processes.append(subprocess.Popen(command, stdout=handle, stderr=subprocess.STDOUT, env=environment))
    try:
        codes = [process.wait(LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) is not fails:
        raise RuntimeError("\n".join(log.read_text(encoding="utf-8")[-3000:] for log in logs))
