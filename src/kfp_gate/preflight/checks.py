"""Findings of the checks before training: one table, all problems at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kfp_gate.errors import InvalidInput, KfpGateError, Problem, hide_secrets

Level = Literal["error", "warning", "ok"]
_ORDER: dict[Level, int] = {"error": 0, "warning": 1, "ok": 2}


@dataclass(frozen=True)
class Check:
    """One finding.

    Attributes:
        level: `error` stops the pipeline, `warning` is told, `ok` says what was tried and holds.
        what: the finding, with the values found.
        why: what would happen later; "" for `ok`.
        cure: what to do about it; "" for `ok`.
    """

    level: Level
    what: str
    why: str = ""
    cure: str = ""


def ok(what: str) -> Check:
    """Something that was tried and holds."""
    return Check("ok", what)


def error(what: str, *, why: str, cure: str) -> Check:
    """Something that would fail later."""
    return Check("error", what, why, cure)


def warning(what: str, *, why: str, cure: str) -> Check:
    """Something that may surprise later."""
    return Check("warning", what, why, cure)


def from_error(found: KfpGateError, *, why: str) -> list[Check]:
    """Error-level checks for an error of ours: one per problem that it lists, else one."""
    if found.problems:
        return [error(f"{p.where}: {p.found}", why=why, cure=found.next_step) for p in found.problems]
    return [error(f"{found.where}: {found.found}", why=why, cure=found.next_step)]


def guarded(checks: Callable[[], Sequence[Check]], *, why: str) -> list[Check]:
    """The findings of one group of checks. An error of ours in it is a finding too, and the other groups go on."""
    try:
        return list(checks())
    except KfpGateError as found:
        return from_error(found, why=why)


def raise_errors(checks: Sequence[Check]) -> None:
    """Raise one `InvalidInput` that lists all errors; nothing if there is none."""
    errors = [c for c in checks if c.level == "error"]
    if errors:
        raise InvalidInput(
            f"{len(errors)} problem{'s' * (len(errors) > 1)} that would stop the pipeline later",
            expected="no error among the checks before training", where="preflight",
            next_step="correct what is listed; nothing was trained yet, and all findings are in the step's table",
            problems=[Problem(c.what, f"{c.why}; {c.cure}") for c in errors],
        )  # fmt: skip


def markdown(checks: Sequence[Check]) -> str:
    """All findings as one Markdown table, errors first; text from outside cannot break out of its cell."""
    counts = {level: sum(c.level == level for c in checks) for level in _ORDER}
    head = f"{counts['error']} errors, {counts['warning']} warnings, {counts['ok']} fine"
    lines = ["# Checks before training", "", head, "", "| level | what | why it would hurt later | how to cure |"]
    lines.append("|---|---|---|---|")
    for check in sorted(checks, key=lambda c: _ORDER[c.level]):
        level = f"**{check.level}**" if check.level == "error" else check.level
        lines.append(f"| {level} | {_cell(check.what)} | {_cell(check.why)} | {_cell(check.cure)} |")
    return "\n".join(lines) + "\n"


def text(checks: Sequence[Check]) -> str:
    """The same for a terminal or a log: errors and warnings in full, the rest in one line each."""
    lines = []
    for check in sorted(checks, key=lambda c: _ORDER[c.level]):
        lines.append(f"{check.level:<8} {check.what}")
        if check.why:
            lines.append(f"         why:  {check.why}")
        if check.cure:
            lines.append(f"         cure: {check.cure}")
    return "\n".join(lines)


def without_secrets(check: Check) -> Check:
    """The check with secrets of the environment blanked out."""
    return replace(check, what=hide_secrets(check.what), why=hide_secrets(check.why), cure=hide_secrets(check.cure))


def _cell(value: str) -> str:
    value = value.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("\\", "\\\\")
    for character in "|`*_[]":
        value = value.replace(character, "\\" + character)
    return "<br>".join(value.splitlines())
