"""Which of the workers' starts in a store belong to its newest run, without fetching all that were ever kept there.

Each start of a worker writes under a token of its own (`timelines/<token>/rank<k>.jsonl.gz`). A location that many runs
were given holds many; the first line of each says when it began and for which pipeline run.
"""

import io
import re
import zlib
from collections.abc import Sequence

from kfp_gate.diagnosis.reading.lines import parse
from kfp_gate.diagnosis.reading.lives import seconds
from kfp_gate.errors import KfpGateError
from kfp_gate.storage import Store

_TOKEN = re.compile(r"(?:^|/)timelines/([^/]+)/rank(\d+)\.jsonl(?:\.gz)?$")

FEW = 4
"""Tokens up to which all are read."""

FIRST = 64 << 10
"""Bytes in which the first line of a timeline ends."""


def of_newest_run(store: Store, keys: Sequence[str]) -> tuple[str, ...]:
    """`keys` without those of tokens that belong to other, older runs.

    Without the name of a pipeline run the newest `FEW` tokens are kept: whether one resumed another is seen later.

    Raises:
        Unavailable: the store does not answer.
    """
    named: dict[str, list[tuple[int, str]]] = {}
    for key in keys:
        if match := _TOKEN.search(key):
            named.setdefault(match[1], []).append((int(match[2]), key))
    if len(named) <= FEW:
        return tuple(keys)
    began = {token: _first(store, min(files)[1]) for token, files in named.items()}
    order = sorted(named, key=lambda token: began[token][0], reverse=True)
    run = began[order[0]][1]
    kept = {t for t in order if began[t][1] == run} if run else set(order[:FEW])
    return tuple(k for k in keys if not (match := _TOKEN.search(k)) or match[1] in kept)


def _first(store: Store, key: str) -> tuple[float, str]:
    """When a timeline began, in seconds since 1970, and its pipeline run; (0, "") if that cannot be read."""
    try:
        with store.open(key) as handle:
            raw = handle.read(FIRST)
        if raw[:2] == b"\x1f\x8b":
            raw = zlib.decompressobj(31).decompress(raw, FIRST)
        line = parse(io.BytesIO(raw).readline())
    except (zlib.error, OSError):
        return 0.0, ""
    except KfpGateError as error:
        if error.exit_code == 1:
            raise
        return 0.0, ""
    return (seconds(line) or 0.0, line.get("run") or "") if line is not None else (0.0, "")
