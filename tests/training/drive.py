"""Runs a plan of trainings in one process, so that several trainings share one start of torch.

    python drive.py PLAN.json        [{"spec": FILE, "out": FOLDER, "port": 29501, "fault": NAME, "code": 0}, ...]

Faults are put in where the product calls the outside world or where a rank would really fail. Prints one line
`CODE n` after each training.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
    for item in plan:
        run(item)


def run(item: dict[str, Any]) -> None:
    os.environ["MASTER_PORT"] = str(item.get("port", 29500))
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import read_ranks
    from kfp_gate.training.spec import TrainingSpec
    from kfp_gate.training.worker import _on_sigterm

    ranks = read_ranks()
    out = Path(item["out"])
    private = out / f"rank{ranks.rank}"
    private.mkdir(parents=True, exist_ok=True)
    upstream.prepare(private / "config", ranks)
    from kfp_gate.training.session import Session

    undo = FAULTS[item.get("fault", "none")](ranks.rank)
    session = Session(TrainingSpec.read(Path(item["spec"])), ranks, out=out, private=private, node=socket.gethostname())
    _on_sigterm(session.end_by_signal)
    code = session.run()
    undo()
    print(f"CODE {code}", flush=True)
    if code:
        os._exit(code)


def none(_rank: int) -> Any:
    return lambda: None


def dies_in_epoch_3(rank: int) -> Any:
    """The process is gone between two batches of epoch 3, as after an eviction."""
    from kfp_gate.training.course import TrainingCourse

    original = TrainingCourse.epoch_begins

    def begins(self: Any, trainer: Any, epoch: int) -> None:
        if epoch == 3:
            print("CODE 99", flush=True)
            os._exit(99)
        original(self, trainer, epoch)

    TrainingCourse.epoch_begins = begins
    return lambda: setattr(TrainingCourse, "epoch_begins", original)


FAULTS = {f.__name__: f for f in (none, dies_in_epoch_3)}

if __name__ == "__main__":
    main()
