"""Reading, opening, and preparing images."""

from kfp_gate.diagnosis.amounts import cores, duration, rate, share, size
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.crowding import READING, core_lost, idle_cores, robbed, without_crowd
from kfp_gate.diagnosis.hypotheses.feeding import (
    SMALL_FILE,
    Feeding,
    feeding,
    files_of,
    number,
    processes,
    shown,
    wanted,
)
from kfp_gate.diagnosis.measured.observations import Loading, Observations
from kfp_gate.diagnosis.measured.quantities import Unknown, known, reason

CAUSES = ("slow_reads", "small_files", "preparation_cpu")
COLD = 3.0
"""Times that reading is slower in the first epoch from which the files were not in memory yet."""

COMPUTES = 0.7
"""Share of its time for which a part must be on a core, or wait for one, to be called computing."""

NEARLY = 0.02
"""Share of the time below which a wait needs no explanation."""


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Slow reads, small files, and preparation on the CPU."""
    fed = feeding(seen)
    if fed is None:
        return [Unjudged(cause, ("no steady steps",)) for cause in CAUSES]
    if isinstance(fed.loading, Unknown):
        if seen.share(fed.wait) < NEARLY:
            # Whatever preparation costs, nothing waits for it.
            against = (f"a step waits {duration(fed.wait)} for images, {share(seen.share(fed.wait))} of the time",)
            return [Finding(c, f"nothing waits for images ({duration(fed.wait)} a step)", 0.0, against=against,
                            next_check="none needed while the wait is this short",
                            refuted_by="a step that waits longer for images") for c in CAUSES]  # fmt: skip
        return [Unjudged(cause, (f"parts of loading: {fed.loading.reason}",)) for cause in CAUSES]
    return [
        _slow_reads(seen, fed, fed.loading),
        _small_files(seen, fed, fed.loading),
        _preparation(seen, fed, fed.loading),
    ]


def blocked_seconds(fed: Feeding) -> tuple[float | None, float | None]:
    """Seconds a batch that belong to slow reads and to small files; None where CPU seconds are unknown.

    Opening waits for the way to a file and reading for its content. Of a small file reading waits for the way, too.
    """
    opened, read = fed.blocked("open"), fed.blocked("read")
    if opened is None or read is None or isinstance(fed.loading, Unknown):
        return None, None
    files, content = files_of(fed.loading), fed.loading.bytes
    small = files is not None and content is not None and content / files < SMALL_FILE
    if opened < read:
        return read, opened
    return (0.0, opened + read) if small else (read, opened)


def _slow_reads(seen: Observations, fed: Feeding, loading: Loading) -> Finding | Unjudged:
    seconds, _ = blocked_seconds(fed)
    read = loading.parts.get("read")
    if seconds is None:
        return Unjudged("slow_reads", ("CPU seconds of reading: not recorded",))
    weight = seen.share(fed.saved(seconds))
    files = files_of(loading)
    evidence, against, missing = [], [], []
    if read is not None and seconds <= NEARLY * loading.wall:
        against.append(f"reading takes {duration(read.wall)} of the {duration(loading.wall)} of a batch")
    elif read is not None:
        each = f", {duration(read.wall / files)} a file" if files else ""
        evidence.append(f"reading takes {duration(read.wall)} a batch{each}, of it {duration(read.cpu)} on a core: "
                        "the rest is waiting")  # fmt: skip
        evidence.append(f"that is {share(read.wall / loading.wall)} of preparation")
    if loading.bytes and read is not None and read.wall > 0:
        evidence.append(f"files arrive at {rate(loading.bytes / read.wall)} in each process"
                        + (f", {size(loading.bytes / files)} a file" if files else ""))  # fmt: skip
    waiting = known(fed.rank.waiting)
    if waiting is not None and waiting >= 0.1:
        evidence.append(f"loader processes stand in uninterruptible sleep {share(waiting)} of the time")
    elif waiting is not None and weight >= NEARLY:
        seldom = f"only {share(waiting)} of the time" if waiting else "at no look"
        against.append(f"loader processes are in uninterruptible sleep {seldom}: no disk, "
                       "but a network or user-space file system may wait otherwise")  # fmt: skip
    if loading.cold is not None and loading.warm is not None and loading.cold > COLD * loading.warm:
        against.append(f"a file took {duration(loading.cold)} to read in the first epoch and {duration(loading.warm)} "
                       "later: memory holds it now")  # fmt: skip
    io = known(fed.rank.pressure["io"])
    if io is not None and io >= 0.2:
        evidence.append(f"some task waits for storage {share(io)} of the time")
    if reason(fed.rank.waiting) and fed.workers:
        missing.append(f"state of the loader processes: {reason(fed.rank.waiting)}")
    evidence += _probed(seen)[0]
    against += _bound(seen, fed, seconds)
    title = (
        f"{share(weight)} of the time waits for files to be read" if weight >= NEARLY
        else f"reading files holds up {share(weight)} of the time"
    )  # fmt: skip
    return Finding(
        "slow_reads", title, weight, tuple(evidence), tuple(against),
        next_check="copy the images to a local disk or memory (/dev/shm) for one short run: steps must get faster by "
        "about this share; or time one file with `dd if=FILE of=/dev/null bs=1M iflag=direct`",
        refuted_by="a wait for images that is as long with the images on a local disk",
        missing=tuple(missing),
        detail={"advice": "Keep the images on a faster or nearer disk, or in fewer and larger objects",
                "wait_s": fed.wait, "blocked_s": seconds, "part_s": read.wall if read else 0.0, "parts": list(READING),
                "bytes_per_batch": loading.bytes, "files_per_batch": files},
    )  # fmt: skip


def _small_files(seen: Observations, fed: Feeding, loading: Loading) -> Finding | Unjudged:
    _, seconds = blocked_seconds(fed)
    if seconds is None:
        return Unjudged("small_files", ("CPU seconds of opening: not recorded",))
    weight = seen.share(fed.saved(seconds))
    opening, read, files = loading.parts.get("open"), loading.parts.get("read"), files_of(loading)
    evidence: list[str] = []
    against: list[str] = []
    if opening is not None and seconds <= NEARLY * loading.wall:
        against.append(f"opening takes {duration(opening.wall)} of the {duration(loading.wall)} of a batch")
    if opening is not None and files and seconds > NEARLY * loading.wall:
        evidence.append(f"opening takes {duration(opening.wall / files)} a file, reading "
                        f"{duration(read.wall / files) if read else 'unknown'}")  # fmt: skip
        if loading.bytes is not None:
            each = loading.bytes / files
            (evidence if each < SMALL_FILE else against).append(f"a file has {size(each)}")
        evidence.append(f"{files:.0f} files a batch, {share(opening.wall / loading.wall)} of preparation")
    evidence += _probed(seen)[0]
    against += _bound(seen, fed, seconds)
    title = (
        f"{share(weight)} of the time waits for files to be opened" if weight >= NEARLY
        else f"opening files holds up {share(weight)} of the time"
    )  # fmt: skip
    return Finding(
        "small_files", title, weight, tuple(evidence), tuple(against),
        next_check="time `find FOLDER -type f | head -1000 | xargs stat > /dev/null` where the images lie: "
        "milliseconds a file mean that metadata is slow, whatever the bandwidth",
        refuted_by="opening that is as fast as on a local disk (below 0.1 ms a file)",
        detail={"advice": "Pack the images into fewer files, or copy them to a local disk once",
                "wait_s": fed.wait, "blocked_s": seconds, "part_s": opening.wall if opening else 0.0, "parts": ["open"],
                "files_per_batch": files},
    )  # fmt: skip


def outlier(fed: Feeding) -> tuple[str, float]:
    """The largest part of CPU preparation, and its seconds a batch if it stands out: at least twice the next."""
    assert isinstance(fed.loading, Loading)
    ranked = sorted(((fed.work(n), n) for n in fed.loading.parts if n not in READING), reverse=True)
    if not ranked:
        return "", 0.0
    (first, name), second = ranked[0], ranked[1][0] if len(ranked) > 1 else 0.0
    return name, first if first >= 2 * second else 0.0


def _preparation(seen: Observations, fed: Feeding, loading: Loading) -> Finding:
    work = {n: fed.work(n) for n in loading.parts if n not in READING}
    whole = sum(work.values())
    everything = whole + sum(p.wall for n, p in loading.parts.items() if n in READING)
    name, stands_out = outlier(fed)
    idle = idle_cores(seen)
    # Each rank of the node would add as many.
    own_idle = idle / seen.ranks_on_node if idle is not None else None
    possible = wanted(fed, loading, own_idle).possible if own_idle is not None else 0
    spare = possible > (fed.workers or 0)
    # Where cores are free, ordinary preparation is no fault of its own: it lacks processes. What stands out is, and
    # what as many processes as there are cores for could not keep up with.
    left = min(fed.wait, max(0.0, whole / possible - fed.rest)) if spare else 0.0
    seconds = max(fed.saved(stands_out), left) if spare else fed.saved(whole)
    # What loader processes keep the step's own thread off its core, too, unless fewer of them would end it.
    taken = _taken(seen, fed)
    weight = seen.share(seconds + taken)
    evidence, against, waits = [], [], False
    if work:
        evidence.append(f"preparing a batch takes {duration(whole)} of a process besides reading; the largest part is "
                        f"{shown(name)} with {duration(work[name])} ({share(work[name] / everything)})")  # fmt: skip
        part = loading.parts[name]
        if part.cpu is not None and part.wall > 0:
            waits = part.cpu * loading.stretch / part.wall < COMPUTES
            if not waits:
                evidence.append(f"it computes: {share(part.cpu / part.wall)} of its time is on a core"
                                + (", the rest is waiting for one" if loading.stretch > 1.2 else ""))  # fmt: skip
            else:
                against.append(f"{shown(name)} is on a core only {share(part.cpu / part.wall)} of its time: it waits "
                               "for something outside, or for a lock")  # fmt: skip
    lost = core_lost(seen, fed.rank)
    if taken > 0 and lost is not None:
        evidence.append(f"the step's own thread waits {share(lost)} of the time for a core that preparation uses")
    busy = fed.busy
    if busy is not None:
        (evidence if busy >= 0.85 else against).append(
            f"{processes(fed.workers or 0)} {'are' if fed.workers != 1 else 'is'} busy {share(busy)} of the time"
        )
    elif fed.workers == 0:
        evidence.append("there are no loader processes: images are prepared between the steps, in one thread")
    top = known(fed.rank.loaders_top)
    if top is not None and top >= 0.9:
        evidence.append(f"the busiest loader process uses {cores(top)}: it cannot use more")
    functions = _functions(seen, name)
    evidence += functions
    if spare and idle is not None and stands_out < whole / 2 and fed.wait > 0 and left <= 0:
        against.append(f"no part stands out, and {number(idle)} cores are idle: more loader processes come first")
    evidence += _probed(seen)[0]
    against += _bound(seen, fed, whole)
    title = f"{share(weight)} of the time " + (
        "waits for images to be prepared" if seconds >= taken else "goes to preparing images"
    )
    if work:
        where = "on one core" if fed.hands == 1 else f"on {fed.hands} processes"
        title += f": {shown(name)} takes {share(work[name] / everything)} of the preparation, {where}"
    return Finding(
        "preparation_cpu", title, weight, tuple(evidence), tuple(against),
        next_check=("a short run with profile_steps=20, which names the functions inside " + shown(name or "it")
                    if not functions else f"replace or vectorise {shown(name)}, and compare the two runs"),
        refuted_by="steps that take as long "
        + (f"with {shown(name)} left out" if name else "on images held in memory (probe_steps)"),
        missing=() if functions else ("functions inside the transforms: no profile window in this run",),
        detail={"advice": _advice(fed, loading, name, waits, spare, own_idle), "wait_s": fed.wait,
                "part": name, "part_s": work.get(name),
                "parts": [n for n in sorted(work, key=lambda n: -work[n])], "work_s": whole,
                "idle_cores": idle, "functions": functions},
    )  # fmt: skip


def _taken(seen: Observations, fed: Feeding) -> float:
    """Seconds a step in which preparation keeps the step off its core, and would with fewer processes as well."""
    held = robbed(seen, fed.rank)
    better = without_crowd(seen, fed.rank) if held > 0 else None
    return held if better is None else max(0.0, held - max(0.0, fed.rank.step_s - better))


def _advice(fed: Feeding, loading: Loading, name: str, waits: bool, spare: bool, idle: float | None) -> str:
    what = (
        f"Find out what {shown(name)} waits for"
        if waits
        else {
            "decode": "Store the images smaller, near the size that is trained on",
            "resize": "Store the images at the size that is trained on",
        }.get(name, f"Make {shown(name)} cheaper")
    )
    if idle is None:
        return what
    if spare:
        return f"{what}, or try workers={wanted(fed, loading, idle).workers}"
    return f"{what}; more loader processes would find no free core"


def _functions(seen: Observations, name: str) -> list[str]:
    """What a profile window says of the functions in a part."""
    rows = [f for f in seen.profile.get("functions") or [] if f.get("function") and f.get("own_s")]
    inside = [f for f in rows if f.get("part") == name] or rows
    inside.sort(key=lambda f: -f["own_s"])
    if not inside:
        return []
    first = inside[0]
    calls = f" in {first['calls']:.0f} calls" if first.get("calls") else ""
    return [f"in the profile window {first['function']} took {duration(first['own_s'])}{calls}"
            + (f", inside {shown(first['part'])}" if first.get("part") else "")]  # fmt: skip


def _bound(seen: Observations, fed: Feeding, seconds: float) -> list[str]:
    """What weakens any explanation of this family."""
    found = []
    if fed.saved(seconds) < seconds / fed.hands - 1e-9:
        found.append(
            f"a step waits only {duration(fed.wait)} of {duration(fed.rank.step_s)} for images: what is prepared "
            "beside the step costs nothing"
        )
    host = fed.rank.phase("data")
    if fed.wait < 0.95 * host:
        found.append(f"of {duration(host)} in which the host waits for images the device computes all but "
                     f"{duration(fed.wait)}")  # fmt: skip
    return found + _probed(seen)[1]


def _probed(seen: Observations) -> tuple[list[str], list[str]]:
    """What a probe on images held in memory says for and against preparation as a cause."""
    usual, prepared = seen.probes.get("usual", {}), seen.probes.get("prepared", {})
    as_come, in_memory = usual.get("step_s"), prepared.get("step_s")
    if not as_come or not in_memory:
        return [], []
    words = f"a step on images held in memory takes {duration(in_memory)}, on images as they come {duration(as_come)}"
    if (prepared.get("high") or in_memory) < (usual.get("low") or as_come):
        return [f"{words}, beyond the spread of both"], []
    return [], [f"{words}: no difference beyond the spread"]
