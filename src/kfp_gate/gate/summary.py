"""The verdict for other readers: numbers for tables, Markdown for a page that renders it, data for a matrix."""

import math

import numpy as np

from kfp_gate.evaluation.diagnostics import confusion_matrix
from kfp_gate.evaluation.metrics import NotComputed
from kfp_gate.gate import wording
from kfp_gate.gate.curves import most_confused
from kfp_gate.gate.judging import Judged
from kfp_gate.gate.verdict import Entry, State, Verdict
from kfp_gate.metric_names import METRICS, per_class

MOST_CLASSES = 100
"""Of more classes the table of metrics would be longer than anyone reads; the report has them all."""

MOST_ROWS = 60
_STATES: tuple[State, ...] = ("missed", "insufficient", "waived", "met")


def table_metrics(judged: Judged) -> dict[str, float]:
    """Finite floats for the metrics table of a pipeline's page: verdict counts, overall values, AP50 of each class.

    What was not computed is left out: the backend refuses NaN, infinity and null, and fails the step.
    """
    verdict, measured = judged.verdict, judged.candidate
    found: dict[str, float] = {"passed": float(verdict.passed)}
    found |= {f"criteria_{state}": float(len(verdict.of(state))) for state in _STATES}
    names = [*METRICS, *(per_class(c, "map50") for c in measured.classes[:MOST_CLASSES])]
    for name in names:
        value = measured.value(name)
        if not isinstance(value, NotComputed) and math.isfinite(value):
            found[name] = float(value)
    return found


def all_values(judged: Judged) -> dict[str, float | str]:
    """Every metric of the whole set by canonical name: a finite float, or the reason why it was not computed."""
    metrics = judged.candidate.by_slice[None]
    return {n: str(v.reason) if isinstance(v, NotComputed) else float(v) for n, v in metrics.items()}


def confusion(judged: Judged, most: int = 50) -> tuple[list[str], list[list[int]]] | None:
    """Categories and counts for `ClassificationMetrics.log_confusion_matrix`: true class by row, found by column.

    The last category is no class: objects that were not found, and detections on nothing. Of more than `most` classes
    those that are confused most. None for records without boxes.
    """
    records, classes = judged.candidate.records, judged.candidate.classes
    if records.boxes is None:
        return None
    table = confusion_matrix(records, classes, confidence=judged.candidate.confidence)
    chosen = [*most_confused(table, most), len(classes)]
    names = [*classes, "(none)"]
    return [names[i] for i in chosen], table[np.ix_(chosen, chosen)].tolist()


def markdown(verdict: Verdict) -> str:
    """The verdict as Markdown: headline, warnings, and the criteria that were not met before the others."""
    lines = [f"# {_cell(verdict.headline)}", ""]
    lines += [f"- {_cell(text)}" for text in wording.decisive(verdict)]
    if found := wording.warnings(verdict):
        lines += ["", "**Before you trust this**", "", *(f"- {_cell(text)}" for text in found)]
    rows = sorted(verdict.entries, key=lambda e: (_STATES.index(e.state), e.margin or 0.0))
    lines += ["", "| criterion | state | value | asked for | instances | |", "|---|---|---:|---:|---:|---|"]
    lines += [_line(e) for e in rows[:MOST_ROWS]]
    if len(rows) > MOST_ROWS:
        lines.append(f"| and {len(rows) - MOST_ROWS} more | | | | | |")
    return "\n".join(lines) + "\n"


def _line(entry: Entry) -> str:
    cells = [
        wording.title(entry.metric), entry.state, wording.number(entry.compared, sign=entry.kind == "max_drop"),
        wording.bound(entry), "" if entry.instances is None else f"{entry.instances:,}", wording.outcome(entry),
    ]  # fmt: skip
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    """Text that Markdown and the HTML inside it leave alone: class names are data, not markup."""
    for char in "\\`*_[]#<>|":
        text = text.replace(char, {"<": "&lt;", ">": "&gt;", "|": "&#124;"}.get(char, f"\\{char}"))
    return " ".join(text.split())
