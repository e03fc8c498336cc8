"""Names, numbers and sentences for people: the same words in the report, the summary and the log."""

from collections.abc import Iterable

from kfp_gate.gate.verdict import Entry, Verdict
from kfp_gate.metric_names import parse

_WORDS = {
    "map50": "AP50", "map75": "AP75", "map50_95": "AP50-95", "precision": "precision", "recall": "recall", "f1": "F1",
    "mean_confidence": "mean confidence", "abnormal_box_rate": "abnormal boxes",
    "undetected_image_rate": "undetected images", "false_alarm_rate": "false alarms",
    "calibration_error": "calibration error",
}  # fmt: skip


def metric_word(metric: str) -> str:
    """A metric in a heading: `map50` is AP50 of a class, and mAP50 where it is a mean over classes."""
    return _WORDS[metric]


def title(name: str) -> str:
    """A canonical metric name in words.

    >>> title("class/cone/size/small/recall")
    'cone, small: recall'
    >>> title("map50")
    'mAP50'
    """
    parsed = parse(name)
    word = _WORDS[parsed.metric]
    if parsed.class_name is None and word.startswith("AP"):
        word = f"m{word}"
    scope = [s for s in (parsed.class_name, parsed.size, parsed.slice) if s is not None]
    return f"{', '.join(scope)}: {word}" if scope else word


def bound(entry: Entry) -> str:
    """The bound with its direction, for instance `≥ 0.800`."""
    sign = {"min": "≥", "max": "≤", "max_drop": "drop ≤"}[entry.kind]
    return f"{sign} {number(entry.bound)}"


def number(value: float | None, *, sign: bool = False) -> str:
    """Three decimals, a real minus, and a dash for what was not computed."""
    if value is None:
        return "\N{EN DASH}"
    rounded = round(value, 3) + 0.0  # no minus before a zero
    text = f"{rounded:+.3f}" if sign and rounded else f"{rounded:.3f}"
    return text.replace("-", "\N{MINUS SIGN}")


def outcome(entry: Entry) -> str:
    """One sentence on an entry: what was found, and what would change it."""
    parts = []
    if entry.state == "waived":
        parts.append(f"waived by {entry.waived_by} until {entry.waived_until}: {entry.waived_why}")
    if entry.reason:
        parts.append(entry.reason)
    if entry.state == "missed" and entry.margin is not None:
        parts.append(f"missed by {number(-entry.margin)}")
    if entry.state in ("met", "missed") and entry.interval and entry.interval[0] < entry.bound < entry.interval[1]:
        parts.append("may be chance: the interval includes the bound")
    if entry.needed:
        parts.append(f"about {entry.needed:,} more instances would settle it")
    return "; ".join(parts)


def decisive(verdict: Verdict, most: int = 6) -> list[str]:
    """What the model was refused for, a line each, the widest misses first."""
    blocking = sorted(verdict.blocking, key=lambda e: (e.state != "missed", e.margin or 0.0))
    lines = []
    for entry in blocking[:most]:
        found = number(entry.compared)
        if entry.kind == "max_drop" and entry.drop is not None:
            found = f"{number(abs(entry.drop))} {'worse' if entry.drop > 0 else 'better'} than the champion's"
        evidence = f" ({outcome(entry)})" if outcome(entry) else ""
        lines.append(f"{title(entry.metric)} is {found}, asked for {bound(entry)}{evidence}")
    if len(blocking) > most:
        lines.append(f"and {len(blocking) - most} more, listed below")
    return lines


def warnings(verdict: Verdict) -> list[str]:
    """What a reader must know before trusting the headline, the gravest first."""
    found = [f"This gate would let a useless model pass: {text}." for text in verdict.self_test.vacuous]
    if verdict.separation.state == "not proven":
        found.append(
            "Separation is not proven: the model does not say which images it was trained and selected on, "
            "so the numbers may measure memory."
        )
    if verdict.ungated:
        count = len(verdict.ungated)
        found.append(
            f"{count} class{'es have' if count > 1 else ' has'} no criterion of "
            f"{'their' if count > 1 else 'its'} own: {listed(verdict.ungated)}. An average hides the small class."
        )
    if verdict.self_test.blind:
        found.append(
            f"A model that never finds {listed(verdict.self_test.blind, 'or')} would pass as well: "
            "no criterion would notice."
        )
    found += [f"Refused {text}." for text in verdict.refused_waivers]
    seen = verdict.champion.separation
    if verdict.champion.state == "compared" and seen is not None and seen.state == "not proven":
        found.append("The champion has no fingerprints: it may have seen test images, which would flatter it.")
    if verdict.champion.state == "not compared":
        found.append(f"Not compared with the champion: {verdict.champion.reason}.")
    return [*found, *verdict.notes]


def listed(names: Iterable[str], word: str = "and", most: int = 8) -> str:
    """Names in a sentence; of very many, the first and a count."""
    shown = list(names)
    if len(shown) > most:
        return f"{', '.join(shown[:most])} {word} {len(shown) - most} more"
    return f"{', '.join(shown[:-1])} {word} {shown[-1]}" if len(shown) > 1 else "".join(shown)
