"""The words and tables of a diagnosis's page, as its template shows them: tiles, findings, scenarios, memory."""

from collections.abc import Mapping
from typing import Any

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.findings import CAUSES, MEMORY_CAUSES, Diagnosis, Finding
from kfp_gate.diagnosis.pages.curves import round_up
from kfp_gate.diagnosis.pages.lanes import why_no_gpu_use
from kfp_gate.diagnosis.pages.scenario_rows import scenario_table
from kfp_gate.diagnosis.pages.step_bars import StepFacts
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.diagnosis.reading.shapes import number
from kfp_gate.observing.memory_growth import NAMES

MEMORY_LINES = (
    ("rss", "main process"),
    ("children_pss", "loaders (shared pages once)"),
    ("cgroup", "container"),
    ("anon", "of its processes"),
    ("file", "file cache"),
    ("cuda_reserved", "CUDA reserved"),
)


def tiles(diagnosis: Diagnosis, run: Run, steady: StepFacts) -> list[dict[str, str]]:
    """Epoch time, images a second, wait for data, use of the device, memory."""
    wait = next((p.share for p in diagnosis.phases if p.name == "data"), None)
    if wait is None:
        shares = [b.seconds.get("data", 0.0) / b.total for b in steady.bars if b.clock == "host" and b.input == "usual"]
        wait = sum(shares) / len(shares) if shares else None
    speed = steady.images_per_second
    use = _device_use(run, diagnosis.conditions)
    memory, of = _peak(run)
    tiles = [
        (
            "an epoch",
            amounts.duration(diagnosis.epoch_s),
            "" if diagnosis.epoch_s is not None else "no whole epoch yet",
        ),
        (
            "images a second",
            f"{speed:,.3g}"
            if speed is not None and speed < 1000
            else f"{speed:,.0f}"
            if speed is not None
            else amounts.UNKNOWN,
            "in steady steps, all ranks" if speed is not None else "no windows of steps",
        ),
        ("waiting for data", amounts.share(wait), "of a steady step" if wait is not None else "no windows of steps"),
        use,
        ("peak memory", amounts.size(memory), of),
    ]
    return [{"label": label, "value": value, "note": note} for label, value, note in tiles]


def _device_use(run: Run, conditions: Mapping[str, Any]) -> tuple[str, str, str]:
    """How busy the device was, as a tile; of a training without a GPU, how many cores it used."""
    samples = [s for rank in run.ranks for s in run.lines("sample", rank)]
    found = [v for s in samples if (v := number(s.get("gpu_util"))) is not None]
    if found:
        return "GPU use", amounts.share(sum(found) / len(found)), "time in which any kernel ran"
    used = [
        own + (number((s.get("loaders") or {}).get("cpu")) or 0.0)
        for s in samples
        if (own := number(s.get("cpu"))) is not None
    ]
    if conditions.get("device") == "cpu" and used:
        cpus = number(conditions.get("cpus"))
        return "CPU use of a rank", amounts.cores(sum(used) / len(used)), f"of {cpus:.0f}" if cpus is not None else ""
    return "GPU use", amounts.UNKNOWN, why_no_gpu_use(run)


def _peak(run: Run) -> tuple[int | None, str]:
    lines = [m for rank in run.ranks for m in (*run.lines("memory", rank), *run.lines("sample", rank))]
    for key, what in (("cgroup_peak", "the container"), ("peak", "the main process"), ("rss", "the main process")):
        known = [v for m in lines if (v := number(m.get(key))) is not None]
        if known:
            limit = max((v for m in lines if (v := number(m.get("limit"))) is not None), default=None)
            bound = f" of {amounts.size(limit)}" if limit is not None and key == "cgroup_peak" else ""
            return int(max(known)), f"{what}{bound}"
    return None, "no memory lines"


