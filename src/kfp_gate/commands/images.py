"""`kfp-gate images ...`: locks, checks and builds of the component images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kfp_gate.images.locks import Change
    from kfp_gate.images.requirements import Project

app = typer.Typer(no_args_is_help=True)

_ROOT = typer.Option(help="A checkout of the repository.")


@app.callback()
def images() -> None:
    """Locks, checks and builds of the component images."""


@app.command()
def lock(
    root: Annotated[Path, _ROOT] = Path(),
    upgrade: Annotated[bool, typer.Option(help="Take newer versions where the requirements allow them.")] = False,
) -> None:
    """Resolve all images together and write their constraints."""
    from kfp_gate.images import locks

    _show(locks.lock(_project(root), upgrade=upgrade))


@app.command()
def check(
    root: Annotated[Path, _ROOT] = Path(),
    resolve: Annotated[bool, typer.Option(help="Also ask the package index whether the locks resolve.")] = True,
) -> None:
    """Prove without building that the images can be built and hold what the code imports."""
    from kfp_gate.images import check as checks

    checks.refuse(checks.check(_project(root), resolve=resolve))
    print("images: nothing found")


@app.command()
def verify(
    image: Annotated[str, typer.Option(help="Image that this environment is to be; empty: KFP_GATE_IMAGE.")] = "",
    evaluate: Annotated[bool, typer.Option(help="Run the tiny evaluation too.")] = True,
) -> None:
    """Inside an image: import every module of the listed packages, then run a tiny evaluation."""
    from kfp_gate.images import verify as verifying

    verification = verifying.verify(image, evaluate=evaluate)
    verifying.refuse(verification)
    print(verifying.summary(verification))


@app.command()
def refresh(
    image: Annotated[str, typer.Argument(help="Image that this environment is.")],
    root: Annotated[Path, _ROOT] = Path(),
) -> None:
    """Make the versions of this environment, if it passes, the image's lock."""
    from kfp_gate.images.refresh import refresh as adopt

    _show(adopt(_project(root), image))


@app.command()
def build(
    components: Annotated[list[str] | None, typer.Argument(help="Components; none: all.")] = None,
    registry: Annotated[str, typer.Option(help="Host and path before the image's name.")] = "kfp-gate",
    push: Annotated[bool, typer.Option(help="Push, and record the digest in images/images.lock.")] = False,
    builder: Annotated[str, typer.Option(help="docker, podman or buildah; empty: the first that works.")] = "",
    option: Annotated[list[str] | None, typer.Option(help="Handed on to the tool's build command; repeat it.")] = None,
    insecure: Annotated[
        bool, typer.Option(help="Push to a registry without verified TLS, such as a local one.")
    ] = False,
    root: Annotated[Path, _ROOT] = Path(),
) -> None:
    """Build component images with docker, podman or buildah."""
    from kfp_gate.images.build import build as build_images

    images_built = build_images(
        _project(root), components or (), registry=registry, push=push, builder=builder, options=option or (),
        tls_verify=not insecure,
    )  # fmt: skip
    for built in images_built:
        print(built.tag, built.digest)


def _project(root: Path) -> "Project":
    from kfp_gate.images.requirements import read_project

    return read_project(root)


def _show(changes: "list[Change]") -> None:
    for change in changes:
        print(f"{change.image}: {change.package} {change.before or '-'} -> {change.after or '-'}")
    print(f"{len(changes)} changes")
