"""The command line. The only module here that may import kfp, and only inside its commands."""

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kfp_gate import __version__
from kfp_gate.commands import cluster, data, diagnosis, gate, images, registry
from kfp_gate.errors import InvalidInput, KfpGateError
from kfp_gate.running import local as local_run

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
    help="Split detection data without leaks, train on many ranks, judge per class, register only what passed.",
)  # fmt: skip

for commands in (data, gate, registry, cluster, diagnosis):
    app.add_typer(commands.app)
app.add_typer(images.app, name="images")

PIPELINES = "gate, gate_existing_model, rejudge or diagnose"
DEFAULT_REGISTRY_HELP = "Registry of the component images, for instance registry.example.com/team."


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the data, the run and the reports.")] = Path("kfp-gate-demo"),
    strict: Annotated[bool, typer.Option(help="Thresholds that the model cannot meet: see a refusal.")] = False,
) -> None:
    """Make a small labelled set and run the whole pipeline on it: split, train on two ranks, judge, register."""
    from kfp_gate.demo import CLASSES, make_dataset

    out = out.resolve()
    dataset = make_dataset(out / "dataset")
    bars = {"map50": 0.98, "map50_95": 0.9} if strict else {"map50": 0.5}
    small = bars if strict else {"map50": 0.3}  # a bolt is ten pixels wide
    arguments = {
        "dataset": str(dataset),
        "base_model": "yolo11n.yaml:depth=0.33,width=0.125",
        "epochs": 12,
        "image_size": 160,
        "batch": 16,
        "processes_per_node": 2,
        "patience": 0,
        "training_options": {
            "optimizer": "AdamW", "lr0": 0.004, "warmup_epochs": 1, "mosaic": 0.3, "close_mosaic": 4,
        },
        "class_thresholds": {name: small if name == "bolt" else bars for name in CLASSES},
        "registered_model": "kfp-gate-demo",
    }  # fmt: skip
    # The second run, for instance with --strict, finds the split and the training of the first one.
    code = _run_and_show("gate", arguments, out, cache=True)
    # A refusal is what --strict is there to show; only a failure of the machinery is an error here.
    raise typer.Exit(0 if code in (local_run.PASSED, local_run.REFUSED) else code)


@app.command()
def run(
    dataset: Annotated[str, typer.Option(help="Path or s3:// prefix of a labelled dataset.")] = "",
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help="Pipeline parameter as name=value; repeat it.")
    ] = None,
    pipeline: Annotated[str, typer.Option(help=f"{PIPELINES}, or a compiled YAML file.")] = "gate",
    out: Annotated[Path, typer.Option(help="Folder for the run and the reports.")] = Path("kfp-gate-runs"),
    cache: Annotated[bool, typer.Option(help="Take split and training from an equal earlier run.")] = True,
) -> None:
    """Run a pipeline on this machine. Exits 0 passed, 3 refused, 1 broken, 2 bad input."""
    arguments = {**({"dataset": dataset} if dataset else {}), **_pairs(parameter or [])}
    raise typer.Exit(_run_and_show(pipeline, arguments, out.resolve(), cache=cache))


@app.command(name="compile")
def compile_(
    registry: Annotated[str, typer.Option(help=DEFAULT_REGISTRY_HELP)] = "",
    out: Annotated[Path, typer.Option(help="Folder for the YAML files.")] = Path("compiled"),
    mount: Annotated[list[str] | None, typer.Option(help="claim:/path, mounted into every step; repeat it.")] = None,
    secret: Annotated[str, typer.Option(help="Secret with credentials; may be missing.")] = "kfp-gate-credentials",  # noqa: S107  # a name
    gate_gpus: Annotated[int, typer.Option(help="GPUs of the gate; 0 judges on the CPU.")] = 1,
) -> None:
    """Compile the pipelines to YAML."""
    from kfp_gate.pipelines import MAKERS, CompileOptions

    try:
        options = CompileOptions(registry=registry, secret=secret, mounts=tuple(mount or ()), gate_gpus=gate_gpus)
        made = {name: make(options) for name, make in MAKERS.items()}
    except ValueError as error:
        raise InvalidInput(
            str(error), expected="claim:/path", where="--mount", next_step="write the mount in this form"
        ) from None
    out.mkdir(parents=True, exist_ok=True)
    for name, pipeline in made.items():
        print(_compile(pipeline, out / f"{name}.yaml"))


