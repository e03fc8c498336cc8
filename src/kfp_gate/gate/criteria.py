"""What a model must show: bounds on metrics of the whole set, of classes, of sizes and of slices.

Two inputs make the criteria. Flat bounds for the whole set (`min_map50`, `max_abnormal_box_rate`, ...), and
`class_thresholds`, whose keys are read in this order:

    "cone"                          a class by its name
    "*"                             each class; a class's own entry for the same metric and bound wins
    "overall"                       the whole set
    "size/small"                    a size band of the whole set
    "slice/weather=rain"            the images whose manifest column `weather` says `rain`
    "slice/weather=*"               each value of that column
    "slice/weather=rain/class/cone" a class in a slice, and so on: any scope of a canonical metric name

and whose values map a metric (or `size/<band>/<metric>`) to `{"min", "max", "max_drop", "min_instances"}`. A bare
number means `min`. A bound that is always true (a min of 0, a max or a max_drop of 1) is off; for a class it also
switches off what `*` says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from numbers import Real
from typing import Any, Literal

from kfp_gate.errors import LISTED_PROBLEMS, InvalidInput, Problem
from kfp_gate.metric_names import LOWER_IS_BETTER, METRICS, SIZE_BANDS, MetricName, parse

Kind = Literal["min", "max", "max_drop"]
KINDS: tuple[Kind, ...] = ("min", "max", "max_drop")
OF_A_SIZE = ("map50", "map75", "map50_95", "precision", "recall", "f1")
"""What can be asked of a size band: an image has none, and the other rates are not taken by size."""
_ALWAYS_TRUE = {"min": 0.0, "max": 1.0, "max_drop": 1.0}


@dataclass(frozen=True)
class Criterion:
    """One bound on one metric.

    Attributes:
        metric: canonical name.
        kind: `min` and `max` bound the value, `max_drop` bounds how far it may be worse than the champion's.
        bound: 0..1.
        min_instances: labelled objects (images, for a rate of images) below which nothing is decided.
        source: the parameter it came from, for messages.
    """

    metric: str
    kind: Kind
    bound: float
    min_instances: int = 0
    source: str = ""

    @property
    def id(self) -> str:
        """The name that a waiver gives: metric and kind, for instance `class/cone/map50:min`."""
        return f"{self.metric}:{self.kind}"


@dataclass(frozen=True)
class Criteria:
    """All bounds of a gate, and the classes that none of them is about."""

    entries: tuple[Criterion, ...]
    ungated: tuple[str, ...]

    @property
    def compares(self) -> bool:
        """Whether a champion is asked for."""
        return any(c.kind == "max_drop" for c in self.entries)

    @property
    def slices(self) -> tuple[str, ...]:
        """The `column=value` slices that some criterion names."""
        found = (parse(c.metric).slice for c in self.entries)
        return tuple(dict.fromkeys(s for s in found if s is not None))


def parse_criteria(
    bounds: Mapping[str, Any],
    class_thresholds: Any,
    classes: Sequence[str],
    *,
    min_instances: Any = 0,
    slices: Mapping[str, Sequence[str]] | None = None,
) -> Criteria:
    """Read and check all criteria, before anything is predicted.

    Args:
        bounds: `min_<metric>` or `max_<metric>` to a number in 0..1.
        class_thresholds: see the head of this module.
        classes: class names of the test set, by index.
        min_instances: for criteria that set no number of their own. Whole; a float like 5.0 is one, because
            pipeline parameters pass through JSON.
        slices: manifest column to its values; None: unknown yet, so that any slice is accepted.

    Raises:
        InvalidInput: all problems in one message: unknown classes and metrics with close matches, numbers that are
            none or outside 0..1, bounds in the wrong direction, and no criterion at all.
    """
    reader = _Reader(tuple(classes), slices)
    default = reader.whole(min_instances, "min_instances")
    for key, value in bounds.items():
        reader.flat(key, value)
    reader.thresholds(class_thresholds)
    if reader.problems:
        raise InvalidInput(
            f"{len(reader.problems)} problem{'s' * (len(reader.problems) > 1)} in the criteria",
            expected="known classes and metrics, bounds from 0 to 1", where="bounds and class_thresholds",
            next_step="correct the values listed; nothing was predicted yet", problems=reader.problems,
        )  # fmt: skip
    if not reader.found:
        raise InvalidInput(
            "no criterion: every bound is off", expected="at least one bound that a model can miss",
            where="bounds and class_thresholds",
            next_step='set for instance min_map50=0.5, or class_thresholds={"*": {"map50": 0.5}}',
        )  # fmt: skip
    entries = tuple(
        Criterion(metric, kind, bound, default if instances is None else instances, source)
        for (metric, kind), (bound, instances, source) in reader.found.items()
    )
    about = {parse(c.metric).class_name for c in entries}
    return Criteria(entries, tuple(c for c in classes if c not in about))


@dataclass
class _Reader:
    """Collects criteria and problems; nothing is raised before all input was read."""

    classes: tuple[str, ...]
    slices: Mapping[str, Sequence[str]] | None
    problems: list[Problem] = field(default_factory=list)
    found: dict[tuple[str, Kind], tuple[float, int | None, str]] = field(default_factory=dict)
    starred: bool = False
    own: dict[tuple[str, Kind], str] = field(default_factory=dict)  # bounds under a key without a star

    def problem(self, where: str, text: str) -> None:
        self.problems.append(Problem(where, text))

    def number(self, value: Any, where: str) -> float | None:
        if isinstance(value, bool) or not isinstance(value, Real):
            hint = "; write it without quotes" if isinstance(value, str) else ""
            self.problem(where, f"{value!r} is not a number{hint}")
            return None
        number: Any = value  # not yet a float: an integer may be too large for one
        # Written so that NaN fails it.
        if not 0 <= number <= 1:
            self.problem(where, f"{value!r} is outside 0..1")
            return None
        return float(number)

    def whole(self, value: Any, where: str) -> int:
        number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else -1
        if not (0 <= number <= 2**53 and number == int(number)):  # as far as every whole number is a float
            self.problem(where, f"{value!r} is not a whole number from 0")
            return 0
        return int(number)

    def flat(self, key: str, value: Any) -> None:
        kind, _, metric = key.partition("_")
        if kind not in ("min", "max") or metric not in METRICS:
            names = [f"{'max' if m in LOWER_IS_BETTER else 'min'}_{m}" for m in METRICS]
            self.problem(key, f"no such bound{self.close(key, names)}")
            return
        self.add(MetricName(metric), "min" if kind == "min" else "max", value, None, key)

    def add(self, name: MetricName, kind: Kind, value: Any, instances: int | None, source: str) -> None:
        bound = self.number(value, source)
        if bound is None:
            return
        off = bound == _ALWAYS_TRUE[kind]
        lower = name.metric in LOWER_IS_BETTER
        if not off and kind == "min" and lower:
            self.problem(source, f'{name.metric} is better when low: write {{"max": {value}}}')
        elif not off and kind == "max" and not lower and name.metric != "mean_confidence":
            self.problem(source, f'{name.metric} is better when high: write {{"min": {value}}}')
        elif off:
            self.found.pop((str(name), kind), None)
        else:
            self.found[str(name), kind] = (bound, instances, source)

    def thresholds(self, thresholds: Any) -> None:
        if not isinstance(thresholds, Mapping):
            self.problem("class_thresholds", f"{thresholds!r} is not a mapping from class to metrics")
            return
        # The widest keys first: what is said of one class or slice replaces what is said of each.
        keys = sorted(thresholds, key=self.width, reverse=True)
        for key in keys:
            where = f"class_thresholds[{key!r}]"
            metrics = thresholds[key]
            if not isinstance(metrics, Mapping):
                self.problem(where, f'{metrics!r} is not a mapping from metric to bound, such as {{"map50": 0.5}}')
                continue
            if not isinstance(key, str):
                self.problem(where, "the key is not a text")
                continue
            scopes = self.scopes(key, where)
            self.starred = self.width(key) > 0
            for metric, spec in metrics.items():
                self.spec(scopes, metric, spec, f"{where}[{metric!r}]")

    def width(self, key: Any) -> int:
        """How many stars of a key stand for more than one thing; a class may have one in its name."""
        return 0 if str(key).removeprefix("class/") in self.classes or key in self.classes else str(key).count("*")

    def close(self, text: str, known: Sequence[str]) -> str:
        """A hint for a problem that will be listed; of hundreds of wrong names, each takes a tenth of a second."""
        return _close(text, known) if len(self.problems) < LISTED_PROBLEMS else ""

    def spec(self, scopes: Iterable[MetricName], metric: Any, spec: Any, where: str) -> None:
        band = None
        name = metric
        if isinstance(metric, str) and metric.startswith("size/") and metric.count("/") == 2:
            _, band, name = metric.split("/")
        if name not in METRICS or (band is not None and band not in SIZE_BANDS):
            known = [*METRICS, *(f"size/{b}/{m}" for b in SIZE_BANDS for m in METRICS)]
            self.problem(where, f"unknown metric{self.close(str(metric), known)}")
            return
        if not isinstance(spec, Mapping):
            spec = {"min": spec}
        unknown = [k for k in spec if k not in (*KINDS, "min_instances")]
        for key in unknown:
            self.problem(f"{where}[{key!r}]", f"unknown bound{self.close(str(key), [*KINDS, 'min_instances'])}")
        if not unknown and not any(kind in spec for kind in KINDS):
            self.problem(where, "no bound in it: give min, max or max_drop")
        low, high = spec.get("min"), spec.get("max")
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            self.problem(where, f"min {low!r} is above max {high!r}: nothing can pass")
        instances = self.whole(spec["min_instances"], f"{where}['min_instances']") if "min_instances" in spec else None
        before = len(self.problems)
        for scope in scopes:
            if len(self.problems) > before:
                return  # the same problem once, not for each class
            self.applicable(scope, band, name, where)
            full = MetricName(name, scope.class_name, band or scope.size, scope.slice)
            for kind in KINDS:
                if kind in spec:
                    source = f"{where}[{kind!r}]"
                    if not self.starred and (before_this := self.own.setdefault((str(full), kind), source)) != source:
                        self.problem(source, f"bounds {full} again; {before_this} does already")
                    self.add(full, kind, spec[kind], instances, source)

    def applicable(self, scope: MetricName, band: str | None, metric: str, where: str) -> None:
        if (band or scope.size) and metric not in OF_A_SIZE:
            self.problem(where, f"{metric} is not taken by size; {', '.join(OF_A_SIZE)} are")
        if band and scope.size:
            self.problem(where, "two size bands")

    def scopes(self, key: str, where: str) -> list[MetricName]:
        """The scopes that a key stands for; none after a problem. Their `metric` is empty."""
        if key in self.classes:
            return [MetricName("", class_name=key)]
        if key == "*":
            return [MetricName("", class_name=c) for c in self.classes]
        if key == "overall":
            return [MetricName("")]
        if not key.startswith(("slice/", "size/", "class/")):
            self.problem(where, f"unknown class{self.close(key, self.classes)}")
            return []
        return self._written_out(key, where)

    def _written_out(self, key: str, where: str) -> list[MetricName]:
        try:
            scope = parse(f"{key}/map50")
        except InvalidInput:
            self.problem(where, "not a scope: write slice/<column>=<value>, size/<band> or class/<name>, in this order")
            return []
        names: Sequence[str | None] = [scope.class_name]
        if scope.class_name == "*":
            names = self.classes
        elif scope.class_name is not None and scope.class_name not in self.classes:
            self.problem(where, f"unknown class{self.close(scope.class_name, self.classes)}")
            return []
        return [
            MetricName("", class_name=name, size=scope.size, slice=part)
            for part in self._slice_values(scope.slice, where)
            for name in names
        ]

    def _slice_values(self, wanted: str | None, where: str) -> Sequence[str | None]:
        if wanted is None:
            return [None]
        column, equals, value = wanted.partition("=")
        if not equals:
            self.problem(where, "a slice is written <column>=<value>")
            return []
        if self.slices is None:
            return [wanted]
        if column not in self.slices:
            self.problem(where, f"the manifest has no column {column!r}{self.close(column, list(self.slices))}")
            return []
        values = self.slices[column]
        if value == "*":
            return [f"{column}={v}" for v in values]
        if value not in values:
            self.problem(where, f"no test image has {column}={value!r}{self.close(value, values)}")
            return []
        return [wanted]


def _close(text: str, known: Sequence[str]) -> str:
    close = get_close_matches(text, known, n=3, cutoff=0.5)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    shown = ", ".join(map(repr, known[:12])) + (f", ... ({len(known)} in all)" if len(known) > 12 else "")
    return f"; known: {shown}" if known else ""
