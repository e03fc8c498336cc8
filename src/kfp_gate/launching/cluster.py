"""The launcher on a cluster: one training, as few attempts as it takes, however often the launcher itself dies."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.launching import attempts, pytorchjob, trainjob
from kfp_gate.launching.api import Api, Away, Refused, connect, denied
from kfp_gate.launching.attempts import Attempt
from kfp_gate.launching.beating import Beats
from kfp_gate.launching.delivery import download_folder
from kfp_gate.launching.doctor import check_runtime, refuse_errors
from kfp_gate.launching.following import Following
from kfp_gate.launching.inputs import prepare
from kfp_gate.launching.kinds import KINDS, Kind
from kfp_gate.launching.options import LaunchOptions
from kfp_gate.launching.outcome import RESTARTABLE, Outcome
from kfp_gate.launching.output import write_lines
from kfp_gate.launching.owner import find_owner, find_run_id, terminated_by_user
from kfp_gate.launching.waits import Patience
from kfp_gate.launching.worker_pod import JobRequest, attempt_name, base_name


@dataclass(frozen=True)
class Launch:
    """Everything that stays the same over the attempts of one training."""

    api: Api
    kind: Kind
    namespace: str
    base: str
    spec: str
    options: LaunchOptions
    owner: dict[str, Any] | None
    fields: frozenset[str]
    patience: Patience

    def request(self, number: int) -> JobRequest:
        name = attempt_name(self.base, number)
        return JobRequest(name, self.base, number, self.namespace, self.spec, self.options, self.owner)

    def manifest(self, request: JobRequest) -> dict[str, Any]:
        if self.kind is KINDS["trainjob"]:
            return trainjob.manifest(request, set(self.fields))
        return pytorchjob.manifest(request)


def run_on_cluster(
    spec: str, options: LaunchOptions, out: Path, *, api: Api | None = None, patience: Patience | None = None
) -> Outcome:
    """Create or find the job, follow it, and bring the model to `out`.

    Raises:
        InvalidInput: the cluster refuses what was asked for, or lacks what it needs.
        Unavailable: cluster or storage stay away.
    """
    api, own_namespace = (api, "default") if api is not None else connect()
    namespace = options.namespace or own_namespace
    kind = KINDS[options.backend]
    run_id = options.run_id or find_run_id(api, own_namespace)
    options = replace(options, run_id=run_id)
    base = base_name(run_id, options.task)
    fields = frozenset(trainjob.spec_fields(api)) if kind is KINDS["trainjob"] else frozenset()
    storage = JobRequest(base, base, 1, namespace, spec, options).storage
    spec = prepare(spec, storage, options)
    owner = find_owner(api, own_namespace) if namespace == own_namespace else None
    launch = Launch(api, kind, namespace, base, spec, options, owner, fields, patience or Patience())
    beats = Beats(options.checkpoint_uri)
    beats.beat()
    current = [attempt_name(base, 1)]
    with _delete_on_terminate(launch, own_namespace, current):
        return _run(launch, out, beats.beat, current)


def _run(launch: Launch, out: Path, beat: Callable[[], None], current: list[str]) -> Outcome:
    say = _say(launch.options)
    while True:
        attempt = _latest(launch, beat)
        if attempt is None:
            _check_runtime(launch, say)
            request = launch.request(1)
            body, made = attempts.create(launch.api, launch.kind, request, launch.manifest(request))
            attempt = Attempt(1, request.name, body)
            say(f"{'created' if made else 'found'} {launch.kind.name} {launch.namespace}/{request.name}")
        else:
            say(f"found {launch.kind.name} {launch.namespace}/{attempt.name}")
        current[0] = attempt.name
        request = launch.request(attempt.number)
        attempts.check_same(attempt, request, launch.kind)
        outcome = attempt.remembered
        if outcome is None:
            follow = Following(
                launch.api, launch.kind, request, say=launch.options.say, beat=beat, patience=launch.patience
            )
            outcome = follow.run()
            if outcome.state == "succeeded":
                # Before it is written on the job that it succeeded: a success without its model is none.
                outcome = _fetch(outcome, request, out)
            attempts.remember(launch.api, launch.kind, launch.namespace, attempt.name, replace(outcome, model=None))
        elif outcome.state == "succeeded":
            outcome = _fetch(outcome, request, out)
        if outcome.state == "succeeded":
            return outcome
        if outcome.cause not in RESTARTABLE or attempt.number > launch.options.max_restarts:
            if not launch.options.keep_failed:
                _delete(launch.api, launch.kind.path(launch.namespace, attempt.name))
            return outcome
        say(f"{outcome.summary}; starting again from the last complete checkpoint (attempt {attempt.number + 1})")
        _await_quiet(launch, attempt.name, beat)
        successor = launch.request(attempt.number + 1)
        attempts.create(launch.api, launch.kind, successor, launch.manifest(successor))


def _check_runtime(launch: Launch, say: Callable[[str], None]) -> None:
    """Refuse a runtime under which the ranks cannot work; say what one does to the evidence."""
    if launch.kind is not KINDS["trainjob"]:
        return
    findings = list(check_runtime(launch.api, launch.options.runtime, launch.namespace))
    refuse_errors(findings, f"namespace {launch.namespace}")
    for finding in findings:
        if finding.level == "warning":
            say(f"warning: {finding.what}: {finding.why}; {finding.cure}")


def _latest(launch: Launch, beat: Callable[[], None]) -> Attempt | None:
    """The newest attempt. One that is being deleted is waited for: its name is not free yet."""
    while True:
        found = attempts.find(launch.api, launch.kind, launch.namespace, launch.base)
        if not found:
            return None
        if not found[-1].deleting:
            return found[-1]
        beat()
        time.sleep(min(launch.patience.poll, 2.0))


def _fetch(outcome: Outcome, request: JobRequest, out: Path) -> Outcome:
    from kfp_gate.errors import Broken
    from kfp_gate.launching.causes import NEXT_CHECK

    try:
        download_folder(f"{request.delivery}/model", out)
    except Broken as error:
        return Outcome(
            "failed", "no-model", 0, error.found, (f"looked for {request.delivery}",), NEXT_CHECK["no-model"],
            outcome.ranks, None, outcome.job, error,
        )  # fmt: skip
    _fetch_record(request)
    return replace(outcome, model=out)


def _fetch_record(request: JobRequest) -> None:
    """The worker's record of the training, if records are wanted and the command left one."""
    if request.options.records is None:
        return
    try:
        download_folder(f"{request.delivery}/training", request.options.records / "rank-0" / "training")
    except KfpGateError as error:
        _say(request.options)(f"no record of the training was delivered: {error.found}")


