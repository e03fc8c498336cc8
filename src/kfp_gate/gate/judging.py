"""A verdict from evaluations: no detector, no image, no torch. The gate and a later judgement both end here."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import date

from kfp_gate import __version__
from kfp_gate.errors import Broken
from kfp_gate.evaluation.columns import Records
from kfp_gate.evaluation.evaluate import Evaluation
from kfp_gate.gate.criteria import Criteria, Criterion
from kfp_gate.gate.deciding import Rule, corrected_level, decide
from kfp_gate.gate.intervals import Intervals, drop_intervals, value_intervals
from kfp_gate.gate.measuring import Measured, evidence_of, measure
from kfp_gate.gate.origin import Origin, difference
from kfp_gate.gate.settings import GateSettings
from kfp_gate.gate.slices import Slices, slices_of
from kfp_gate.gate.spoiling import SPOILT, spoil, without
from kfp_gate.gate.verdict import Champion, Entry, SelfTest, Separation, Verdict
from kfp_gate.gate.waivers import apply_waivers
from kfp_gate.metric_names import parse

log = logging.getLogger(__name__)

MOST_BLIND_WORK = 20_000_000
"""Detections times classes without a bound of their own, up to which blind classes are looked for: some 15 seconds."""


@dataclass(frozen=True)
class Judged:
    """A verdict, and what it was taken from.

    Attributes:
        candidate: on all classes.
        common: the candidate on the classes that the champion knows too; `candidate` without a champion.
        champion: on the same classes as `common`.
    """

    verdict: Verdict
    candidate: Measured
    common: Measured
    champion: Measured | None


@dataclass(frozen=True)
class Rival:
    """The champion: what is known of it, and its evaluation on the same images where it may be compared."""

    facts: Champion = field(default_factory=Champion)
    evaluation: Evaluation | None = None


def judge_evaluation(
    evaluation: Evaluation,
    settings: GateSettings,
    *,
    separation: Separation,
    rival: Rival | None = None,
    run_id: str = "",
    split: str = "test",
    today: date | None = None,
    origin: Origin | None = None,
) -> Judged:
    """Judge an evaluation.

    Args:
        evaluation: of the candidate.
        settings: criteria and how to decide.
        separation: whether the images were new to the candidate.
        rival: the champion; None: there is none yet.
        run_id: of the candidate's training, for the verdict.
        split: name of the test split, for the verdict.
        today: the day that waivers are checked against.
        origin: with what the candidate was made and evaluated; None: unknown.

    Raises:
        InvalidInput: problems in the criteria or waivers.
        Broken: the champion was evaluated on other images.
    """
    rival, origin = rival or Rival(), origin or Origin()
    slices = slices_of(evaluation.slices)
    criteria, waivers = settings.check(evaluation.classes, slices.values)
    candidate = measure(
        evaluation.records, evaluation.classes, criteria, slices, confidence=settings.confidence,
        unknown=evaluation.unknown_classes,
    )  # fmt: skip
    theirs = _champion(evaluation, rival.evaluation, criteria, slices, settings)
    case = _Case(evaluation, criteria, slices, settings, rival.facts, theirs)
    common = case.on_common_classes(candidate)
    rule = Rule(settings.decide, corrected_level(settings.level, len(criteria.entries), settings.correction))
    intervals = value_intervals(evaluation, criteria, settings, rule.level)
    drops: Intervals = {}
    if theirs is not None and rival.evaluation is not None:
        drops = drop_intervals(evaluation, rival.evaluation, theirs.unknown, criteria, settings, rule.level)
    entries = tuple(case.entry(criterion, candidate, common, rule, intervals, drops) for criterion in criteria.entries)
    waived = apply_waivers(entries, waivers, evaluation.model_sha256, today)
    records = evaluation.records
    verdict = Verdict(
        passed=passes(waived.entries, settings.on_insufficient),
        entries=waived.entries,
        ungated=criteria.ungated,
        model={"sha256": evaluation.model_sha256, "classes": list(evaluation.classes), "run_id": run_id}
        | ({"image_lock": origin.model_lock} if origin.model_lock else {}),
        data={
            "digest": evaluation.manifest_digest, "split": split, "images": len(records),
            "objects": int((~records.crowd).sum()),
        },
        separation=separation,
        champion=_with_common(rival.facts, evaluation, rival.evaluation),
        decide=settings.decide,
        on_insufficient=settings.on_insufficient,
        refused_waivers=waived.refused,
        notes=tuple(_notes(evaluation, candidate, rival, waived.unused, origin)),
        settings=settings.to_json(),
        versions={**evaluation.versions, "kfp-gate": __version__}
        | ({"image lock": origin.gate_lock} if origin.gate_lock else {}),
    )  # fmt: skip
    tested = SelfTest(tuple(_vacuous(case)), tuple(_blind(case, verdict)))
    return Judged(replace(verdict, self_test=tested), candidate, common, theirs)


def passes(entries: Sequence[Entry], on_insufficient: str) -> bool:
    """Whether a model with these entries goes on. Where nothing was asked, or nothing was shown, nothing passes: also
    `on_insufficient="allow"` wants one criterion that was met or waived."""
    shown = {"met", "waived"}
    good = shown | ({"insufficient"} if on_insufficient == "allow" else set())
    return any(e.state in shown for e in entries) and all(e.state in good for e in entries)


@dataclass(frozen=True)
class _Case:
    """What stays the same while the candidate's records are judged, and spoilt, and judged again."""

    evaluation: Evaluation
    criteria: Criteria
    slices: Slices
    settings: GateSettings
    facts: Champion
    theirs: Measured | None

    def entries(self, records: Records) -> list[Entry]:
        """Entries of altered records, by their points: a confident gate asks for more, never for less."""
        bands = any(parse(c.metric).size for c in self.criteria.entries)
        measured = measure(
            records, self.evaluation.classes, self.criteria, self.slices, confidence=self.settings.confidence,
            unknown=self.evaluation.unknown_classes, bands=bands,
        )  # fmt: skip
        common = self.on_common_classes(measured, bands=bands)
        return [self.entry(c, measured, common, Rule("point"), {}, {}) for c in self.criteria.entries]

    def passes(self, entries: Sequence[Entry]) -> bool:
        return passes(entries, self.settings.on_insufficient)

    def on_common_classes(self, measured: Measured, *, bands: bool = True) -> Measured:
        """The candidate, measured on the classes that the champion knows too."""
        if self.theirs is None or self.theirs.unknown == measured.unknown:
            return measured
        return measure(
            measured.records, measured.classes, self.criteria, self.slices, confidence=measured.confidence,
            unknown=self.theirs.unknown, bands=bands,
        )  # fmt: skip

    def entry(
        self, criterion: Criterion, candidate: Measured, common: Measured, rule: Rule, intervals: Intervals,
        drops: Intervals,
    ) -> Entry:  # fmt: skip
        if criterion.kind != "max_drop":
            return decide(criterion, evidence_of(criterion, candidate, interval=intervals.get(criterion.metric)), rule)
        theirs, name = self.theirs, parse(criterion.metric).class_name
        if theirs is not None and name in theirs.unknown:
            # A class that is new: to block it would keep it out for ever.
            first, why, theirs = (
                True,
                "the champion does not know this class, so there is nothing to compare with",
                None,
            )
        elif self.facts.state == "none":
            # Only the registry's word that there is none yet makes a model the first; that nobody named one does not.
            first = bool(self.facts.uri)
            why = "no champion yet, so nothing to compare with" if first else "no champion was named to compare with"
        else:
            first, why = False, self.facts.reason
        evidence = evidence_of(
            criterion, common if name is None else candidate, champion=theirs, no_champion=why, first=first,
            drop_interval=drops.get(criterion.metric),
        )  # fmt: skip
        return decide(criterion, evidence, rule)