def finding(finding: Finding) -> dict[str, Any]:
    """One hypothesis."""
    memory = finding.cause in MEMORY_CAUSES
    return {
        "title": finding.title[:1].upper() + finding.title[1:],
        "evidence": finding.evidence,
        "against": finding.against,
        "next_check": finding.next_check,
        "refuted_by": finding.refuted_by,
        "missing": finding.missing,
        "weight": min(max(finding.weight, 0.0), 1.0),
        "weight_text": f"urgency {amounts.share(finding.weight)}"
        if memory
        else f"explains {amounts.share(finding.weight)} of the time",
        "name": CAUSES.get(finding.cause, finding.cause),
    }


def scenarios(diagnosis: Diagnosis) -> dict[str, Any] | None:
    """The counterfactual table; None if it is not known how long an epoch takes."""
    table = scenario_table(diagnosis)
    if table is None:
        return None
    now = table.now
    # An interval of a run of few steps may be as wide as one likes: the bars stay readable.
    top = 1.04 * max([now, *(min(r.scenario.high, 1.5 * now) for r in table.rows)])
    rows = [
        {
            "change": r.scenario.change, "note": r.note, "seconds": amounts.duration(r.scenario.seconds),
            "interval": r.interval, "gain": amounts.share(r.saved) if r.saved > 0 else "nothing",
            "times": f"{now / r.scenario.seconds:.2f}\u00d7" if r.scenario.seconds > 0 else "",
            "bar": {"label": r.scenario.change, "text": amounts.duration(r.scenario.seconds), "bound": now,
                    "value": r.scenario.seconds, "state": "mark", "interval": (r.scenario.low, r.scenario.high)},
        }
        for r in table.rows
    ]  # fmt: skip
    bar = {"label": "as it is", "text": amounts.duration(now), "value": now, "state": "soft", "interval": None,
           "bound": None}  # fmt: skip
    return {
        "now": amounts.duration(now), "bar": bar, "rows": rows, "top": top, "notes": table.notes, "idle": table.idle,
    }  # fmt: skip


def memory(diagnosis: Diagnosis, run: Run) -> dict[str, Any]:
    """What grows, and the memory of each epoch of the first rank."""
    by_epoch = {
        e: m for m in run.lines("memory", min(run.ranks, default=0)) if (e := number(m.get("epoch"))) is not None
    }
    epochs = sorted(by_epoch)
    series: list[dict[str, Any]] = []
    largest = 0.0
    for key, label in MEMORY_LINES:
        values = [number(by_epoch[e].get(key)) for e in epochs]
        if any(v for v in values):
            points = [(e, None if v is None else v / (1 << 30)) for e, v in zip(epochs, values, strict=True)]
            series.append({"label": label, "points": points})
            largest = max([largest, *(y for _, y in points if y is not None)])

    limit = max((g.limit for g in diagnosis.growth if g.limit is not None), default=None)
    if limit is not None and epochs:
        # How far it is to the limit says more than the slope.
        ends = [(e, limit / (1 << 30)) for e in (epochs[0], epochs[-1])]
        series.append({"label": "limit", "points": ends})
        largest = max(largest, limit / (1 << 30))
    return {
        "growth": [
            {
                "what": NAMES.get(g.what, g.what),
                "phase": {"": "not told", "other": "elsewhere"}.get(g.phase, g.phase),
                "since": g.since,
                "slope": amounts.size(g.slope),
                "interval": amounts.interval(g.low, g.high, amounts.size),
                "limit": amounts.size(g.limit),
                "limit_epoch": g.limit_epoch,
                "text": g.text,
            }
            for g in diagnosis.growth
        ],
        "series": series if len(epochs) > 1 else [],
        "top": round_up(largest, (1, 2, 4, 6, 8, 10)),
        "span": (epochs[0], max(epochs[-1], epochs[0] + 1)) if epochs else (1, 2),
    }


def conditions(conditions: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the run ran under, by name."""
    known = {k: v for k, v in conditions.items() if k not in ("kind", "time", "mono", "phase", "settings")}
    return [(k.replace("_", " "), _plain(k, v)) for k, v in known.items()]


def _plain(key: str, value: Any) -> str:
    if value is None:
        return amounts.UNKNOWN
    if key == "memory_limit":
        return amounts.size(number(value))
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_plain('', v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_plain("", v) for v in value)
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
