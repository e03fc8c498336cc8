"""The verdict as a page: what was decided, by how much, on which evidence, and what the model gets wrong."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kfp_gate import pages
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.evaluation.metrics import NotComputed
from kfp_gate.gate import curves, wording
from kfp_gate.gate.judging import Judged
from kfp_gate.gate.measuring import Measured
from kfp_gate.gate.thumbnails import worst_images
from kfp_gate.gate.verdict import Entry, State, Verdict
from kfp_gate.metric_names import SIZE_BANDS, parse, per_class

COLUMNS = {
    "map50": "AP50", "map50_95": "AP50-95", "precision": "precision", "recall": "recall", "f1": "F1",
    "mean_confidence": "confidence", "abnormal_box_rate": "abnormal",
}  # fmt: skip
TILES = ("map50", "map50_95", "precision", "recall")
OPEN_ROWS = 40
"""Up to so many criteria all are shown; of more, those that were met are folded."""

_ORDER: dict[State, int] = {"missed": 0, "insufficient": 1, "waived": 2, "met": 3}
_COLOUR: dict[State, str] = {"met": "good", "missed": "bad", "insufficient": "warn", "waived": "warn"}
_WORD: dict[State, str] = {
    "met": "met",
    "missed": "missed",
    "insufficient": "not enough evidence",
    "waived": "waived",
}


def html(
    judged: Judged,
    evaluation: Evaluation,
    *,
    champion: Evaluation | None = None,
    images: Sequence[Path] | None = None,
) -> str:
    """The report as one self-contained HTML page.

    Args:
        judged: verdict and measurements.
        evaluation: of the candidate.
        champion: its evaluation, if it was compared.
        images: the file of every test image; None where there are none, as in a later judgement.
    """
    verdict, candidate = judged.verdict, judged.candidate
    confidence = candidate.confidence
    rows = [_row(e) for e in sorted(verdict.entries, key=lambda e: (_ORDER[e.state], e.margin or 0.0))]
    return pages.render(
        "gate_report.html",
        verdict=verdict,
        headline=verdict.headline,
        colour="good" if verdict.passed else "bad",
        summary=wording.decisive(verdict),
        warnings=wording.warnings(verdict),
        tiles=[(wording.title(m), wording.number(_number(candidate, m))) for m in TILES],
        rows=rows,
        folded=len(rows) > OPEN_ROWS,
        classes=_classes(verdict, candidate, judged.champion),
        columns=list(COLUMNS.values()),
        confidence=confidence,
        sizes=_sizes(candidate),
        curves=curves.precision_recall(evaluation, verdict),
        calibration=curves.calibration(evaluation.records, confidence),
        comparison=_comparison(judged.common, judged.champion),
        diagnostics=curves.diagnostics(evaluation, confidence),
        thumbnails=worst_images(evaluation, images, confidence=confidence) if images is not None else None,
        settings=json.dumps(verdict.settings, ensure_ascii=False, indent=1),
        prediction=evaluation.settings,
    )


def _row(entry: Entry) -> dict[str, Any]:
    drop = entry.kind == "max_drop"
    reach = 1.0
    if drop:
        reach = 1.2 * max([entry.bound, abs(entry.drop or 0.0), *(abs(v) for v in entry.interval or ())]) or 0.1
    return {
        "id": entry.criterion,
        "label": wording.title(entry.metric),
        "name": wording.title(entry.metric) + (" against the champion" if drop else ""),
        "value": entry.compared,
        "text": wording.number(entry.compared, sign=drop),
        "interval": entry.interval,
        "bound": entry.bound,
        "bound_text": wording.bound(entry),
        "instances": entry.instances,
        "state": _COLOUR[entry.state],
        "word": _WORD[entry.state],
        "met": entry.state == "met",
        "outcome": "; ".join(_evidence(entry)),
        "low": -reach if drop else 0.0,
        "high": reach,
    }


def _evidence(entry: Entry) -> list[str]:
    parts = [wording.outcome(entry)] if wording.outcome(entry) else []
    if entry.interval:
        low, high = (wording.number(v, sign=entry.kind == "max_drop") for v in entry.interval)
        parts.append(f"interval {low} to {high}")
    if entry.champion is not None:
        parts.append(f"candidate {wording.number(entry.value)}, champion {wording.number(entry.champion)}")
    return parts


def _classes(verdict: Verdict, candidate: Measured, champion: Measured | None) -> list[dict[str, Any]]:
    """One row per class, those in trouble first, then by AP50."""
    states: dict[str, list[State]] = {}
    for entry in verdict.entries:
        name = parse(entry.metric).class_name
        if name is not None:
            states.setdefault(name, []).append(entry.state)
    rows: list[dict[str, Any]] = []
    for name in candidate.classes:
        values = [_number(candidate, per_class(name, m)) for m in COLUMNS]
        worst = min(states.get(name, ()), key=lambda s: _ORDER[s], default=None)
        theirs = _number(champion, per_class(name, "map50")) if champion else None
        rows.append(
            {
                "name": name,
                "objects": candidate.by_slice[None].instances.get(per_class(name, "").rstrip("/"), 0),
                "values": [{"number": v, "text": wording.number(v)} for v in values],
                "delta": None if theirs is None or values[0] is None else values[0] - theirs,
                "state": "soft" if worst is None else _COLOUR[worst],
                "word": "no criterion" if worst is None else _WORD[worst],
                "rank": 1.5 if worst is None else _ORDER[worst],
            }
        )
    for row in rows:
        row["delta_text"] = wording.number(row["delta"], sign=True)
    return sorted(rows, key=lambda r: (r["rank"], r["values"][0]["number"] or 0.0))


def _sizes(candidate: Measured) -> list[dict[str, Any]]:
    found = []
    for band in SIZE_BANDS:
        value, recall = (_number(candidate, f"size/{band}/{m}") for m in ("map50", "recall"))
        found.append(
            {
                "label": f"{band} ({candidate.by_slice[None].instances.get(f'size/{band}', 0):,} objects)",
                "value": value,
                "text": f"{wording.number(value)}, recall {wording.number(recall)}",
                "state": "mark",
                "interval": None,
                "bound": None,
            }
        )
    return found


def _comparison(candidate: Measured, champion: Measured | None) -> list[dict[str, Any]]:
    """Overall values of candidate and champion, where there is one."""
    if champion is None:
        return []
    rows = []
    for metric in (*COLUMNS, "undetected_image_rate", "false_alarm_rate"):
        mine, theirs = _number(candidate, metric), _number(champion, metric)
        delta = None if mine is None or theirs is None else mine - theirs
        rows.append(
            {
                "name": wording.title(metric),
                "mine": wording.number(mine),
                "theirs": wording.number(theirs),
                "delta": wording.number(delta, sign=True),
            }
        )
    return rows


def _number(measured: Measured, name: str) -> float | None:
    value = measured.value(name)
    return None if isinstance(value, NotComputed) else value