def _champion(
    evaluation: Evaluation, champion: Evaluation | None, criteria: Criteria, slices: Slices, settings: GateSettings
) -> Measured | None:
    """The champion, measured on the classes that both know."""
    if champion is None:
        return None
    if champion.manifest_digest != evaluation.manifest_digest or champion.images != evaluation.images:
        raise Broken(
            f"a champion evaluated on {champion.manifest_digest[:12]}",
            expected=f"the candidate's test set, {evaluation.manifest_digest[:12]}", where="champion's evaluation",
            next_step="evaluate both on one manifest",
        )  # fmt: skip
    left = {*champion.unknown_classes, *evaluation.unknown_classes}
    return measure(
        champion.records, evaluation.classes, criteria, slices, confidence=settings.confidence,
        unknown=tuple(c for c in evaluation.classes if c in left),
    )  # fmt: skip


def _with_common(facts: Champion, evaluation: Evaluation, champion: Evaluation | None) -> Champion:
    if champion is None:
        return facts
    left = {*champion.unknown_classes, *evaluation.unknown_classes}
    return replace(facts, common_classes=tuple(c for c in evaluation.classes if c not in left))


def _notes(
    evaluation: Evaluation, candidate: Measured, rival: Rival, unused: Sequence[str], origin: Origin
) -> list[str]:
    notes = []
    absent = [c for c in evaluation.classes if not _objects(candidate, c)]
    if absent:
        notes.append(f"No object in the test set, so not measured: {', '.join(absent)}.")
    if evaluation.dropped_classes:
        notes.append(f"Classes of the model that the data set lacks: {', '.join(evaluation.dropped_classes)}.")
    champion = rival.evaluation
    if champion is not None and (champion.unknown_classes or champion.dropped_classes):
        lacks, adds = ", ".join(champion.unknown_classes) or "none", ", ".join(champion.dropped_classes) or "none"
        notes.append(
            f"The champion has other classes (lacks: {lacks}; adds: {adds}). Compared on the common ones; overall "
            "values in a comparison are taken over these."
        )
    if other := difference(origin, evaluation.versions):
        notes.append(other)
    return [*notes, *(f"A {text}." for text in unused)]


def _objects(measured: Measured, class_name: str) -> int:
    index = measured.classes.index(class_name)
    return int(((measured.records.truth_classes == index) & ~measured.records.crowd).sum())


def _vacuous(case: _Case) -> list[str]:
    return [
        meaning for how, meaning in SPOILT.items() if case.passes(case.entries(spoil(case.evaluation.records, how)))
    ]


def _blind(case: _Case, verdict: Verdict) -> list[str]:
    """Classes all of whose detections can go without the verdict changing; asked only of a gate that let pass."""
    records, classes = case.evaluation.records, case.evaluation.classes
    if not verdict.passed:
        return []
    # What a class of its own lower bound scores without detections is known: nothing.
    own = {parse(e.metric).class_name for e in verdict.entries if e.kind == "min" and e.state == "met"}
    shown = set(records.truth_classes[~records.crowd].tolist())
    asked = [i for i, name in enumerate(classes) if name not in own and i in shown]
    if len(records.scores) * len(asked) > MOST_BLIND_WORK:
        log.warning("blind classes were not looked for: %d detections, %d classes", len(records.scores), len(asked))
        return []
    waived = {e.criterion for e in verdict.entries if e.state == "waived"}
    blind = []
    for index in asked:
        left = case.entries(without(records, records.classes == index))
        if case.passes([replace(e, state="waived") if e.criterion in waived else e for e in left]):
            blind.append(classes[index])
    return blind
