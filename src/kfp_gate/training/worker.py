"""One rank of a training: `kfp-gate-worker --spec FILE --out FOLDER`.

Rank 0 writes the model artifact under OUT/model and the record under OUT/training. Everything else that a rank
writes lies in a folder of its own, OUT/rank<k>. Lines for the launcher on standard output:

    KFP_GATE_PROGRESS {"epoch": 3, "epochs": 12, "eta_s": 41.0, ...}     once an epoch
    KFP_GATE_FAILURE {"rank": 1, "kind": "broken", "message": ...}       once, last

Exit codes: 0 done, 2 an input to change, 1 broken, 137 out of memory, 143 ended by SIGTERM.
"""

import argparse
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from kfp_gate.errors import KfpGateError
from kfp_gate.training import upstream
from kfp_gate.training.progress import FAILURE, say
from kfp_gate.training.ranks import read_ranks
from kfp_gate.training.spec import TrainingSpec

log = logging.getLogger(__name__)

TERMINATION_S = 3.0
"""How long the main thread may take to end by itself after SIGTERM: less than the launcher's grace, since a thread that
hangs in a collective leaves its evidence only after this."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends in `SystemExit`."""
    parser = argparse.ArgumentParser(prog="kfp-gate-worker", description="One rank of a detector's training.")
    parser.add_argument("--spec", type=Path, required=True, help="training spec, JSON")
    parser.add_argument("--out", type=Path, required=True, help="folder for what this rank writes")
    parsed = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(levelname)s %(message)s", force=True
    )
    # Its retries of a dead server are ours to tell, once, and without the address's credentials.
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        ranks = read_ranks()
        spec = TrainingSpec.read(parsed.spec)
    except KfpGateError as error:
        named = os.environ.get("RANK", "")  # it may be what is wrong
        rank = int(named) if named.isdecimal() else 0
        say(FAILURE, rank=rank, kind="user", message=str(error), exit_code=error.exit_code)
        log.error("\n%s", error)
        raise SystemExit(error.exit_code) from None
    private = parsed.out.resolve() / f"rank{ranks.rank}"
    private.mkdir(parents=True, exist_ok=True)
    upstream.prepare(private / "config", ranks)
    # Only now: upstream reads the environment when it is first imported.
    from kfp_gate.training.session import Session

    session = Session(spec, ranks, out=parsed.out.resolve(), private=private, node=socket.gethostname())
    _on_sigterm(session.end_by_signal, busy=lambda: session.failing, heard=session.hear_signal)
    code = session.run()
    sys.stdout.flush()
    if threading.active_count() > 1:
        # Threads of collectives and uploads must not hold an ended process.
        os._exit(code)
    raise SystemExit(code)


def _on_sigterm(
    end: Callable[[], None], *, busy: Callable[[], bool] = lambda: False, heard: Callable[[], None] = lambda: None
) -> None:
    def handle(_number: int, _frame: FrameType | None) -> None:
        from kfp_gate.training.evidence import Terminated

        if busy():
            # This rank is failing already, and its launcher stops what is left: let it finish its evidence.
            return
        timer = threading.Timer(TERMINATION_S, end)
        timer.daemon = True
        timer.start()
        heard()
        # Loader processes may get the same signal: their end is not what ended this rank.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        raise Terminated("SIGTERM: the pod is being ended")

    signal.signal(signal.SIGTERM, handle)


if __name__ == "__main__":
    main()
