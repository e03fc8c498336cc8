"""A run on a cluster, followed to its end and told apart: registered, refused, broken.

A gate that refuses is a *successful* run, so the run's state alone says nothing. What tells is the task of the
`dsl.If` that reads the gate's output: the backend marks it SKIPPED when the condition was false (Argo's state of the
node; `run_details.task_details` of the run lists every node under the key that the task has in the YAML).
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from kfp_gate.errors import InvalidInput, Unavailable
from kfp_gate.running.local import BROKEN, PASSED, REFUSED
from kfp_gate.submitting.submit import ANSWER_SECONDS, Client, server_message, within

ENDED = ("SUCCEEDED", "FAILED", "SKIPPED", "CANCELED", "CANCELLED", "ERROR")
"""States that a run does not leave. kfp's own waiting knows no CANCELED and goes on for ever."""

LATE_READS = 3
"""How often a run that succeeded is read again when its tasks are not listed yet."""

_NAME = "registered_model"
_GATE_CONDITION = re.compile(r"\['pipelinechannel--.+-Output'\]\s*==\s*true$")


@dataclass(frozen=True)
class Tasks:
    """The tasks of a pipeline, by the keys under which the backend lists them.

    Attributes:
        steps: tasks that run a container.
        conditions: groups that run only if a gate said True.
        registering: steps inside these groups.
        optional_name: whether the model's name is a parameter, which may be empty: then nothing is registered.
    """

    steps: tuple[str, ...]
    conditions: tuple[str, ...]
    registering: tuple[str, ...]
    optional_name: bool = False


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        kind: registered, passed, refused, failed, canceled, done (nothing hangs on a gate: what was found is in the
            outputs), or unknown: succeeded, and the server does not say what became of the gate.
        failed: steps that failed, the first one first.
        said: the server's message about the failure.
    """

    kind: str
    failed: tuple[str, ...] = ()
    said: str = ""

    @property
    def exit_code(self) -> int:
        """0 registered or passed, 3 refused, 1 everything else."""
        return {"registered": PASSED, "passed": PASSED, "done": PASSED, "refused": REFUSED}.get(self.kind, BROKEN)

    def __str__(self) -> str:
        if self.kind == "failed":
            steps = f" at {', '.join(self.failed)}" if self.failed else ""
            return f"broken{steps}{': ' + self.said if self.said else ''}"
        return {
            "registered": "passed, and its model is registered",
            "passed": "passed",
            "done": "done: what it found is in the outputs of its steps",
            "refused": "refused by the gate: nothing is registered, and the gate's report says which class missed what",
            "canceled": "canceled",
        }.get(self.kind, "succeeded, but the server does not tell what the gate decided: look at the run's page")


@dataclass
class Watch:
    """How patiently a run is followed, and who hears of it.

    Attributes:
        seconds: between two looks at the run.
        patience: seconds without any answer after which following ends; the run itself goes on.
        say: receives one line for each change.
        connect: makes a new client when the login has expired; None: there is no other.
    """

    seconds: float = 10.0
    patience: float = 3600.0
    say: Callable[[str], None] = field(default=lambda line: None)
    connect: Callable[[], Client] | None = None
    answer_seconds: float = ANSWER_SECONDS


def tasks_of(spec: Mapping[str, Any]) -> Tasks:
    """The tasks of a compiled pipeline, nested groups included."""
    components = spec.get("components", {})
    conditions: list[str] = []
    steps: list[str] = []
    inside: list[str] = []
    for key, task, guarded in _walk(spec["root"].get("dag", {}), components, False):
        if "dag" not in components.get(task["componentRef"]["name"], {}):
            (inside if guarded else steps).append(key)
        if _is_gate(task):
            conditions.append(key)
    named = _NAME in spec["root"].get("inputDefinitions", {}).get("parameters", {})
    return Tasks((*steps, *inside), tuple(conditions), tuple(inside), named)


def follow(client: Client, run_id: str, tasks: Tasks | None, watch: Watch) -> Ending:
    """Look at a run until it has ended, for hours or days.

    Args:
        client: as for `submit.create`.
        run_id: the run.
        tasks: of its pipeline; None: as the server has it.
        watch: see there.

    Raises:
        Unavailable: no answer for as long as `watch.patience`.
        InvalidInput: the server knows no such run, or the login is not valid any more.
    """
    seen: dict[str, str] = {}
    late = 0
    while True:
        client, run = _read(client, run_id, watch)
        if tasks is None:
            tasks = tasks_of(_spec_of(run))
        _tell(run, tasks, seen, watch.say)
        if seen[""] in ENDED:
            ending = ended(run, tasks)
            late += 1
            if ending.kind != "unknown" or late > LATE_READS:
                return ending
        time.sleep(watch.seconds)


def ended(run: Any, tasks: Tasks) -> Ending:
    """How `run`, whose state is final, ended."""
    state, found = _state(run), _states(run)
    if state in ("CANCELED", "CANCELLED"):
        return Ending("canceled")
    if state != "SUCCEEDED":
        failed = sorted(
            (str(d.end_time or "~"), d.display_name)
            for d in _details(run)
            if _word(d.state) == "FAILED" and _step(d.display_name, tasks)
        )
        names = tuple(dict.fromkeys(_step(name, tasks) for _, name in failed))
        return Ending("failed", names, _error(run))
    if not tasks.conditions:
        return Ending("done")
    gates = [found.get(name) for name in tasks.conditions]
    if "SKIPPED" in gates:
        return Ending("refused")
    if all(gate == "SUCCEEDED" for gate in gates):
        given = getattr(getattr(run, "runtime_config", None), "parameters", None) or {}
        named = bool(given.get(_NAME)) or not tasks.optional_name
        return Ending("registered" if named and tasks.registering else "passed")
    return Ending("unknown")


def _read(client: Client, run_id: str, watch: Watch) -> tuple[Client, Any]:
    """The run, whatever it takes: outages and expired logins are waited out."""
    since, told, renewed = time.monotonic(), False, False
    while True:
        try:
            run = within(watch.answer_seconds, client.get_run, run_id)
        except Exception as error:
            status, said = getattr(error, "status", None), server_message(error)
            if status == 401 and watch.connect is not None and not renewed:
                renewed = True
                try:
                    client = watch.connect()
                except Exception as second:  # the server may be away at this very moment
                    said = server_message(second)
                else:
                    continue
            # A proxy in front of a restarting server answers 404 and 401, too: only what stays is believed.
            lasting = status in (400, 401, 403, 404)
            if time.monotonic() - since > (min(watch.patience, 60.0) if lasting else watch.patience):
                raise _lost(run_id, status, said, lasting) from error
            if not told:
                watch.say(f"no answer about the run ({said}); it goes on, and so does the watch")
                told = True
            time.sleep(watch.seconds)
        else:
            if told:
                watch.say("the server answers again")
            return client, run


def _lost(run_id: str, status: int | None, said: str, lasting: bool) -> Exception:
    again = f"the run goes on; follow it again with `kfp-gate submit --follow {run_id}`"
    if lasting:
        return InvalidInput(
            f"the server answered {status}: {said}", expected="a run that this login may read", where=f"run {run_id}",
            next_step="check the id, --namespace and the login; " + again,
        )  # fmt: skip
    return Unavailable(
        f"no answer from Kubeflow Pipelines: {said}", expected="the state of the run", where=f"run {run_id}",
        next_step=again,
    )  # fmt: skip


def _tell(run: Any, tasks: Tasks, seen: dict[str, str], say: Callable[[str], None]) -> None:
    found = _states(run)
    for name in (*tasks.steps, *tasks.conditions):
        state = found.get(name, "")
        if state not in ("", "RUNTIME_STATE_UNSPECIFIED") and seen.get(name) != state:
            seen[name] = state
            say(f"{name} {state.lower()}{_took(run, name) if state in ENDED else ''}")
    state = _state(run)
    if seen.get("") != state:
        say(f"run {state.lower() or 'not started yet'}")
    seen[""] = state


def _took(run: Any, name: str) -> str:
    for detail in _details(run):
        if detail.display_name == name and detail.start_time and detail.end_time:
            return f" ({timedelta(seconds=round((detail.end_time - detail.start_time).total_seconds()))})"
    return ""


def _states(run: Any) -> dict[str, str]:
    """State by the task's key; of tasks with one key (a loop, a pipeline used twice) the one that decides.

    A retried task is listed once more as `KEY(0)`, which no task is called.
    """
    found: dict[str, str] = {}
    for detail in _details(run):
        name, state = detail.display_name, _word(detail.state)
        if name and _weight(state) >= _weight(found.get(name, "")):
            found[name] = state
    return found


def _weight(state: str) -> int:
    """What is not over hides what is; one refusal among several gates is a refusal."""
    order = ("", "RUNTIME_STATE_UNSPECIFIED", "SUCCEEDED", "SKIPPED", "CANCELED", "FAILED")
    return order.index(state) if state in order else len(order)


def _details(run: Any) -> Sequence[Any]:
    return getattr(getattr(run, "run_details", None), "task_details", None) or ()


def _state(run: Any) -> str:
    return _word(run.state)


def _word(state: Any) -> str:
    return str(state or "").upper()


def _step(name: str | None, tasks: Tasks) -> str:
    """The step that a node belongs to; a step's driver, which resolves its inputs, counts as the step."""
    plain = re.sub(r"(-driver)?(\(\d+\))?$", "", name or "")
    return plain if plain in tasks.steps or plain in tasks.conditions else ""


def _error(run: Any) -> str:
    return " ".join(str(getattr(getattr(run, "error", None), "message", None) or "").split())[:500]


def _spec_of(run: Any) -> Mapping[str, Any]:
    """The pipeline as the server keeps it: alone, or beside what the platform needs."""
    spec = getattr(run, "pipeline_spec", None) or {}
    spec = spec.get("pipeline_spec", spec)
    if "root" not in spec:
        raise InvalidInput(
            "the server does not tell the pipeline of this run", expected="its specification, to know its gate by",
            where=f"run {getattr(run, 'run_id', '')}", next_step="give the compiled YAML before --follow",
        )  # fmt: skip
    found: Mapping[str, Any] = spec
    return found


def _is_gate(task: Mapping[str, Any]) -> bool:
    condition = " ".join(task.get("triggerPolicy", {}).get("condition", "").split())
    return bool(_GATE_CONDITION.search(condition))


def _walk(
    dag: Mapping[str, Any], components: Mapping[str, Any], guarded: bool
) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    for key, task in dag.get("tasks", {}).items():
        yield key, task, guarded
        inner = components.get(task["componentRef"]["name"], {}).get("dag", {})
        yield from _walk(inner, components, guarded or _is_gate(task))
