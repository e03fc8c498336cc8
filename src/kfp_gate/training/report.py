"""The training report: one HTML page made of the record and the timeline. Imports no torch."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.observing.memory import size
from kfp_gate.observing.phases import ALL_PHASES
from kfp_gate.observing.timeline import read_timeline
from kfp_gate.pages import render

SHOWN_METRICS = ("map50_95", "map50", "precision", "recall")
MEMORY_LINES = (
    ("rss", "process"),
    ("children", "loader processes"),
    ("cgroup", "container"),
    ("cuda_reserved", "CUDA reserved"),
)
MEMORY_FACTS = (
    ("peak", "largest process"), ("cgroup_peak", "largest container"), ("limit", "limit of the container"),
    ("cuda_peak", "CUDA peak"),
)  # fmt: skip
LIMIT_NEAR = 0.9
"""Share of the memory limit from which the report warns."""


def html(folder: Path, template: str = "training.html", **values: Any) -> str:
    """The report of a training.

    Args:
        folder: as rank 0 leaves it, OUT/training: `record.json`, and `timeline.jsonl` if it was kept.
        template: `training.html`, or a template that extends it.
        values: what such a template needs besides.

    Returns:
        A self-contained page.

    Raises:
        InvalidInput: no readable record in the folder.
    """
    record = _record(folder / "record.json")
    timeline = folder / "timeline.jsonl"
    lines = list(read_timeline(timeline)) if timeline.is_file() else []
    epochs = record["epochs"]
    return render(
        template, record=record, epochs=epochs, span=_span(epochs), verdict=_verdict(record),
        monitors=_monitors(record), metrics=_metric_curves(record), losses=_loss_curves(epochs),
        phases=_phases(lines, epochs), memory=_memory(lines), losts=_losts(record),
        settings=sorted(record["settings"].items()), versions=sorted(record["versions"].items()),
        not_computed=sorted(record.get("not_computed", {}).items()), **values,
    )  # fmt: skip


def page(folder: Path) -> str:
    """The report, or a page that says why there is none: a command of the user's own need not keep a record."""
    if (folder / "record.json").is_file():
        return html(folder)
    return render("note.html", title="Training", text="The training command left no record.json to report on.")


def _record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        # Keys that later versions may drop are not asked for here.
        for key in ("epochs", "monitors", "settings", "versions", "classes"):
            record[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidInput(
            f"no readable training record ({type(error).__name__})", expected="record.json as rank 0 writes it",
            where=str(path), next_step="give the training folder of rank 0 as it was written",
        ) from None  # fmt: skip
    found: dict[str, Any] = record
    return found


def _span(epochs: Sequence[dict[str, Any]]) -> tuple[int, int]:
    return (epochs[0]["epoch"], max(epochs[-1]["epoch"], epochs[0]["epoch"] + 1)) if epochs else (1, 2)


def _verdict(record: dict[str, Any]) -> str:
    primary = next((m for m in record["monitors"] if m["primary"]), None)
    if primary is None or primary["best"] is None:
        return "no epoch gave the primary monitor a value"
    return f"best {primary['monitor']} {primary['best']:.4f}, epoch {primary['best_epoch']} of {len(record['epochs'])}"


def _monitors(record: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            **m, "value": "not computed" if m["best"] is None else f"{m['best']:.4f}",
            "kept": (record.get("weights", {}).get(m["monitor"]) or {}).get("epoch"),
        }
        for m in record["monitors"]
    ]  # fmt: skip


def _metric_curves(record: dict[str, Any]) -> list[dict[str, Any]]:
    watched = [m["monitor"] for m in record["monitors"]]
    names = list(dict.fromkeys([*watched, *SHOWN_METRICS]))
    return _curves(record["epochs"], names, lambda row, name: row["values"].get(name))


def _loss_curves(epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    names = list(dict.fromkeys(n for row in epochs for n in row.get("losses", {})))
    series = _curves(epochs, names, lambda row, name: row.get("losses", {}).get(name))
    return {"series": series, "top": _top(series)}


def _curves(epochs: Sequence[dict[str, Any]], names: Iterable[str], value: Any) -> list[dict[str, Any]]:
    series = [{"label": n, "points": [(row["epoch"], value(row, n)) for row in epochs]} for n in names]
    return [s for s in series if any(y is not None for _, y in s["points"])]


def _phases(lines: Sequence[dict[str, Any]], epochs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = _last_of_each_epoch(lines, "phases")
    totals = {p: sum(r["seconds"].get(p) or 0.0 for r in rows) for p in ALL_PHASES}
    whole = sum(totals.values())
    bars = [
        {"label": p, "value": s / whole, "text": f"{s:,.1f} s ({s / whole:.0%})", "state": "mark", "interval": None,
         "bound": None}
        for p, s in totals.items() if whole and s > 0
    ]  # fmt: skip
    series = [
        {"label": p, "points": [(r["epoch"], r["seconds"].get(p)) for r in rows]}
        for p in ALL_PHASES if totals[p] > 0.01 * whole
    ]  # fmt: skip
    return {"bars": bars, "series": series if len(rows) > 1 else [], "top": _top(series), "seconds": whole,
            "untimed": sum(r["seconds"] for r in epochs) if not rows else 0.0}  # fmt: skip


def _memory(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = _last_of_each_epoch(lines, "memory")
    series = []
    for key, label in MEMORY_LINES:
        points = [(r["epoch"], r[key] / (1 << 30) if r.get(key) is not None else None) for r in rows]
        if any(y for _, y in points):
            series.append({"label": label, "points": points})
    last: dict[str, Any] = rows[-1] if rows else {}
    peak, limit = last.get("cgroup_peak"), last.get("limit")
    facts = [(label, size(last[key])) for key, label in MEMORY_FACTS if last.get(key) is not None]
    warning = ""
    if peak is not None and limit is not None and peak > LIMIT_NEAR * limit:
        warning = f"the container came to {peak / limit:.0%} of its memory limit"
    if last.get("oom_kills"):
        warning = f"the kernel ended {last['oom_kills']} processes of the container for want of memory"
    return {"series": series, "top": _top(series), "facts": facts, "warning": warning}


def _losts(record: dict[str, Any]) -> list[str]:
    """What did not arrive where it should."""
    found = []
    checkpoints = record.get("checkpoints") or {}
    if checkpoints.get("lost_epochs"):
        epochs = ", ".join(map(str, checkpoints["lost_epochs"]))
        found.append(f"checkpoints of epochs {epochs} did not reach {checkpoints.get('uri', 'the store')}")
    tracking = (record.get("tracking") or {}).get("summary", "")
    if any(word in tracking for word in ("not delivered", "refused", "not finite")):
        found.append(f"tracking: {tracking}")
    found += [f"resume: {note}" for note in (record.get("resumed") or {}).get("notes") or []]
    found += [f"sanity pass: {remark}" for remark in (record.get("sanity") or {}).get("remarks") or []]
    return found


def _last_of_each_epoch(lines: Iterable[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    # An epoch that was done twice, after a NaN or a resume, counts as it was done last.
    by_epoch = {line["epoch"]: line for line in lines if line.get("kind") == kind and "epoch" in line}
    return [by_epoch[e] for e in sorted(by_epoch)]


def _top(series: Sequence[dict[str, Any]]) -> float:
    """The upper end of an axis: the largest value, rounded up to a number that divides into four."""
    largest = float(max((y for s in series for _, y in s["points"] if y is not None), default=1.0) or 1.0)
    unit = 10.0 ** math.floor(math.log10(largest))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if largest <= step * unit * (1 + 1e-9))
