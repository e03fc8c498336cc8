"""Registration against a real `mlflow server`, while answers get lost, servers restart and disks fill up.

What must hold after each: no version without verified weights, no alias on an unverified version.
"""

import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import S3Server, s3, s3_server  # noqa: F401  # the last two are fixtures

from kfp_gate.errors import InvalidInput, KfpGateError, Unavailable
from kfp_gate.evaluation.model_folder import read_card
from kfp_gate.metric_names import from_mlflow, per_class
from kfp_gate.preflight.request import PreflightRequest
from kfp_gate.preflight.tracking_checks import check_tracking
from kfp_gate.registry import step_tags
from kfp_gate.registry.fetch import fetch_model
from kfp_gate.registry.gate_run import NAME_MAP, log_gate, log_values
from kfp_gate.registry.outcome import record_outcome
from kfp_gate.registry.register import Registration, register_model
from kfp_gate.registry.tracking import connect
from kfp_gate.registry.versions import TOKEN_TAG, aliases, all_versions, verify

from .server import Proxy, Server, free_port

pytestmark = pytest.mark.all_only

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def server(prepared_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # By any name but 127.0.0.1 it refuses to be called, `localhost` included: the flag replaces the defaults.
    arguments = ["--allowed-hosts", "127.0.0.1:*"]
    started = Server(tmp_path_factory.mktemp("server"), prepared_file, arguments).start()
    yield started
    started.stop()


@pytest.fixture
def own_server(prepared_file: Path, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """A server with arguments of its own, or one that the test may kill."""
    made: list[Server] = []

    def start(**values: object) -> Server:
        made.append(Server(tmp_path / f"server{len(made)}", prepared_file, **values))
        return made[-1].start()

    yield start
    for one in made:
        one.stop()


@pytest.fixture
def proxy() -> Iterator[Callable[..., Proxy]]:
    made: list[Proxy] = []

    def start(server: Server, interfere: Callable[[str, str], str]) -> Proxy:
        made.append(Proxy(server, interfere))
        return made[-1]

    yield start
    for one in made:
        one.close()


def assert_consistent(uri: str, name: str) -> list[str]:
    """Every version's files are what its tag says, and no claim is left; returns the digests, lowest version first."""
    tracking = connect(uri)
    versions = all_versions(tracking, name)
    for version in versions:
        assert version.ready
        verify(tracking, version)
        assert not [tag for tag in version.tags if ".claim." in tag]
    standing = aliases(tracking, name) or {}
    assert set(standing.values()) <= {v.number for v in versions}
    # What no version points at is gone, or was never finished.
    used = {v.model_id for v in versions}
    for model in tracking.client.search_logged_models([tracking.experiment_id]):
        if model.name == name and model.model_id not in used:
            raise AssertionError(f"logged model {model.model_id} is left over, {model.tags.get(TOKEN_TAG)}")
    return [v.sha256 for v in versions]


def test_a_retry_and_a_second_pipeline_find_the_first_ones_version(
    server: Server, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    model = make_model(os.urandom(300_000))
    where = {"name": "retry", "tracking_uri": server.uri}
    runs = [register_model(model, make_verdict(model), run_id=r, **where) for r in ("r1", "r1", "r2")]
    assert [(r.version, r.created) for r in runs] == [(1, True), (1, False), (1, False)]
    assert assert_consistent(server.uri, "retry") == [read_card(model).sha256]
    got = fetch_model("models:/retry@champion", tmp_path / "got", tracking_uri=server.uri)
    assert (got / "model.pt").read_bytes() == (model / "model.pt").read_bytes()


def test_twelve_registrations_of_one_model_at_once_make_one_version(
    server: Server, make_model: Make, make_verdict: Make
) -> None:
    model = make_model(os.urandom(50_000))
    verdict = make_verdict(model)

    def one(number: int) -> Registration:
        return register_model(model, verdict, name="same", tracking_uri=server.uri, run_id=f"same-{number}")

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(12)))
    assert len({(r.version, r.sha256) for r in found}) == 1
    assert assert_consistent(server.uri, "same") == [read_card(model).sha256]
    assert aliases(connect(server.uri), "same") == {"champion": found[0].version}
    assert sum(r.created for r in found) == 1


def test_twelve_registrations_of_different_models_at_once_move_the_alias_once(
    server: Server, make_model: Make, make_verdict: Make
) -> None:
    first = make_model(b"first", "first")
    register_model(first, make_verdict(first, name="v-first"), name="many", tracking_uri=server.uri)
    sha = read_card(first).sha256
    models = [make_model(f"weights {i}".encode(), f"m{i}") for i in range(12)]
    verdicts = [make_verdict(m, name=f"v{i}", champion=sha) for i, m in enumerate(models)]

    def one(number: int) -> Registration | KfpGateError:
        try:
            return register_model(models[number], verdicts[number], name="many", tracking_uri=server.uri)
        except KfpGateError as error:
            return error

    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(one, range(12)))
    moved = [f for f in found if isinstance(f, Registration)]
    stopped = [f for f in found if not isinstance(f, Registration)]
    assert Counter(assert_consistent(server.uri, "many")) == Counter([sha, *(read_card(m).sha256 for m in models)])
    # At most one was compared with where the alias stood; that nobody moved it (each saw a rival) would be safe too,
    # but the lowest version waits for the others to withdraw, so somebody does.
    assert len(moved) == 1
    assert aliases(connect(server.uri), "many") == {"champion": moved[0].version}
    assert all(isinstance(s, InvalidInput) and "the alias was not moved" in s.found for s in stopped)


