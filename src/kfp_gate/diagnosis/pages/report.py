"""A diagnosis as a page: the answer first, then the evidence, then everything that was recorded on one time axis."""

import logging
from pathlib import Path
from typing import Any

from kfp_gate import pages
from kfp_gate.diagnosis.comparing.compare import Comparison
from kfp_gate.diagnosis.findings import HEALTH, MEMORY_CAUSES, Diagnosis, together
from kfp_gate.diagnosis.pages import comparison as page_comparison
from kfp_gate.diagnosis.pages import facts as page_facts
from kfp_gate.diagnosis.pages import figures as page_figures
from kfp_gate.diagnosis.pages.step_bars import hot_functions, step_facts
from kfp_gate.diagnosis.pages.time_axis import time_axis
from kfp_gate.diagnosis.reading.runs import Run
from kfp_gate.training import report as training_report

log = logging.getLogger(__name__)

COLOURS = {"cause": "warn", "no_cause": "good", "not_enough": ""}


def html(diagnosis: Diagnosis, run: Run) -> str:
    """The diagnosis as one self-contained HTML page.

    Args:
        diagnosis: what was found.
        run: what it was found in, for the curves.
    """
    return pages.render("diagnosis.html", d=values(diagnosis, run))


def comparison_html(comparison: Comparison, *others: Comparison) -> str:
    """Comparisons of one run with one or more later ones as a self-contained HTML page."""
    return pages.render("comparison.html", comparisons=[page_comparison.values(c) for c in (comparison, *others)])


def training_page(folder: Path) -> str:
    """The training report with the run's diagnosis in it.

    A diagnosis that cannot be made costs a sentence on the page, never the page. Training code of the user's own that
    kept no record has the diagnosis alone, or a note if it kept no timeline either.

    Args:
        folder: as rank 0 leaves it, OUT/training.

    Raises:
        InvalidInput: there is a record in the folder, and it cannot be read.
    """
    recorded = (folder / "record.json").is_file()
    try:
        diagnosis, run = _diagnosed(folder)
        if not recorded:  # training code of the user's own that kept a timeline
            return html(diagnosis, run)
        return training_report.html(folder, template="training_diagnosed.html", d=values(diagnosis, run))
    except Exception as error:  # whatever it is: the training has succeeded, and its report must be written
        if not recorded:
            return training_report.page(folder)
        log.warning("no diagnosis of this training: %s: %s", type(error).__name__, error)
        log.debug("the diagnosis failed", exc_info=True)
        return training_report.html(folder, template="training_diagnosed.html", d=None)


def _diagnosed(folder: Path) -> tuple[Diagnosis, Run]:
    from tempfile import TemporaryDirectory

    from kfp_gate.diagnosis.diagnose import diagnose
    from kfp_gate.diagnosis.reading.runs import read_run

    with TemporaryDirectory() as scratch:
        run = read_run(str(folder), Path(scratch))
    return diagnose(run), run


def values(diagnosis: Diagnosis, run: Run) -> dict[str, Any]:
    """What the templates show of a diagnosis."""
    axis = time_axis(run)
    steady = step_facts(run)
    headline, stop, advice = diagnosis.answer.partition(". ")
    headline += stop.strip()
    return {
        "where": diagnosis.where,
        "answer": diagnosis.answer,
        "headline": headline,
        "advice": advice,
        "state": diagnosis.state,
        "colour": COLOURS.get(diagnosis.state, ""),
        "running": diagnosis.running,
        "notes": diagnosis.notes,
        "tiles": page_facts.tiles(diagnosis, run, steady),
        "findings": [page_facts.finding(f) for f in diagnosis.findings],
        "health": [page_facts.finding(f) for f in diagnosis.minor if f.cause == HEALTH],
        "minor": [page_facts.finding(f) for f in diagnosis.minor if f.cause != HEALTH],
        "unjudged": [{"names": names, "missing": missing} for missing, names in together(diagnosis.unjudged).items()],
        "unjudged_count": len(diagnosis.unjudged),
        "scenarios": page_facts.scenarios(diagnosis),
        "steps": page_figures.steps(diagnosis, steady.bars),
        "time": page_figures.over_time(run, axis, _of_interest(diagnosis)) if axis is not None else None,
        "loader": page_figures.loader(run, steady.parts),
        "functions": hot_functions(run),
        "profile": page_figures.profile(run),
        "memory_first": bool(diagnosis.findings) and diagnosis.findings[0].cause in MEMORY_CAUSES,
        "memory": page_facts.memory(diagnosis, run),
        "conditions": page_facts.conditions(diagnosis.conditions),
    }


def _of_interest(diagnosis: Diagnosis) -> int | None:
    """The rank that the first finding is about, if it is about one."""
    rank = diagnosis.findings[0].detail.get("slow_rank") if diagnosis.findings else None
    return rank if isinstance(rank, int) else None
