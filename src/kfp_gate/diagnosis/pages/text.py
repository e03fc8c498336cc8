"""A diagnosis, or a comparison, for a terminal: the answer first, then why, and what is unknown."""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.comparing.changes import shown
from kfp_gate.diagnosis.comparing.comparable import show
from kfp_gate.diagnosis.comparing.compare import SAID_OF_OUTPUTS, Comparison
from kfp_gate.diagnosis.comparing.outputs import EQUAL
from kfp_gate.diagnosis.findings import BAR, CAUSES, HEALTH, MEMORY_CAUSES, Diagnosis, Finding, together
from kfp_gate.diagnosis.pages.scenario_rows import scenario_table

WIDTH = 96
SHOWN_SHARE = 0.0005
"""Share of a step below which a phase has no row."""


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis in lines of at most `WIDTH` characters, without colours.

    Names come from outside: what would steer a terminal is replaced.
    """
    blocks = [[diagnosis.answer], _head(diagnosis)]
    blocks += [list(_finding(f, i)) for i, f in enumerate(diagnosis.findings, 1)]
    health = [f"{f.title[:1].upper()}{f.title[1:]}." for f in diagnosis.minor if f.cause == HEALTH]
    blocks += [
        health,
        _scenarios(diagnosis),
        _phases(diagnosis),
        _growth(diagnosis),
        _minor(diagnosis),
        _unjudged(diagnosis),
    ]
    blocks.append([line for note in diagnosis.notes for line in _item("note: ", note)])
    return join(blocks)


def comparison_text(comparison: Comparison) -> str:
    """Two runs compared, in lines of at most `WIDTH` characters, without colours."""
    runs = [f"before: {comparison.before}", f"after:  {comparison.after}"]
    blocks = [[comparison.answer], runs, _differences(comparison), _changes(comparison), _outputs(comparison)]
    return join([*blocks, [line for note in comparison.notes for line in _item("note: ", note)]])


def join(blocks: Iterable[Sequence[str]]) -> str:
    """Blocks of lines with an empty line between them; lines that are too long are folded."""
    paragraphs = ["\n".join(folded for line in block for folded in _fold(line)) for block in blocks if block]
    return "\n\n".join(paragraphs)


def table(rows: Sequence[Sequence[str]], indent: str = "  ", left: int = 1) -> list[str]:
    """Rows in columns: the first `left` columns and the last one to the left, the others to the right."""
    rows = [[plain(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))] if rows else []
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if i < left or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return lines


def plain(words: str) -> str:
    """Words from outside as one line that a terminal prints and does not obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in words)


def _differences(comparison: Comparison) -> list[str]:
    rows = [[d.name, show(d.before), "->", show(d.after)] for d in comparison.differences]
    return ["Conditions that differ, as acknowledged", *table(rows)] if rows else []


def _changes(comparison: Comparison) -> list[str]:
    rows = [
        [
            c.what, shown(c.before, c.unit), "->", shown(c.after, c.unit),
            "" if c.ratio is None else f"x {c.ratio:.3g}",
            c.state if c.low is None or c.high is None else f"{c.low:.3g} to {c.high:.3g}",
        ]
        for c in comparison.changes if not c.same
    ]  # fmt: skip
    lines = ["Changed (factor, with a 90% interval)", *table(rows)] if rows else []
    same = ", ".join(
        f"{c.what} ({' -> '.join(dict.fromkeys((shown(c.before, c.unit), shown(c.after, c.unit))))})"
        for c in comparison.changes if c.same
    )  # fmt: skip
    return lines + (list(_item("The same, as far as the noise lets one see: ", same, "", "  ")) if same else [])


def _outputs(comparison: Comparison) -> list[str]:
    outputs = comparison.outputs
    said = SAID_OF_OUTPUTS[outputs.state]
    lines = list(_item("", f"{said[:1].upper()}{said[1:]}: {outputs.judged}"))
    for one in outputs.series:
        if one.difference is None:
            lines.append(f"  {one.name}: computed in one run only")
        elif one.state != EQUAL:
            noise = "noise unknown" if one.noise is None else f"noise of an epoch {one.noise:.2g}"
            lines.append(f"  {one.name}: {one.difference:+.3g} ({noise})")
    return lines


