"""One rank of a planted training, in a process of its own: `python -m planted.rank PLAN.json`."""

import json
import logging
import os
import socket
import sys
from pathlib import Path

from .groups import join
from .plantings import PLANTINGS


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    # Memory belongs to the group that first touched it: joined first. A quota would make every import take its time.
    join([g for g in plan["groups"] if "/memory/" in g])
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(levelname)s %(message)s", force=True)
    from kfp_gate.training import upstream
    from kfp_gate.training.ranks import read_ranks
    from kfp_gate.training.spec import TrainingSpec

    ranks, out = read_ranks(), Path(plan["out"])
    private = out / f"rank{ranks.rank}"
    private.mkdir(parents=True)
    upstream.prepare(private / "config", ranks)
    from kfp_gate.training.session import Session

    join([g for g in plan["groups"] if "/memory/" not in g])
    planting = PLANTINGS[plan["planting"]]
    planting.fault(ranks.rank)
    if plan["elsewhere"]:
        assert planting.elsewhere is not None
        planting.elsewhere(ranks.rank)
    spec = TrainingSpec.read(Path(plan["spec"]))
    code = Session(spec, ranks, out=out, private=private, node=socket.gethostname()).run()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
