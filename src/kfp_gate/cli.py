"""The command line. The only module here that may import kfp, and only inside its commands."""

import json
import os
import sys
import tempfile
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from kfp_gate import __version__, local_run
from kfp_gate.errors import InvalidInput, KfpGateError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

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
    floor = 0.995 if strict else 0.5
    arguments = {
        "dataset": str(dataset),
        "base_model": "yolo11n.yaml?depth=0.33&width=0.125",
        "epochs": 12,
        "image_size": 160,
        "batch": 16,
        "processes_per_node": 2,
        "patience": 0,
        "training_options": {
            "optimizer": "AdamW", "lr0": 0.004, "warmup_epochs": 1, "mosaic": 0.3, "close_mosaic": 4,
        },
        "class_thresholds": {name: {"map50": {"min": floor if name != "bolt" else floor - 0.1}} for name in CLASSES},
        "registered_model": "kfp-gate-demo",
    }  # fmt: skip
    code = _run_and_show("gate", arguments, out)
    # A refusal is what --strict is there to show; only a failure of the machinery is an error here.
    raise typer.Exit(0 if code in (local_run.PASSED, local_run.REFUSED) else code)


@app.command()
def run(
    dataset: Annotated[str, typer.Option(help="Path or s3:// prefix of a labelled dataset.")],
    parameter: Annotated[
        list[str] | None, typer.Option("--parameter", "-p", help="Pipeline parameter as name=value; repeat it.")
    ] = None,
    pipeline: Annotated[str, typer.Option(help="gate or gate_existing_model, or a compiled YAML file.")] = "gate",
    out: Annotated[Path, typer.Option(help="Folder for the run and the reports.")] = Path("kfp-gate-runs"),
    cache: Annotated[bool, typer.Option(help="Take split and training from an equal earlier run.")] = True,
) -> None:
    """Run a pipeline on this machine. Exits 0 passed, 3 refused, 1 broken, 2 bad input."""
    arguments = {"dataset": dataset, **_pairs(parameter or [])}
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
    from kfp_gate.terminal import Terminal

    run_id = uuid.uuid4().hex
    folder = out / "runs" / run_id[:8]
    folder.mkdir(parents=True, exist_ok=True)
    file = _pipeline_file(pipeline, folder)
    given = {**_local_defaults(arguments, out), **arguments}
    job = {
        "pipeline": str(file),
        "arguments": _checked(file, given),
        "root": str(folder / "steps"),
        "workspace": str(folder / "workspace"),
        "cache": cache,
        "cache_root": str(out / "cache"),
    }
    (folder / "job.json").write_text(json.dumps(job, ensure_ascii=False, indent=1), encoding="utf-8")
    command = local_run.python("-m", "kfp_gate.cli", "run-here", str(folder / "job.json"))
    terminal = Terminal(folder)
    with terminal:
        state = local_run.follow(command, folder, {"KFP_GATE_RUN_ID": run_id}, terminal.update)
    terminal.summary(state, given)
    return state.exit_code


def _local_defaults(arguments: Mapping[str, Any], out: Path) -> dict[str, Any]:
    """What differs between this machine and a cluster."""
    tracking = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{out / 'mlflow.db'}"
    return {"backend": "processes", "gpus_per_node": 0, "tracking_uri": tracking}


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
    from kfp_gate.parameters import check, declared

    return check(declared(file.read_text(encoding="utf-8")), arguments)


if __name__ == "__main__":
    main()
