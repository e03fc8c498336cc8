"""Thresholds, monitors and names: whether the gate can judge what it is asked to judge."""

from collections.abc import Mapping, Sequence

from kfp_gate.data.manifest import Manifest
from kfp_gate.errors import InvalidInput
from kfp_gate.gate.criteria import Criterion
from kfp_gate.gate.settings import GateSettings
from kfp_gate.gate.slices import sliceable, slices_of
from kfp_gate.metric_names import MLFLOW_NAME_LIMIT, known_names, parse, to_mlflow
from kfp_gate.preflight.checks import Check, error, from_error, ok, warning
from kfp_gate.preflight.data_checks import instances

LISTED = 10


def check_criteria(gate: GateSettings, test: Manifest) -> list[Check]:
    """Criteria that cannot be read, and those for which the test set holds too little evidence."""
    try:
        criteria, waivers = gate.check(test.classes, _slices(test))
    except InvalidInput as problem:
        return from_error(problem, why="the gate would stop after the training, without a verdict")
    checks = [ok(f"{len(criteria.entries)} criteria and {len(waivers)} waivers can be read")]
    checks += _evidence(criteria.entries, instances(test), gate.on_insufficient)
    if criteria.ungated:
        checks.append(
            warning(
                f"{len(criteria.ungated)} of {len(test.classes)} classes have no criterion of their own: "
                f"{_listed(criteria.ungated)}",
                why="the average over classes hides a class that fails",
                cure='name them in class_thresholds, or use "*" for each class',
            )
        )
    if criteria.compares and not gate.champion:
        checks.append(
            warning(
                "max_drop is asked for, and no champion is named",
                why="there is nothing to compare with, so that these criteria decide nothing",
                cure="set champion, for instance models:/NAME@champion",
            )
        )
    return checks


def check_monitors(monitors: Sequence[str], validation: Manifest) -> list[Check]:
    """Monitors that training would never see a value of, so that nothing is ever best."""
    checks = []
    counts = instances(validation)
    if isinstance(monitors, str) or not monitors:
        return [
            error(
                f"monitors is {monitors!r}", why="training would not know which epoch is the best",
                cure='give a list of at least one metric, for instance ["map50_95"]',
            )
        ]  # fmt: skip
    for name in monitors:
        try:
            parsed = parse(str(name), classes=validation.classes, where="parameter monitors")
        except InvalidInput as problem:
            checks += from_error(problem, why="training would watch a value that never comes")
            continue
        if parsed.class_name is not None and not counts[parsed.class_name]:
            checks.append(
                error(
                    f"monitor {name!r}: no object of {parsed.class_name!r} in the validation split",
                    why="its value is never computed, so that no epoch is ever the best one",
                    cure="watch another metric, or split so that validation gets objects of this class",
                )
            )
    return checks or [ok(f"monitors can be computed: {', '.join(monitors)}")]


def check_names(classes: Sequence[str]) -> list[Check]:
    """Class names under which two metrics could meet in MLflow, or that are cut there."""
    checks: list[Check] = []
    twice = sorted({name for name in classes if classes.count(name) > 1})
    if twice:
        checks.append(
            error(
                f"class names given twice: {_listed(twice)}", why="their metrics cannot be told apart",
                cure="rename one of the two in the data set",
            )
        )  # fmt: skip
    keys: dict[str, str] = {}
    for name in known_names(dict.fromkeys(classes)):
        other = keys.setdefault(to_mlflow(name), name)
        if other != name:
            checks.append(
                error(
                    f"{name!r} and {other!r} have one name in MLflow", why="one would overwrite the other",
                    cure="rename one of the classes",
                )
            )  # fmt: skip
    # MySQL and SQL Server compare keys without regard to case, which is how two classes can meet there.
    folded: dict[str, str] = {}
    for key in keys:
        other = folded.setdefault(key.casefold(), key)
        if other != key:
            checks.append(
                warning(
                    f"{keys[key]!r} and {keys[other]!r} differ only in case",
                    why="an MLflow on MySQL or SQL Server may take them for one metric",
                    cure="rename one of the classes, unless MLflow runs on PostgreSQL or sqlite",
                )
            )
            break
    long = [name for key, name in keys.items() if len(key) >= MLFLOW_NAME_LIMIT]
    if long:
        checks.append(
            warning(
                f"{len(long)} metric names are longer than MLflow's {MLFLOW_NAME_LIMIT} characters and are shortened",
                why="in MLflow they end in a digest; the full names are in the run's metric-names.json",
                cure="nothing, or shorter class names",
            )
        )
    return checks or [ok("every metric has a name of its own in MLflow")]


def _slices(test: Manifest) -> dict[str, Sequence[str]]:
    """Each column that a criterion may slice by, with the values that occur."""
    columns = {
        name: ["" if value is None else str(value) for value in test.table[name].to_pylist()]
        for name in sliceable(test.table)
    }
    return slices_of(columns).values


def _evidence(entries: Sequence[Criterion], counts: Mapping[str, int], on_insufficient: str) -> list[Check]:
    short: dict[str, int] = {}
    for criterion in entries:
        name = parse(criterion.metric).class_name
        # At least one object: without any the metric is not computed at all.
        if name is not None and counts[name] < max(criterion.min_instances, 1):
            short[name] = max(short.get(name, 1), criterion.min_instances)
    total = sum(counts.values())
    needed = max((c.min_instances for c in entries if parse(c.metric).class_name is None), default=0)
    told = [f"{name!r} has {counts[name]} of {wanted}" for name, wanted in short.items()]
    if total < needed:
        told.append(f"the whole set has {total} of {needed}")
    if not told:
        return [ok("the test set holds the instances that the criteria ask for")]
    what = f"too few objects in the test set: {'; '.join(told[:LISTED])}" + f" and {len(told) - LISTED} more" * (
        len(told) > LISTED
    )
    cure = "add test images of these classes, lower min_instances, or set on_insufficient to allow"
    if on_insufficient == "block":
        return [error(what, why="`insufficient` blocks: whatever the model can do, it would be refused", cure=cure)]
    return [
        warning(what, why="these criteria are `insufficient` and decide nothing (on_insufficient=allow)", cure=cure)
    ]


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:LISTED]))
    return f"{shown} and {len(names) - LISTED} more" if len(names) > LISTED else shown
