"""What happens between the steps: checkpoints, uploads, validation."""

from collections.abc import Sequence

from kfp_gate.diagnosis.amounts import duration, rate, share
from kfp_gate.diagnosis.findings import BAR, Finding, Unjudged
from kfp_gate.diagnosis.measured.observations import EpochSeen, Observations, RankSeen
from kfp_gate.diagnosis.measured.quantities import Unknown, known
from kfp_gate.diagnosis.measured.steady import attempts
from kfp_gate.diagnosis.reading.runs import Line

CAUSES = ("checkpoint_stall", "upload_stall", "validation")

LARGE = 0.25
"""Share of the time from which validation is worth a word, even if it costs what it must."""

SUMMED = ("load", "forward", "suppress", "match")
"""Parts of validation that are summed over threads; the others are wall time."""

NAMES = {
    "weights": "taking the averaged weights", "load": "loading images", "forward": "forward",
    "suppress": "suppressing boxes", "match": "matching boxes", "wait": "waiting for other ranks",
    "gather": "gathering what the ranks found", "metrics": "computing metrics", "broadcast": "telling all ranks",
}  # fmt: skip

FIXED = ("weights", "broadcast")
"""Parts that do not depend on the number of images."""


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """All three; unjudged until an epoch has ended."""
    epoch, first = seen.epoch, seen.first
    if epoch is None or first is None or not epoch.counted:
        why = "no steady steps" if epoch is None else "no epoch has ended"
        return [Unjudged(cause, (why,)) for cause in CAUSES]
    lines = next(
        (a for a in reversed(attempts(seen.run.ranks[first.rank])) if any(line["kind"] == "phases" for line in a)), ()
    )
    checkpoints = [line for line in lines if line["kind"] == "checkpoint"]
    return [
        _checkpoint(seen, epoch, checkpoints), _upload(seen, epoch, checkpoints, lines),
        _validation(seen, epoch, first, lines),
    ]  # fmt: skip


def _checkpoint(seen: Observations, epoch: EpochSeen, checkpoints: list[Line]) -> Finding:
    waited = known(epoch.waited) or 0.0
    stands = max(0.0, epoch.checkpoint - waited)
    weight = seen.share_of_epoch(stands)
    failed = sum(line.get("ok") is False for line in checkpoints)
    evidence = [f"training stands still {duration(stands)} an epoch of {duration(epoch.total)} to write its checkpoint"]
    if failed:
        evidence.append(f"{failed} of {len(checkpoints)} checkpoints did not get through")
    against = [f"of it {duration(waited)} more is waiting for an earlier upload"] if waited > 0.1 * stands else []
    if epoch.in_steps < 10:
        against.append(f"an epoch has only {duration(epoch.in_steps)} of steps: with more images the share shrinks")
    return Finding(
        "checkpoint_stall", f"writing checkpoints takes {share(weight)} of the time", weight, tuple(evidence),
        tuple(against),
        next_check="write a file of the checkpoint's size to the worker's folder and time it: "
        "`dd if=/dev/zero of=FOLDER/x bs=1M count=500 conv=fsync`",
        refuted_by="a standstill that is as long with a fast disk: then it is taking the state, not writing it",
        missing=() if not isinstance(epoch.waited, Unknown) else (f"waiting for uploads: {epoch.waited.reason}",),
        detail={"advice": "Give the worker a faster local disk (an emptyDir in memory or on NVMe)",
                "seconds": stands, "epoch_s": epoch.total},
    )  # fmt: skip