def test_every_answer_to_a_write_is_lost_once(
    server: Server, proxy: Callable[..., Proxy], make_model: Make, make_verdict: Make
) -> None:
    """The server did what it was asked, and the client does not know: each write is repeated."""
    lost: Counter[tuple[str, str]] = Counter()
    guard = threading.Lock()

    def lose_once(method: str, path: str) -> str:
        if method == "GET" or path.endswith("search"):
            return ""
        # Ids in paths are not told apart: the first write of a kind is lost.
        kind = (method, path.split("/artifacts/")[0] if "/mlflow-artifacts/" in path else path)
        with guard:
            lost[kind] += 1
            return "lose" if lost[kind] == 1 else ""

    lossy = proxy(server, lose_once)
    model = make_model(os.urandom(10_000))
    verdict = make_verdict(model)
    step_tags.started("register_model", run_id="lossy", tracking_uri=lossy.uri)
    log_gate(verdict, {"map50": 0.7}, run_id="lossy", tracking_uri=lossy.uri)
    done = register_model(model, verdict, name="lossy", tracking_uri=lossy.uri, run_id="lossy")
    step_tags.done("register_model", run_id="lossy", tracking_uri=lossy.uri)
    outcome = record_outcome(run_id="lossy", tracking_uri=lossy.uri, pipeline_state="SUCCEEDED")

    kinds = {path.rsplit("/mlflow/", 1)[-1] for _, path in lost}
    assert {"model-versions/create", "logged-models", "runs/create", "registered-models/alias"} <= kinds
    assert outcome.model == done.uri
    assert outcome.links is not None
    assert set(outcome.links) == {"MLflow run", "verdict and report", "registered version"}
    tracking = connect(server.uri)
    runs = tracking.client.search_runs([tracking.experiment_id], "tags.`kfp_gate.pipeline_run` = 'lossy'")
    assert Counter(run.data.tags["kfp_gate.role"] for run in runs) == {"pipeline": 1, "gate": 1, "registration": 1}
    assert assert_consistent(server.uri, "lossy") == [done.sha256]
    assert aliases(connect(server.uri), "lossy") == {"champion": done.version}


def test_a_server_killed_and_restarted_in_the_middle_costs_time_and_nothing_else(
    own_server: Callable[..., Server], proxy: Callable[..., Proxy], make_model: Make, make_verdict: Make
) -> None:
    """Killed at the upload, and after the restart again at the creation of the version, and again at the alias."""
    server = own_server()
    moments = ["/model.pt", "model-versions/create", "registered-models/alias"]
    restarted: list[threading.Thread] = []

    def restart(method: str, path: str) -> str:
        if method == "GET" or not moments or not path.endswith(moments[0]):
            return ""
        moments.pop(0)
        server.kill()
        restarted.append(threading.Thread(target=server.start))
        restarted[-1].start()
        return "drop"

    model = make_model(os.urandom(100_000))
    broken = proxy(server, restart)
    done = register_model(model, make_verdict(model), name="det", tracking_uri=broken.uri, run_id="r", patience=300)
    assert not moments
    for thread in restarted:
        thread.join()
    assert assert_consistent(server.uri, "det") == [done.sha256]
    assert aliases(connect(server.uri), "det") == {"champion": done.version}


