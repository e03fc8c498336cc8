"""The verdict: what was asked, what was found, and whether the model goes on.

Stored as JSON (`verdict.schema.json` beside this module describes it). Readers must tolerate keys they do not
know; a change that breaks a reader raises `schema_version`. Numbers are finite or null, and a null value has a
reason beside it. The file holds no time and no path, so that judging the same evaluation twice gives the same bytes.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from kfp_gate.errors import InvalidInput
from kfp_gate.metric_names import parse

SCHEMA_VERSION = 1
State = Literal["met", "missed", "insufficient", "waived"]
STATES: tuple[State, ...] = ("met", "missed", "insufficient", "waived")


@dataclass(frozen=True)
class Entry:
    """One criterion, judged.

    Attributes:
        criterion: its id, `<metric>:<kind>`, as a waiver names it.
        metric, kind, bound, source: of the criterion.
        state: `met`, `missed`, `insufficient` (not enough evidence, or not computed) or `waived`.
        value: of the candidate; None if it was not computed.
        reason: in words, why the state is what it is; "" where the numbers say it all.
        instances: how much evidence the value rests on; labelled objects, or images for a rate of images.
        min_instances: what the criterion asks for.
        interval: confidence interval of what is compared with the bound (the value, or the drop).
        champion: the champion's value on the same images, for `max_drop`.
        drop: by how much the candidate is worse than the champion (negative: better), for `max_drop`.
        needed: how many more instances would settle it, where that can be told.
        waived_by, waived_why, waived_until: of the waiver that was applied.
    """

    criterion: str
    metric: str
    kind: str
    bound: float
    state: State
    value: float | None = None
    reason: str = ""
    instances: int | None = None
    min_instances: int = 0
    interval: tuple[float, float] | None = None
    champion: float | None = None
    drop: float | None = None
    needed: int | None = None
    source: str = ""
    waived_by: str = ""
    waived_why: str = ""
    waived_until: str = ""

    @property
    def compared(self) -> float | None:
        """What stands against the bound: the drop for `max_drop`, else the value."""
        return self.drop if self.kind == "max_drop" else self.value

    @property
    def margin(self) -> float | None:
        """By how much the bound is cleared; negative: missed by so much."""
        if self.compared is None:
            return None
        return self.compared - self.bound if self.kind == "min" else self.bound - self.compared


@dataclass(frozen=True)
class Separation:
    """Whether the test images were new to a model.

    `state` is `proven` (fingerprints were compared and nothing is shared), `overlap`, or `not proven` (the model
    has no fingerprints). The lists name test images, the first twenty of each kind; the counts are complete.
    """

    state: Literal["proven", "overlap", "not proven"]
    compared_with: int = 0
    same_image: int = 0
    near_duplicate: int = 0
    same_group: int = 0
    examples: tuple[str, ...] = ()


@dataclass(frozen=True)
class Champion:
    """What the candidate was compared with.

    `state` is `none` (no champion yet, or none asked for), `compared`, or `not compared`, with the reason.
    """

    state: Literal["none", "compared", "not compared"] = "none"
    uri: str = ""
    sha256: str = ""
    reason: str = ""
    common_classes: tuple[str, ...] = ()
    separation: Separation | None = None


@dataclass(frozen=True)
class SelfTest:
    """The gate's test of itself: spoilt copies of the predictions, none of which may pass.

    Attributes:
        vacuous: spoilt copies that these criteria would let through; a gate with one in it decides little.
        blind: classes whose detections can all be removed without the gate noticing.
    """

    vacuous: tuple[str, ...] = ()
    blind: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The gate's answer, with all that it rests on.

    Attributes:
        passed: whether the model goes on.
        entries: every criterion, in the order given.
        ungated: classes without a criterion of their own; an average hides the small class.
        model: sha256, classes and run id of the candidate.
        data: digest, split, images and objects of the test set.
        refused_waivers: waivers that were given and not applied, each with the reason.
        notes: what a reader must know besides.
    """

    passed: bool
    entries: tuple[Entry, ...]
    ungated: tuple[str, ...]
    model: Mapping[str, Any]
    data: Mapping[str, Any]
    separation: Separation
    champion: Champion = field(default_factory=Champion)
    self_test: SelfTest = field(default_factory=SelfTest)
    decide: str = "point"
    on_insufficient: str = "block"
    refused_waivers: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def of(self, *states: State) -> tuple[Entry, ...]:
        """The entries in these states."""
        return tuple(e for e in self.entries if e.state in states)

    @property
    def blocking(self) -> tuple[Entry, ...]:
        """The entries for which the model was refused."""
        return self.of("missed", "insufficient") if self.on_insufficient == "block" else self.of("missed")

    @property
    def headline(self) -> str:
        """One sentence for logs, tags and the head of the report."""
        total = len(self.entries)
        if self.passed:
            waived, open_ = len(self.of("waived")), len(self.of("insufficient"))
            extra = f", {waived} waived" * bool(waived) + f", {open_} without enough evidence" * bool(open_)
            return f"Passed: {len(self.of('met'))} of {total} criteria met{extra}"
        parts = [f"{len(self.of(s))} {word}" for s, word in _WORDS if self.of(s)]
        return f"Refused: of {total} criteria, {' and '.join(parts)}"