def _await_quiet(launch: Launch, name: str, beat: Callable[[], None]) -> None:
    """Until no pod of the attempt runs, or for a bounded time: pods of a lost node never say that they ended."""
    path = f"/api/v1/namespaces/{launch.namespace}/pods"
    until = time.monotonic() + launch.patience.settle
    while time.monotonic() < until:
        beat()
        try:
            pods = launch.api.call("GET", path, query={"labelSelector": launch.kind.selector(name)}).get("items", ())
        except Refused as refused:
            raise denied(refused, "listing the job's pods", path) from None
        running = [pod for pod in pods if (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")]
        if not running:
            return
        for pod in running:
            if "deletionTimestamp" not in pod["metadata"]:
                _delete(launch.api, f"{path}/{pod['metadata']['name']}")
        time.sleep(min(launch.patience.poll, 2.0))


def _delete(api: Api, path: str) -> None:
    try:
        api.call("DELETE", path, query={"propagationPolicy": "Background"})
    except Refused as refused:
        if refused.status not in (403, 404):
            raise denied(refused, "deleting", path) from None


class _Terminated(BaseException):
    """SIGTERM reached the launcher."""


@contextmanager
def _delete_on_terminate(launch: Launch, own_namespace: str, current: list[str]) -> Iterator[None]:
    """On SIGTERM, delete the job if the pipeline was terminated. There is less than a second: best effort.

    A launcher whose pod is evicted gets the same signal; its job must go on, for the next launcher to find.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_signal(_number: int, _frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    except _Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        quick = Api(launch.api.client, outage_seconds=0)
        if terminated_by_user(quick, own_namespace):
            try:
                path = launch.kind.path(launch.namespace, current[0])
                quick.once("DELETE", path, query={"propagationPolicy": "Background"}, read_seconds=1.0)
            except (Refused, Away):
                pass  # the ranks end themselves when the heartbeat stops
        raise SystemExit(128 + signal.SIGTERM) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(options: LaunchOptions) -> Callable[[str], None]:
    return options.say or (lambda line: write_lines([line]))


def render(spec: str, options: LaunchOptions, *, release: str = "2.2") -> list[dict[str, Any]]:
    """The manifests that a launch would create, without a cluster: for TrainJobs also the runtime they need.

    Args:
        spec: the training specification as JSON text.
        options: as for a launch; without `run_id` the name of an example run is used.
        release: of Kubeflow Trainer: "2.0", "2.1" or "2.2" and later.

    Raises:
        InvalidInput: an unknown release, a backend without manifests, or a setting that the job cannot carry.
    """
    if options.backend not in KINDS:
        raise InvalidInput(
            f"backend={options.backend!r}", expected="trainjob or pytorchjob", where="render",
            next_step="the processes backend creates nothing on a cluster",
        )  # fmt: skip
    base = base_name(options.run_id or "example-run", options.task)
    request = JobRequest(base, base, 1, options.namespace or "default", spec, options)
    if options.backend == "pytorchjob":
        return [pytorchjob.manifest(request)]
    known = {"2.0": {"podSpecOverrides"}, "2.1": {"podTemplateOverrides"}}
    number = ".".join(release.lstrip("v").split(".")[:2])
    try:
        newer = tuple(int(part) for part in number.split(".")) >= (2, 2)
    except ValueError:
        newer = False
    if number not in known and not newer:
        raise InvalidInput(
            f"release {release!r}", expected="2.0, 2.1, or 2.2 and later", where="render",
            next_step="read the installed release: kubectl -n kubeflow-system get deployment -o wide",
        )  # fmt: skip
    fields = known.get(number, {"runtimePatches", "activeDeadlineSeconds"})
    runtime = trainjob.runtime_manifest(
        options.runtime, request.namespace, ttl_seconds=options.ttl_seconds, image=options.worker_image
    )
    return [runtime, trainjob.manifest(request, fields)]
