"""The one sentence that a person acts on."""

from collections.abc import Sequence

from kfp_gate.diagnosis.amounts import duration, share
from kfp_gate.diagnosis.findings import BAR, Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.feeding import feeding
from kfp_gate.diagnosis.measured.observations import Observations


def sentence(
    seen: Observations, state: str, named: Sequence[Finding], judged: Sequence[Finding | Unjudged],
    lacking: Sequence[str],
) -> str:  # fmt: skip
    """What holds the run back and what to do, with numbers; or that nothing does; or what is missing to say."""
    if state == "cause":
        first = named[0]
        advice = str(first.detail.get("advice") or "")
        title = f"{_upper(first.title).removesuffix('.')}."
        return f"{title} {advice.removesuffix('.')}." if advice else title
    if state == "not_enough":
        so_far = _seen_so_far(seen)
        return f"Not enough observations to say what holds this run back{so_far}. Missing: {'; '.join(lacking)}."
    busy = next((j for j in judged if isinstance(j, Finding) and j.cause == "device_busy"), None)
    rest = _largest_rest(judged)
    what = "device" if seen.cuda else "CPU"
    if busy is None:
        return "Nothing that was judged holds this run back."
    return f"Nothing holds this run back: the {what} computes {share(busy.weight)} of the time{rest}."


def _seen_so_far(seen: Observations) -> str:
    fed = feeding(seen)
    if fed is None or seen.share(fed.wait) < BAR:
        return ""
    waits = share(seen.share(fed.wait))
    return f": {waits} of the time waits for images ({duration(fed.wait)} a step), and why is unknown"


def _largest_rest(judged: Sequence[Finding | Unjudged]) -> str:
    others = [j for j in judged if isinstance(j, Finding) and j.cause != "device_busy" and j.weight >= 0.02]
    if not others:
        return ""
    first = max(others, key=lambda j: j.weight)
    return f"; the largest of the rest: {first.title[:1].lower()}{first.title[1:]}"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