@pytest.mark.parametrize("moment", ["upload", "model-versions/create", "registered-models/alias", "done"])
def test_a_server_that_stays_away_ends_in_unavailable_and_a_later_run_completes(
    moment: str, server: Server, proxy: Callable[..., Proxy], make_model: Make, make_verdict: Make
) -> None:
    """From one request on nothing arrives any more. Whatever was written until then is consistent."""
    gone = threading.Event()

    def vanish(method: str, path: str) -> str:
        hit = (
            method == "PUT" and "model.pt" in path if moment == "upload" else path.endswith(moment) and method != "GET"
        )
        if hit:
            gone.set()
            return "lose"
        return "drop" if gone.is_set() else ""

    name = f"away {moment.replace('/', ' ')}"
    model = make_model(os.urandom(1000))
    verdict = make_verdict(model)
    away = proxy(server, vanish)
    try:
        register_model(model, verdict, name=name, tracking_uri=away.uri, patience=1.0)
        assert moment == "done"
    except Unavailable as error:
        assert "the connection was cut" in error.found
    tracking = connect(server.uri)
    for version in all_versions(tracking, name):
        verify(tracking, version)
    # As the pipeline's next run, once a claim that was left behind has expired.
    for version in all_versions(tracking, name):
        for tag in version.tags:
            if ".claim." in tag:
                value = {**json.loads(version.tags[tag]), "time": 0}
                tracking.client.set_model_version_tag(name, str(version.number), tag, json.dumps(value))
    done = register_model(model, verdict, name=name, tracking_uri=server.uri)
    assert [v.sha256 for v in all_versions(tracking, name)] == [done.sha256]
    verify(tracking, all_versions(tracking, name)[0])
    assert aliases(tracking, name) == {"champion": done.version}


