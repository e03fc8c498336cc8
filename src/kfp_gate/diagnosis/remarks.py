"""What is no cause of a run's own, and should be known all the same by whoever reads its diagnosis."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import pairwise

from kfp_gate.diagnosis.amounts import cores, duration, share
from kfp_gate.diagnosis.findings import BAR
from kfp_gate.diagnosis.hypotheses.crowding import cores_used
from kfp_gate.diagnosis.hypotheses.feeding import number
from kfp_gate.diagnosis.measured.observations import Observations
from kfp_gate.diagnosis.measured.quantities import known
from kfp_gate.diagnosis.measured.steady import OTHER
from kfp_gate.diagnosis.reading.lives import seconds

QUEUED = 0.2
"""Share of the time that a thread waits for a core from which it is worth a word."""

LONGEST = 200
"""Characters of a failure's message that are repeated."""

GAP_S = 60.0
"""Seconds without any line that are a gap: the sampler writes one every few seconds."""

SILENT_S = 1800.0
"""Seconds without a new line after which a run that has not ended may well be dead: storage gets new ones about once a
minute, of a long run within 20 minutes."""


def remarks(seen: Observations) -> tuple[str, ...]:
    """How it failed, whether it still writes, others on the machine, time in no phase, gaps, lost lines, an epoch that
    has not ended."""
    found = [*_failure(seen), *_silent(seen), *_others(seen), *_untold(seen), *_gaps(seen), *_lost(seen)]
    if seen.epoch is not None and not seen.epoch.counted:
        found.append("no epoch has ended: shares are of the steps alone, without validation and checkpoints")
    return tuple(found)


def _failure(seen: Observations) -> Iterator[str]:
    """The failure that came from this training and not from another rank's."""
    failures = [
        (rank, line) for rank in sorted(seen.run.ranks) for line in seen.run.last_attempt(rank)
        if line["kind"] == "failure"
    ]  # fmt: skip
    failures.sort(key=lambda pair: pair[1].get("failure") == "peer")
    if failures:
        rank, line = failures[0]
        words = (str(line.get("message") or "").splitlines() or [""])[0][:LONGEST]
        phase = f" in phase {line['phase']!r}" if line.get("phase") else ""
        kind = line.get("failure") or "of an unknown kind"
        yield f"the run failed: rank {rank}{phase}, {kind}" + (f": {words}" if words else "")


def _silent(seen: Observations) -> Iterator[str]:
    """A run that was killed leaves no end."""
    if not seen.run.running:
        return
    last = max(
        (t for lines in seen.run.ranks.values() for line in lines if (t := seconds(line)) is not None), default=None
    )
    if last is not None and (ago := time.time() - last) >= SILENT_S:
        at = datetime.fromtimestamp(last, UTC).strftime("%Y-%m-%d %H:%M UTC")
        yield (
            f"this run has not ended, and its last line is of {at}, {duration(ago)} ago: it was killed, or its lines "
            "do not get here"
        )


def _others(seen: Observations) -> Iterator[str]:
    first = seen.first
    queued = known(first.queued) if first is not None else None
    if first is None or queued is None or seen.cores is None:
        return
    used = cores_used(seen)
    if queued - (known(first.throttled) or 0.0) >= QUEUED and used is not None and used <= 0.75 * seen.cores:
        yield (
            f"the step's own thread waits {share(queued)} of the time for a core, while this run uses "
            f"{number(used)} of {cores(seen.cores)}: others on the machine take them, and all times are longer for it"
        )


def _untold(seen: Observations) -> Iterator[str]:
    first = seen.first
    if first is not None and first.step_s and first.phase(OTHER) >= BAR * first.step_s:
        yield f"{share(first.phase(OTHER) / first.step_s)} of a step is in none of its phases, and not explained here"


def _gaps(seen: Observations) -> Iterator[str]:
    for rank in sorted(seen.run.ranks):
        times = [(line, t) for line in seen.run.last_attempt(rank) if (t := seconds(line)) is not None]
        gaps = [(b - a, line) for (line, a), (_, b) in pairwise(times) if b - a >= GAP_S]
        if gaps:
            longest, line = max(gaps, key=lambda gap: gap[0])
            several = f"{len(gaps)} gaps" if len(gaps) > 1 else "a gap"
            yield (
                f"{several} in the timeline of rank {rank}, {duration(sum(g for g, _ in gaps))} in all, the longest "
                f"{duration(longest)} from {line['time'][:19]}: what happened then is unknown"
            )


def _lost(seen: Observations) -> Iterator[str]:
    lost = sum(
        count for lines in seen.run.ranks.values() for line in lines
        if isinstance(count := line.get("lines_lost"), int | float) and not isinstance(count, bool)
    )  # fmt: skip
    if lost:
        yield f"{lost:.0f} lines of the timeline were lost, as on a full disk"