def _upload(seen: Observations, epoch: EpochSeen, checkpoints: list[Line], lines: Sequence[Line]) -> Finding | Unjudged:
    if isinstance(epoch.waited, Unknown):
        return Unjudged("upload_stall", (f"waiting for uploads: {epoch.waited.reason}",))
    waited = epoch.waited.value
    weight = seen.share_of_epoch(min(waited, epoch.checkpoint) if epoch.checkpoint else waited)
    uploads = [line for line in lines if line["kind"] == "upload"]
    against: list[str] = []
    evidence, missing = list[str](), list[str]()
    evidence.append(f"training waits {duration(waited)} an epoch of {duration(epoch.total)} for the upload before")
    times = [u["seconds"] for u in uploads if u.get("seconds") is not None]
    sizes = [u["bytes"] / u["seconds"] for u in uploads if u.get("bytes") and u.get("seconds")]
    if times:
        mean = sum(times) / len(times)
        (evidence if mean > epoch.total - waited else against).append(
            f"an upload takes {duration(mean)}, the epoch without waiting {duration(epoch.total - waited)}"
        )
    else:
        missing.append("seconds of the uploads: not recorded")
    if sizes:
        evidence.append(f"they arrive at {rate(sum(sizes) / len(sizes))}")
    lost = sum(line.get("ok") is False for line in checkpoints)
    if lost:
        evidence.append(f"{lost} checkpoints were given up, since the upload before still ran")
    return Finding(
        "upload_stall", f"waiting for uploads takes {share(weight)} of the time", weight, tuple(evidence),
        tuple(against),
        next_check="time an upload of the same size to checkpoint_uri from the worker's node",
        refuted_by="an upload of that size from the same node that takes less than an epoch", missing=tuple(missing),
        detail={"advice": "Put checkpoint_uri into a nearer or faster store",
                "seconds": waited, "epoch_s": epoch.total, "upload_s": sum(times) / len(times) if times else None},
    )  # fmt: skip


def _validation(seen: Observations, epoch: EpochSeen, first: RankSeen, lines: Sequence[Line]) -> Finding | Unjudged:
    weight = seen.share_of_epoch(epoch.validation)
    rows = [line for line in lines if line["kind"] == "validation" and line.get("parts")]
    parts: dict[str, float] = {}
    for row in rows:
        threads = max(1.0, row.get("threads") or 1.0)
        for name, seconds in row["parts"].items():
            parts[name] = parts.get(name, 0.0) + (seconds / threads if name in SUMMED else seconds) / len(rows)
    evidence = [f"validation takes {duration(epoch.validation)} of an epoch of {duration(epoch.total)}"]
    against, missing = [], []
    heaviest = max(parts, key=lambda n: parts[n], default="")
    if heaviest:
        shown = ", ".join(f"{n} {duration(s)}" for n, s in sorted(parts.items(), key=lambda p: -p[1])[:4])
        evidence.append(f"its parts: {shown}")
    else:
        missing.append("parts of validation: not recorded")
    expected = _expected(epoch, first, rows)
    # Where it is not known what validation must take, less than LARGE passes for it.
    excess = min(weight, 0.9 * BAR)
    if expected is not None:
        images = sum(row.get("images") or 0.0 for row in rows) / len(rows)
        if epoch.validation > 1.5 * expected:
            evidence.append(f"{images:,.0f} images of a rank should take about {duration(expected)}, by the forward of "
                            "the steps")  # fmt: skip
        else:
            against.append(f"that is what {images:,.0f} images must take, by the forward of the steps")
        excess = seen.share_of_epoch(max(0.0, epoch.validation - expected))
    named = weight if weight >= LARGE else excess
    late = "Compare the ranks' validation times: one comes late"
    advice = {
        "load": "See that the val images lie where the train images do: they wait to be read",
        "gather": late,
        "wait": late,
        **dict.fromkeys(FIXED, "Give an epoch more steps: this part takes as long for few val images as for many"),
    }.get(heaviest, "Give fewer images to val, if fewer are enough to choose an epoch by")
    title = f"validation takes {share(weight)} of the time"
    if named < weight and expected is not None:
        title = f"validation takes {share(named)} of the time beyond what its images must take"
    title += f", most of it {NAMES.get(heaviest, heaviest)}" if heaviest else ""
    return Finding(
        "validation", title, named, tuple(evidence), tuple(against),
        next_check="a run with half of the val images: it must take "
        + ("nearly as long" if heaviest in FIXED else "half as long, or its cost is not the images"),
        refuted_by="a validation that takes "
        + ("half as long with half of the images" if heaviest in FIXED else "as long with half of the images"),
        missing=tuple(missing),
        detail={"advice": advice, "seconds": epoch.validation, "share": weight, "expected_s": expected,
                "parts": parts, "heaviest": heaviest},
    )  # fmt: skip


def _expected(epoch: EpochSeen, first: RankSeen, rows: list[Line]) -> float | None:
    """Seconds that a rank's val images should take: the forward of as many train images, and reading them in turn."""
    images = sum(row.get("images") or 0.0 for row in rows) / len(rows) if rows else 0.0
    batch = first.conditions.get("rank_batch")
    if not images or not batch or epoch.steps <= 0:
        return None
    forward = first.phase("forward")
    if first.cuda:
        if first.device is None:
            return None
        forward = first.device.get("forward", 0.0)
    return images / float(batch) * forward