@app.command()
def submit(
    pipeline: Annotated[str, typer.Argument(help=f"Compiled YAML file, or {PIPELINES}.")] = "",
    parameter: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", help="name=value; name=@FILE reads the JSON of a list or dict; repeat it."),
    ] = None,
    experiment: Annotated[str, typer.Option("--experiment", "-e", help="Experiment of the run.")] = "kfp-gate",
    name: Annotated[str, typer.Option(help="Name of the run; empty: the pipeline's and the time.")] = "",
    endpoint: Annotated[
        str, typer.Option(envvar=["KF_PIPELINES_ENDPOINT", "KFP_ENDPOINT"], help="Address of Kubeflow Pipelines.")
    ] = "",
    namespace: Annotated[str, typer.Option("--namespace", "-n", envvar="KFP_NAMESPACE", help="Your namespace.")] = "",
    token: Annotated[
        str,
        typer.Option(
            envvar="KFP_EXISTING_TOKEN",
            help="Use the environment: arguments are seen by everybody on this machine.",
            show_default=False,
        ),
    ] = "",
    ca: Annotated[str, typer.Option(help="File with the certificate authority of the server.")] = "",
    service_account: Annotated[str, typer.Option(help="Service account of the steps.")] = "",
    pipeline_root: Annotated[str, typer.Option(help="Where the run keeps its artifacts.")] = "",
    cache: Annotated[bool, typer.Option(help="--no-cache runs split and training again.")] = True,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow: exit 0 registered or passed, 3 refused, 1 broken.")
    ] = False,
    follow: Annotated[str, typer.Option(help="Id of a run to follow; nothing is sent.")] = "",
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 10.0,
    patience: Annotated[float, typer.Option(min=0.0, help="Minutes without any answer before following ends.")] = 60.0,
) -> None:
    """Send a pipeline to a cluster, after checking names, types and values of its parameters."""
    from kfp_gate.submitting import following
    from kfp_gate.submitting import submit as submission

    def connect() -> Any:
        return submission.connected(
            lambda: _kfp_client(endpoint, namespace, token, ca), endpoint or "the cluster that this runs in"
        )

    if not pipeline and not follow:
        raise InvalidInput(
            "no pipeline", expected="a compiled YAML file, or --follow RUN_ID", where="kfp-gate submit",
            next_step="write for instance: kfp-gate submit compiled/gate.yaml -p dataset=s3://bucket/set",
        )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        sent = None
        if pipeline:
            file = _pipeline_file(pipeline, Path(made))
            sent = submission.prepare(file, _pairs(parameter or [] if not follow else []), complete=not follow)
            for note in sent.notes if not follow else ():
                print(f"note: {note}", file=sys.stderr)
        client, run_id = connect(), follow
        if sent and not follow:
            options = submission.RunOptions(
                experiment=experiment, name=name, namespace=namespace, service_account=service_account,
                pipeline_root=pipeline_root, caching=None if cache else False,
            )  # fmt: skip
            run_id = submission.create(client, sent, options)
            print(f"run {run_id}", flush=True)
    if not watch and not follow:
        return
    ways = following.Watch(
        seconds=interval, patience=60 * patience, connect=connect,
        say=lambda line: print(f"{time.strftime('%H:%M:%S')} {line}", flush=True),
    )  # fmt: skip
    try:
        ending = following.follow(client, run_id, following.tasks_of(sent.spec) if sent else None, ways)
    except KeyboardInterrupt:
        print(f"\nthe run goes on; follow it again with `kfp-gate submit --follow {run_id}`", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"{run_id} {ending}")
    raise typer.Exit(ending.exit_code)