def test_a_slow_server_is_waited_for_and_a_too_slow_one_makes_nothing_twice(
    server: Server, proxy: Callable[..., Proxy], make_model: Make, make_verdict: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    late: list[str] = []

    def slow(method: str, path: str) -> str:
        # The first version is made, and its answer comes after the client gave up: it asks again.
        if path.endswith("model-versions/create") and not late:
            late.append(path)
            return "2.5"
        return "0.1"

    model = make_model(os.urandom(1000))
    done = register_model(
        model, make_verdict(model), name="slow", tracking_uri=proxy(server, slow).uri, patience=60.0
    )  # fmt: skip
    assert late
    assert assert_consistent(server.uri, "slow") == [done.sha256]


def test_a_server_that_is_down_is_told_in_bounded_time(make_model: Make, make_verdict: Make) -> None:
    model = make_model()
    with pytest.raises(Unavailable, match="connection refused") as caught:
        register_model(
            model, make_verdict(model), name="det", tracking_uri=f"http://127.0.0.1:{free_port()}", patience=1.0
        )
    assert "nothing is registered twice" in caught.value.next_step


def test_a_full_artifact_store_registers_nothing_and_frees_what_it_took(
    own_server: Callable[..., Server], make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    """The server's artifact folder is a file system of 300 kB, in a mount namespace of its own.

    Where no such namespace can be made (a container without the right), no file of the server's may exceed 4 MB.
    """
    artifacts = tmp_path / "server0" / "artifacts"
    artifacts.mkdir(parents=True)
    namespace = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--user", "--map-root-user", "--mount"]
    mount = f'mount -t tmpfs -o size=300k tmpfs "{artifacts}"'
    if subprocess.run([*namespace, "sh", "-c", mount], capture_output=True, check=False).returncode == 0:
        before = [*namespace, "sh", "-c", f'{mount} && exec "$@"', "sh"]
    else:
        before = ["bash", "-c", 'ulimit -f 4096 && exec "$@"', "bash"]
    server = own_server(before=before)
    model = make_model(os.urandom(5_000_000))
    with pytest.raises(Unavailable) as caught:
        register_model(model, make_verdict(model), name="det", tracking_uri=server.uri, patience=1.0)
    assert "while uploading model.pt" in caught.value.found
    assert assert_consistent(server.uri, "det") == []
    small = make_model(os.urandom(1000), "small")
    assert register_model(small, make_verdict(small), name="det", tracking_uri=server.uri).version == 1


def test_basic_auth_with_a_good_a_bad_and_a_reading_user(
    own_server: Callable[..., Server], make_model: Make, make_verdict: Make, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    config = tmp_path / "auth.ini"
    config.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path}/auth.db\n"
        "admin_username = admin\nadmin_password = admin-secret-0\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    server = own_server(
        arguments=["--app-name", "basic-auth"],
        environment={
            "MLFLOW_AUTH_CONFIG_PATH": str(config), "MLFLOW_FLASK_SERVER_SECRET_KEY": "k" * 32,
            "MLFLOW_AUTH_ADMIN_PASSWORD": "admin-secret-0",
        },
    )  # fmt: skip
    model = make_model()
    verdict = make_verdict(model)

    def as_user(user: str, password: str) -> None:
        monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", user)
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", password)

    as_user("admin", "wrong-secret-1")
    with pytest.raises(InvalidInput, match="does not accept the credentials") as caught:
        register_model(model, verdict, name="det", tracking_uri=server.uri)
    assert "wrong-secret-1" not in str(caught.value) + repr(caught.value.__cause__)

    as_user("admin", "admin-secret-0")
    done = register_model(model, verdict, name="det", tracking_uri=server.uri, run_id="r")
    assert assert_consistent(server.uri, "det") == [done.sha256]

    from mlflow.server import get_app_client

    get_app_client("basic-auth", server.uri).create_user("reader", "reader-secret-2")
    as_user("reader", "reader-secret-2")
    other = make_model(b"other", "other")
    with pytest.raises(InvalidInput, match=r"forbids it \(403\)"):
        register_model(other, make_verdict(other, name="o", champion=done.sha256), name="det", tracking_uri=server.uri)
    request = PreflightRequest(
        train=tmp_path, val=tmp_path, test=tmp_path, tracking_uri=server.uri, registered_model="det", alias=""
    )
    assert "forbids it (403)" in "\n".join(c.what for c in check_tracking(request) if c.level == "error")
    as_user("admin", "admin-secret-0")
    assert [v.sha256 for v in all_versions(connect(server.uri), "det")] == [done.sha256]
    assert not {"admin-secret-0", "wrong-secret-1", "reader-secret-2"} & set(caplog.text.split())


def test_a_host_check_that_refuses_pods_is_recognised_although_health_is_green(server: Server, tmp_path: Path) -> None:
    uri = f"http://localhost:{server.port}"
    with pytest.raises(InvalidInput, match="refuses to be called by this host name") as caught:
        connect(uri)
    assert "--allowed-hosts" in caught.value.next_step
    request = PreflightRequest(train=tmp_path, val=tmp_path, test=tmp_path, tracking_uri=uri, registered_model="det")
    (found,) = [c for c in check_tracking(request) if c.level == "error"]
    assert "--allowed-hosts" in found.cure


def test_registration_needs_nothing_that_mlflow_skinny_does_not_bring(
    server: Server, make_model: Make, make_verdict: Make, tmp_path: Path
) -> None:
    """The image holds mlflow-skinny: what only the full package brings is hidden here."""
    model = make_model(os.urandom(1000))
    verdict = make_verdict(model)
    program = f"""
import sys
HIDDEN = {{"sqlalchemy", "alembic", "flask", "pandas", "sklearn", "scipy", "matplotlib", "torch", "ultralytics",
           "boto3", "botocore", "gunicorn", "docker", "kfp", "kubernetes"}}
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = lambda name, *more: None if name.split(".")[0] in HIDDEN else find(name, *more)
try:
    import sqlalchemy
    raise SystemExit("the hiding does not hide")
except ImportError:
    pass
from pathlib import Path
from kfp_gate.registry.register import register_model
from kfp_gate.registry.fetch import fetch_model
from kfp_gate.registry.outcome import record_outcome
model, verdict, uri = Path({str(model)!r}), Path({str(verdict)!r}), {server.uri!r}
register_model(model, verdict, name="skinny", tracking_uri=uri, run_id="s")
fetch_model("models:/skinny@champion", Path({str(tmp_path / "got")!r}), tracking_uri=uri)
print(record_outcome(run_id="s", tracking_uri=uri, pipeline_state="SUCCEEDED").headline)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip().endswith("registered: models:/skinny/1")


def test_no_secret_reaches_logs_artifacts_tags_or_errors(
    server: Server,
    make_model: Make,
    make_verdict: Make,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    secrets = {
        "MLFLOW_TRACKING_TOKEN": "token-4f1c", "AWS_SECRET_ACCESS_KEY": "aws-9d2e",
        "KFP_GATE_WEBHOOK": "http://127.0.0.1:9/hook-77aa",
    }  # fmt: skip
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level("DEBUG", logger="kfp_gate"):
        model = make_model(os.urandom(1000))
        verdict = make_verdict(model)
        step_tags.failed("preflight", f"said {' '.join(secrets.values())}", run_id="s", tracking_uri=server.uri)
        register_model(model, verdict, name="secret", tracking_uri=server.uri, run_id="s")
        record_outcome(
            run_id="s", tracking_uri=server.uri, pipeline_error=f"error {' '.join(secrets.values())}",
            links={"run": "https://user:pass-55cc@host/run"},
        )  # fmt: skip
        said = str(
            Unavailable(f"x {' '.join(secrets.values())}", expected="", where="https://u:pass-55cc@h", next_step="")
        )
    stored = [p.read_bytes() for p in server.folder.rglob("*") if p.is_file()]
    found = [caplog.text.encode(), said.encode(), *stored]
    marks = ["4f1c", "9d2e", "77aa", "55cc"]
    assert any(b"kfp_gate.outcome" in data for data in stored)  # the scan reaches the database
    assert not [mark for mark in marks for data in found if f"-{mark}".encode() in data]


def test_artifacts_go_to_s3_directly_where_the_server_does_not_proxy_them(
    own_server: Callable[..., Server],
    s3: S3Server,  # noqa: F811  # the fixture
    make_model: Make,
    make_verdict: Make,
    tmp_path: Path,
) -> None:
    """Without boto3, which neither our images nor mlflow-skinny hold."""
    s3.bucket("mlflow")
    server = own_server(arguments=["--no-serve-artifacts", "--default-artifact-root", "s3://mlflow/원뿔 x"])
    tracking = connect(server.uri, experiment="on S3")  # the prepared file's own experiment lies elsewhere
    where = {"tracking_uri": server.uri, "experiment": "on S3"}
    model = make_model(os.urandom(200_000))
    verdict = make_verdict(model)
    log_gate(verdict, {"map50": 0.7, "class/a(b)/map50": 0.5}, run_id="r", report=None, **where)
    done = register_model(model, verdict, name="det", run_id="r", **where)
    got = fetch_model("models:/det@champion", tmp_path / "got", tracking_uri=server.uri)
    assert (got / "model.pt").read_bytes() == (model / "model.pt").read_bytes()
    keys = [o.object_name for o in s3.client().list_objects("mlflow", recursive=True)]
    assert any(k.endswith("artifacts/model.pt") and done.model_id in k for k in keys)
    assert any(k.endswith(NAME_MAP) for k in keys)
    request = PreflightRequest(
        train=tmp_path, val=tmp_path, test=tmp_path, registered_model="det", alias="", run_id="r", **where
    )
    assert not [c for c in check_tracking(request) if c.level == "error"]

    s3.client().remove_object("mlflow", next(k for k in keys if k.endswith("artifacts/model.pt")))
    with pytest.raises(KfpGateError):
        verify(tracking, all_versions(tracking, "det")[0])
    again = register_model(model, make_verdict(model, champion=done.sha256), name="det", **where)
    assert (again.version, again.created) == (2, True)


class_names = st.text(max_size=12) | st.text(alphabet=":/.(원a", min_size=1, max_size=6).map(lambda text: text * 60)


@settings(max_examples=10, deadline=None)
@given(st.lists(class_names, min_size=30, max_size=30, unique=True))
def test_every_value_is_kept_under_its_name(server: Server, names: list[str]) -> None:
    tracking = connect(server.uri)
    run = tracking.client.create_run(tracking.experiment_id).info.run_id
    values = {per_class(name, "map50"): i / 7 for i, name in enumerate(names)}
    log_values(tracking, run, {**values, "map75": float("nan"), "f1": float("inf")})
    back = tracking.client.get_run(run).data
    path = Path(tracking.client.download_artifacts(run, NAME_MAP))
    shortened = json.loads(path.read_text(encoding="utf-8"))
    assert {from_mlflow(key, shortened): value for key, value in back.metrics.items()} == values
    assert json.loads(back.tags["kfp_gate.not_computed"]) == {"map75": "not finite (nan)", "f1": "not finite (inf)"}