def _head(diagnosis: Diagnosis) -> list[str]:
    parts = [plain(diagnosis.where), "not ended yet" if diagnosis.running else "ended"]
    parts.append(f"an epoch takes {amounts.duration(diagnosis.epoch_s)}" if diagnosis.epoch_s is not None
                 else "the time of an epoch is unknown")  # fmt: skip
    return ["; ".join(parts)]


def _finding(finding: Finding, place: int) -> Iterator[str]:
    weight = amounts.share(finding.weight)
    measure = f"urgency {weight}" if finding.cause in MEMORY_CAUSES else f"{weight} of the time"
    title = finding.title[:1].upper() + finding.title[1:]
    yield from _item(f"{place}. ", title if measure in title else f"{title} [{measure}]", "")
    for sign, points in (("+ ", finding.evidence), ("- ", finding.against), ("? ", finding.missing)):
        for point in points:
            yield from _item(sign, point, "   ")
    if finding.next_check:
        yield from _item("next check: ", finding.next_check, "   ")
    if finding.refuted_by:
        yield from _item("refuted if: ", finding.refuted_by, "   ")


def _scenarios(diagnosis: Diagnosis) -> list[str]:
    found = scenario_table(diagnosis)
    if found is None:
        return []
    rows = [["as it is", amounts.duration(found.now), "", "", ""]]
    for r in found.rows:
        saved = f"saves {amounts.share(r.saved)}" if r.saved > 0 else "saves nothing"
        rows.append([r.scenario.change, amounts.duration(r.scenario.seconds), r.interval, saved, ""])
    lines = ["What an epoch would take (with a 90% interval)"]
    first, *others = table(rows)
    lines.append(first)
    for row, r in zip(others, found.rows, strict=True):
        lines.append(row)
        lines += _item("", r.note, "      ") if r.note else []
    lines += [line for note in found.notes for line in _item("", note, "  ")]
    return lines + (list(_item("Less than 1%: ", ", ".join(found.idle), "  ", "  ")) if found.idle else [])


def _phases(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.phases:
        return []
    rows = [
        [
            p.name,
            amounts.duration(p.seconds),
            amounts.interval(p.low, p.high),
            amounts.share(p.share),
            "",
        ]
        for p in diagnosis.phases
        if p.share >= SHOWN_SHARE
    ]
    return ["Where a step spends its time", *table(rows)]


def _growth(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.growth:
        return []
    return ["Memory that grows", *(line for g in diagnosis.growth for line in _item("", g.text, "  "))]


def _minor(diagnosis: Diagnosis) -> list[str]:
    minor = [(CAUSES.get(f.cause, f.cause), amounts.share(f.weight)) for f in diagnosis.minor if f.cause != HEALTH]
    some = ", ".join(f"{name} ({weight})" for name, weight in minor if weight != "0%")
    none = ", ".join(name for name, weight in minor if weight == "0%")
    lines = list(_item(f"Looked at, and below {BAR:.0%}: ", some, "", "  ")) if some else []
    return lines + (list(_item("Looked at, and nothing seen of it: ", none, "", "  ")) if none else [])


def _unjudged(diagnosis: Diagnosis) -> list[str]:
    if not diagnosis.unjudged:
        return []
    lines = ["Not judged, for want of observations"]
    for missing, names in together(diagnosis.unjudged).items():
        lines += _item("", f"{', '.join(names)}: {'; '.join(missing) or amounts.UNKNOWN}", "  ", "    ")
    return lines


def _item(sign: str, words: str, indent: str = "", hanging: str | None = None) -> Iterator[str]:
    """Words behind a sign, folded below their own beginning."""
    below = indent + " " * len(sign) if hanging is None else hanging
    yield from textwrap.wrap(plain(words), WIDTH, initial_indent=indent + sign, subsequent_indent=below) or [
        indent + sign
    ]


def _fold(line: str) -> list[str]:
    line = plain(line)
    return [line] if len(line) <= WIDTH else textwrap.wrap(line, WIDTH, subsequent_indent="    ", drop_whitespace=True)