@app.command()
def parameters(
    pipeline: Annotated[str, typer.Argument(help=f"{PIPELINES}, or a compiled YAML file.")] = "gate",
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """List the parameters of a pipeline: name, type, default and what it is for."""
    from kfp_gate.submitting.parameters import declared, table

    with tempfile.TemporaryDirectory() as made:
        file = _pipeline_file(pipeline, Path(made))
        found = declared(file.read_text(encoding="utf-8"), str(file))
    if as_json:
        print(json.dumps({name: asdict(p) for name, p in found.items()}, ensure_ascii=False, indent=1))
    else:
        print(table(found.values()))


@app.command(hidden=True)
def run_here(file: Path) -> None:
    """The child of `run`: kfp's local runner on a compiled pipeline, with what `file` (JSON) says."""
    import logging

    from kfp import components, local

    logging.basicConfig(level=logging.INFO)
    job = json.loads(file.read_text(encoding="utf-8"))
    local.init(
        local.SubprocessRunner(use_venv=False), pipeline_root=job["root"], workspace_root=job["workspace"],
        raise_on_error=False, enable_caching=job["cache"], cache_root=job["cache_root"],
    )  # fmt: skip
    components.load_component_from_file(job["pipeline"])(**job["arguments"])


@app.command()
def version() -> None:
    """Print the version."""
    print(__version__)


def main() -> None:
    """Entry point: an error of ours is shown without a traceback and sets the exit code."""
    try:
        app()
    except KfpGateError as error:
        print(error, file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def _run_and_show(pipeline: str, arguments: dict[str, Any], out: Path, *, cache: bool = False) -> int:
    from kfp_gate.running.terminal import Terminal

    run_id = uuid.uuid4().hex
    folder = out / "runs" / run_id[:8]
    folder.mkdir(parents=True, exist_ok=True)
    file = _pipeline_file(pipeline, folder)
    given = {**_local_defaults(file, out), **arguments}
    job = {
        "pipeline": str(file),
        "arguments": _checked(file, given),
        "root": str(folder / "steps"),
        "workspace": str(folder / "workspace"),
        "cache": cache,
        # Here the installed code stands for the image: another version of it must not find this one's results.
        "cache_root": str(out / "cache" / local_run.code_digest()),
    }
    (folder / "job.json").write_text(json.dumps(job, ensure_ascii=False, indent=1), encoding="utf-8")
    command = local_run.python("-m", "kfp_gate.cli", "run-here", str(folder / "job.json"))
    terminal = Terminal(folder)
    with terminal:
        state = local_run.follow(command, folder, {"KFP_GATE_RUN_ID": run_id}, terminal.update)
    terminal.summary(state, given)
    return state.exit_code


def _local_defaults(file: Path, out: Path) -> dict[str, Any]:
    """What differs between this machine and a cluster, of what the pipeline knows."""
    from kfp_gate.submitting.parameters import declared

    tracking = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out / 'mlflow.db'}"
    here = {"backend": "processes", "gpus_per_node": 0, "tracking_uri": tracking}
    known = declared(file.read_text(encoding="utf-8"))
    return {name: value for name, value in here.items() if name in known}


def _pipeline_file(pipeline: str, folder: Path) -> Path:
    if pipeline.endswith((".yaml", ".yml")):
        if not Path(pipeline).is_file():
            raise InvalidInput(
                f"no file {pipeline!r}", expected="a compiled pipeline", where="--pipeline",
                next_step="run `kfp-gate compile` or check the path",
            )  # fmt: skip
        return Path(pipeline).resolve()
    from kfp_gate.pipelines import MAKERS

    if pipeline not in MAKERS:
        raise InvalidInput(
            f"pipeline {pipeline!r}", expected=f"one of {', '.join(MAKERS)} or a YAML file", where="--pipeline",
            next_step="choose one of these",
        )  # fmt: skip
    return _compile(MAKERS[pipeline](), folder / f"{pipeline}.yaml")


def _compile(pipeline: Any, file: Path) -> Path:
    """Write the YAML at once or not at all."""
    from kfp import compiler

    with tempfile.TemporaryDirectory(dir=file.parent) as part:
        made = Path(part) / file.name
        compiler.Compiler().compile(pipeline, str(made))
        made.replace(file)
    return file


def _kfp_client(endpoint: str, namespace: str, token: str, ca: str) -> Any:
    """A client as kfp makes it; without an endpoint it looks for the cluster that this runs in."""
    import logging
    import warnings

    from kfp import client

    # kfp logs a traceback for each of its five tries; the error itself is told once, in our form.
    logging.getLogger().addHandler(logging.NullHandler())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return client.Client(
            host=endpoint or None, namespace=namespace or "kubeflow", existing_token=token or None,
            ssl_ca_cert=ca or None,
        )  # fmt: skip


def _pairs(texts: Iterable[str]) -> dict[str, Any]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidInput(
                f"{text!r}", expected="name=value", where="--parameter", next_step="write for instance -p epochs=20"
            )
        pairs[name] = value
    return pairs


def _checked(file: Path, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the types that the YAML declares; text from the command line is converted."""
    from kfp_gate.submitting.parameters import check, declared

    return check(declared(file.read_text(encoding="utf-8")), arguments)


if __name__ == "__main__":
    main()
