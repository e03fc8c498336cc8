"""Waivers: a person lets one model pass one criterion, in writing and until a day.

    {"criterion": "class/cone/map50:min", "model": "<sha256 of the weights>", "who": "A. Person <a@example.org>",
     "why": "the new cone labels arrive next week, ticket 123", "expires": "2027-01-31"}

A waiver that is no waiver (a field missing, no such criterion, no date) is an input error, found before anything is
predicted. One that has expired or was given for another model is refused: it changes nothing, and the verdict, the
report and the log say so.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from difflib import get_close_matches
from typing import Any

from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.gate.verdict import Entry

FIELDS = ("criterion", "model", "who", "why", "expires")


@dataclass(frozen=True)
class Waiver:
    """One person's word that one model may miss one criterion until the end of one day (UTC)."""

    criterion: str
    model: str
    who: str
    why: str
    expires: date


@dataclass(frozen=True)
class Waived:
    """Entries after waivers, and the waivers that were refused or not needed, in words."""

    entries: tuple[Entry, ...]
    refused: tuple[str, ...]
    unused: tuple[str, ...]


def parse_waivers(waivers: Any, criteria: Iterable[str]) -> tuple[Waiver, ...]:
    """Read and check waivers.

    Args:
        waivers: a list of mappings with the fields above.
        criteria: ids of the gate's criteria.

    Raises:
        InvalidInput: all malformed waivers together.
    """
    known = tuple(criteria)
    problems: list[Problem] = []
    parsed: list[Waiver] = []
    given = waivers if isinstance(waivers, list | tuple) else None
    if given is None:
        problems.append(Problem("waivers", f"{waivers!r} is not a list"))
    for i, one in enumerate(given or ()):
        found = list(_problems(one, known))
        problems += [Problem(f"waivers[{i}]", text) for text in found]
        if not found:
            parsed.append(
                Waiver(one["criterion"], one["model"], one["who"], one["why"], date.fromisoformat(one["expires"]))
            )
    if problems:
        raise InvalidInput(
            f"{len(problems)} problem{'s' * (len(problems) > 1)} in the waivers",
            expected=f"each with {', '.join(FIELDS)}; criterion as the verdict names it, model as the full sha256",
            where="waivers", next_step="correct the waivers listed, or leave them out", problems=problems,
        )  # fmt: skip
    return tuple(parsed)


def apply_waivers(entries: Sequence[Entry], waivers: Sequence[Waiver], model: str, today: date | None = None) -> Waived:
    """Turn `missed` and `insufficient` entries that a valid waiver names into `waived`.

    Args:
        entries: judged.
        waivers: parsed.
        model: sha256 of the candidate's weights.
        today: the day of judging; the current one (UTC) if None.
    """
    day = today or datetime.now(UTC).date()
    refused: list[str] = []
    valid: dict[str, Waiver] = {}
    for waiver in waivers:
        name = f"waiver of {waiver.criterion} by {waiver.who}"
        if waiver.model != model:
            refused.append(f"{name}: given for model {waiver.model[:12]}, this one is {model[:12]}")
        elif day > waiver.expires:
            refused.append(f"{name}: expired on {waiver.expires.isoformat()}")
        else:
            valid[waiver.criterion] = waiver
    result, unused = [], []
    for entry in entries:
        chosen = valid.get(entry.criterion)
        if chosen is None:
            result.append(entry)
        elif entry.state == "met":
            unused.append(f"waiver of {entry.criterion} by {chosen.who} was not needed")
            result.append(entry)
        else:
            result.append(
                replace(
                    entry,
                    state="waived",
                    reason=f"{entry.state}" + f" ({entry.reason})" * bool(entry.reason),
                    waived_by=chosen.who,
                    waived_why=chosen.why,
                    waived_until=chosen.expires.isoformat(),
                )
            )
    return Waived(tuple(result), tuple(refused), tuple(unused))


def _problems(one: Any, known: Sequence[str]) -> Iterable[str]:
    if not isinstance(one, Mapping):
        yield f"{one!r} is not a mapping"
        return
    for name in FIELDS:
        if not isinstance(one.get(name), str) or not one[name].strip():
            yield f"no {name}"
    for name in one:
        if name not in FIELDS:
            yield f"unknown field {name!r}"
    criterion, model, expires = (one.get(k) for k in ("criterion", "model", "expires"))
    if isinstance(criterion, str) and criterion.strip() and criterion not in known:
        close = get_close_matches(criterion, known, n=3, cutoff=0.5)
        yield f"no criterion {criterion!r}" + f"; did you mean {' or '.join(map(repr, close))}?" * bool(close)
    if isinstance(model, str) and model.strip() and not re.fullmatch(r"[0-9a-f]{64}", model):
        yield f"model {model!r} is not a full sha256 (64 hex digits)"
    if isinstance(expires, str) and expires.strip():
        try:
            date.fromisoformat(expires)
        except ValueError:
            yield f"expires {expires!r} is not a date such as 2027-01-31"
