"""High activity with little accepted output: steps whose result was thrown away and done again."""

from collections.abc import Iterable
from dataclasses import dataclass

from kfp_gate.diagnosis.amounts import duration, share
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.measured.observations import Observations
from kfp_gate.diagnosis.measured.steady import attempts, number
from kfp_gate.diagnosis.reading.runs import Line

LISTED = 6


@dataclass(frozen=True)
class _Done:
    """Work from one place in the training to another, as (epoch, batch)."""

    begin: tuple[float, float]
    end: tuple[float, float]
    seconds: float


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Time spent on steps and epochs that were done again later, over all attempts."""
    lines = seen.run.ranks.get(0) or next(iter(seen.run.ranks.values()), ())
    by_windows, by_epochs = redone(_windows(lines)), redone(_epochs(lines))
    lost, total, again = max(by_windows, by_epochs, key=lambda r: r[0] / r[1] if r[1] else 0.0)
    if not total:
        return [Unjudged("discarded_work", ("steps: none was recorded",))]
    weight = min(1.0, lost / total)
    recovers = [line for line in lines if line["kind"] == "recover"]
    resumes = sum(line["kind"] == "resume" for line in lines)
    starts = sum(line["kind"] == "start" for line in lines)
    evidence, against = [], []
    if lost > 0:
        epochs = ", ".join(f"{e:.0f}" for e in again[:LISTED]) + (", ..." if len(again) > LISTED else "")
        word = "epochs" if len(again) > 1 else "epoch"
        evidence.append(f"{duration(lost)} of {duration(total)} of steps were done again ({word} {epochs})")
    if recovers:
        why = next((line["reason"] for line in reversed(recovers) if line.get("reason")), "")
        evidence.append(f"training went back an epoch {_times(len(recovers))}" + (f": {why}" if why else ""))
    if starts > 1:
        evidence.append(f"the worker was started {starts} times and resumed {_times(resumes)}")
        ends = [line for a in attempts(lines)[:-1] for line in a if line["kind"] == "failure" and line.get("failure")]
        evidence += [f"an attempt before ended in a failure of kind {line['failure']!r}" for line in ends[:LISTED]]
    if not lost:
        against.append("no step was done twice")
    nan = bool(recovers)
    advice = (
        "Lower the learning rate (lr0), or train in fp32: the loss stops being finite" if nan
        else "Find out why the worker was started again; training resumes at the last whole epoch, so shorter epochs "
        "lose less"
    )  # fmt: skip
    return [
        Finding(
            "discarded_work", f"{share(weight)} of the work was thrown away and done again", weight, tuple(evidence),
            tuple(against),
            next_check="look at the loss just before the epochs that were done again" if nan
            else "look at the ends of the earlier attempts: eviction, preemption, memory",
            refuted_by="an attempt whose first batch follows the last one of the attempt before",
            detail={"advice": advice, "seconds": lost, "total_s": total, "recovers": len(recovers), "starts": starts,
                    "resumes": resumes},
        )
    ]  # fmt: skip


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def redone(work: Iterable[_Done]) -> tuple[float, float, list[float]]:
    """Seconds of work that later work did again, seconds of all, and the epochs it was in."""
    kept: list[_Done] = []
    lost = total = 0.0
    again: set[float] = set()
    for done in work:
        total += done.seconds
        while kept and kept[-1].end >= done.begin:
            last = kept.pop()
            part = _overlap(last, done)
            lost += last.seconds * part
            again.add(last.end[0])
            if part < 1:
                # What came before the repeated part stands.
                kept.append(_Done(last.begin, (last.end[0], done.begin[1] - 1), last.seconds * (1 - part)))
                break
        kept.append(done)
    return lost, total, sorted(again)


def _overlap(last: _Done, done: _Done) -> float:
    """Share of `last` from the beginning of `done` on."""
    if last.begin >= done.begin or last.begin[0] != done.begin[0]:
        return 1.0
    steps = last.end[1] - last.begin[1] + 1
    return min(1.0, max(0.0, (last.end[1] - done.begin[1] + 1) / steps)) if steps > 0 else 1.0


def _windows(lines: Iterable[Line]) -> Iterable[_Done]:
    for line in lines:
        batches, epoch = line.get("batches"), line.get("epoch")
        if line["kind"] != "window" or not batches or epoch is None or not line.get("seconds"):
            continue
        if batches[1] >= batches[0] and line.get("input", "usual") == "usual":
            yield _Done((epoch, batches[0]), (epoch, batches[1]), sum(line["seconds"].values()))


def _epochs(lines: Iterable[Line]) -> Iterable[_Done]:
    for line in lines:
        if (
            line["kind"] == "phases"
            and line.get("epoch") is not None
            and line.get("seconds")
            and number(line.get("steps"))
        ):
            yield _Done((line["epoch"], 0), (line["epoch"], 0), sum(line["seconds"].values()))
