"""The words and tables of the page that compares two runs."""

from typing import Any

from kfp_gate.diagnosis.comparing.changes import LESS, MORE, NO_DIFFERENCE, ONE_VALUE, Change, shown
from kfp_gate.diagnosis.comparing.comparable import show
from kfp_gate.diagnosis.comparing.compare import Comparison
from kfp_gate.diagnosis.comparing.outputs import DIFFER, EQUAL, UNKNOWN, WITHIN_NOISE, Series

_OF_SERIES = {
    EQUAL: ("the same", "good"), WITHIN_NOISE: ("within noise", "good"), DIFFER: ("differs", "warn"),
    UNKNOWN: ("unknown", ""),
}  # fmt: skip


def values(comparison: Comparison) -> dict[str, Any]:
    """What the template shows of a comparison."""
    step = next((c for c in comparison.changes if c.what == "step"), None)
    return {
        "before": comparison.before, "after": comparison.after, "answer": comparison.answer,
        "colour": "warn" if comparison.outputs.state == DIFFER else _colour(step) if step is not None else "",
        "changes": [_change(c) for c in comparison.changes if not c.same],
        "same": [_change(c) for c in comparison.changes if c.same],
        "judged": comparison.outputs.judged[:1].upper() + comparison.outputs.judged[1:] + ".",
        "series": [_series(s) for s in comparison.outputs.series],
        "differences": [
            {"name": d.name, "before": show(d.before), "after": show(d.after)} for d in comparison.differences
        ],
        "notes": comparison.notes,
    }  # fmt: skip


def _colour(change: Change) -> str:
    """Less is better, but for what counts a second."""
    better = MORE if change.unit == "images/s" else LESS
    return {better: "good", NO_DIFFERENCE: "", ONE_VALUE: ""}.get(change.state, "bad")


def _change(change: Change) -> dict[str, Any]:
    colour = _colour(change)
    interval = (change.low, change.high) if change.low is not None and change.high is not None else None
    word = {NO_DIFFERENCE: "no difference", ONE_VALUE: "spread unknown"}.get(change.state, "")
    return {
        "what": change.what, "before": shown(change.before, change.unit), "after": shown(change.after, change.unit),
        "ratio": "new" if change.ratio is None else f"\u00d7 {change.ratio:.3g}",
        "interval": "" if interval is None else f"{interval[0]:.3g} to {interval[1]:.3g}",
        "word": word or {"good": "better", "bad": "worse"}.get(colour, ""), "colour": colour,
        "bar": {"label": change.what, "text": "unknown" if change.ratio is None else f"{change.ratio:.3g}", "bound": 1,
                "value": None if change.ratio is None else min(change.ratio, 2), "state": colour or "soft",
                "interval": interval},
    }  # fmt: skip


def _series(series: Series) -> dict[str, str]:
    word, colour = _OF_SERIES[series.state]
    return {
        "name": series.name, "word": word, "colour": colour,
        "difference": "known of one run only" if series.difference is None else f"{series.difference:+.3g}",
        "noise": "unknown" if series.noise is None else f"{series.noise:.2g}",
    }  # fmt: skip