_WORDS: tuple[tuple[State, str], ...] = (("missed", "missed"), ("insufficient", "without enough evidence"))


def write_verdict(verdict: Verdict, path: Path) -> None:
    """Write the verdict as JSON. NaN or infinity in it is an error of ours, raised as ValueError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(verdict), encoding="utf-8")


def to_json(verdict: Verdict) -> str:
    """The JSON text of a verdict; equal verdicts give equal text."""
    return json.dumps(asdict(verdict), ensure_ascii=False, indent=1, allow_nan=False)


def read_verdict(path: Path) -> Verdict:
    """Read a stored verdict.

    Raises:
        InvalidInput: no file, not a verdict, or one of a newer schema version than this code knows.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = int(values["schema_version"])
        if version <= SCHEMA_VERSION:
            return _verdict(values)
        found = f"schema version {version}"
    # OverflowError: infinity where a version belongs, or an integer too large; RecursionError: nested without end.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        found = f"not a verdict ({type(error).__name__})"
    raise InvalidInput(
        found, expected=f"a verdict.json of schema version {SCHEMA_VERSION} or older", where=str(path),
        next_step="give the `verdict` output of the validation gate, and use the kfp-gate that wrote it or a newer one",
    )  # fmt: skip


def _verdict(values: Mapping[str, Any]) -> Verdict:
    nested = {
        "entries": tuple(_make(Entry, e) for e in values["entries"]),
        "separation": separation_from(values["separation"]),
        "champion": champion_from(values["champion"]),
        "self_test": _make(SelfTest, values["self_test"]),
    }
    verdict: Verdict = _make(Verdict, {**values, **nested})
    for entry in verdict.entries:
        if entry.kind not in ("min", "max", "max_drop"):
            raise ValueError(f"kind {entry.kind!r}")
        parse(entry.metric)  # a name that is none is an input error of its own
    return verdict


def champion_from(values: Mapping[str, Any]) -> Champion:
    """A champion from its JSON values; KeyError or TypeError if they are none."""
    separation = values.get("separation")
    champion: Champion = _make(Champion, {**values, "separation": separation and separation_from(separation)})
    return champion


def separation_from(values: Mapping[str, Any]) -> Separation:
    """A separation from its JSON values; KeyError or TypeError if they are none."""
    separation: Separation = _make(Separation, {**values, "state": values["state"]})
    return separation


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    """A dataclass from JSON values; unknown keys are left out.

    Raises:
        TypeError: a key is missing, or a value is not of the field's type: a verdict may have been edited.
    """
    types = get_type_hints(kind)
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items() if k in types}
    for name, value in arguments.items():
        if not _fits(value, types[name]):
            raise TypeError(f"{name} is {value!r}")
    return kind(**arguments)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation's type; numbers are finite, and True is none."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, k) for k in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        kinds = [arguments[0]] * len(value) if arguments[-1] is ... and isinstance(value, tuple) else arguments
        return isinstance(value, tuple) and len(value) == len(kinds) and all(map(_fits, value, kinds))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or kind)
