"""Build images, describe what is in them, push them, and record the digests for `compile`."""

import logging
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kfp_gate import __version__
from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.images.builders import Builder, find_builder
from kfp_gate.images.digests import PushedImage, parse_digests, write_digests
from kfp_gate.images.names import DEFAULT_REGISTRY, SHARED, content_hash, folder_of, lock_digest
from kfp_gate.images.requirements import Project

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltImage:
    """One image that was built."""

    image: str
    tag: str
    """As it is named here and, if pushed, in the registry."""
    digest: str
    """As the registry knows it; empty if it was not pushed."""
    bill_of_materials: Path
    """CycloneDX JSON: every Python package of the image with its version."""


def build(
    project: Project,
    components: Sequence[str] = (),
    *,
    registry: str = DEFAULT_REGISTRY,
    push: bool = False,
    builder: str = "",
    options: Sequence[str] = (),
    tls_verify: bool = True,
    bills: Path | None = None,
) -> list[BuiltImage]:
    """Build the images of `components`, one after the other.

    A pushed image's digest is written to `images/images.lock` at once, so that a failure of a later one loses nothing.

    Args:
        components: names with dashes or underscores; empty: all images.
        registry: host and path before the image's name.
        push: push each image after its build.
        builder: docker, podman or buildah; empty: the first that works.
        options: handed on to the tool's build command.
        tls_verify: see `Builder.push`.
        bills: folder of the bills of materials; default `build/bills` in the checkout.

    Raises:
        InvalidInput: an unknown component.
        Unavailable: no tool works here.
        Broken: a build or push failed.
    """
    images = [_image_of(project, component) for component in components] or list(project.images)
    tool = find_builder(builder)
    folder = bills or project.root / "build" / "bills"
    built = []
    for image in dict.fromkeys(images):
        tag = f"{registry.rstrip('/')}/{image}:{content_hash(image, project.root / 'images')}"
        _build_one(project, image, tag, tool, options)
        bill = bill_of_materials(project, image, folder)
        digest = ""
        if push:
            digest = tool.push(tag, tls_verify=tls_verify)
            record(project, image, registry, digest)
        built.append(BuiltImage(image, tag, digest, bill))
        log.info("%s: built%s", tag, f" and pushed as {digest}" if digest else "")
    return built


def record(project: Project, image: str, registry: str, digest: str) -> None:
    """Write the digest of one pushed image to `images/images.lock`; the other entries stay as they are."""
    path = project.root / "images" / "images.lock"
    pushed = parse_digests(path.read_text(encoding="utf-8") if path.is_file() else "")
    content = content_hash(image, project.root / "images")
    pushed[image] = PushedImage(registry.rstrip("/"), digest, content, __version__)
    write_digests(path, pushed)


def bill_of_materials(project: Project, image: str, folder: Path) -> Path:
    """Write the CycloneDX bill of materials of an image from its lock, which its build proves to be what it holds.

    The packages of the Debian base are not in it: the base is named by its digest.

    Raises:
        InvalidInput: the tool that writes it is not installed.
        Broken: it failed.
    """
    program = shutil.which("cyclonedx-py", path=str(Path(sys.executable).parent)) or shutil.which("cyclonedx-py")
    if program is None:
        raise InvalidInput(
            "no cyclonedx-py in this environment",
            expected="the package cyclonedx-bom, which writes bills of materials",
            where=str(Path(sys.executable).parent),
            next_step="install the extra: pip install 'kfp-gate[dev]'",
        )
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{image}.cdx.json"
    lock = project.folder(image) / "constraints.txt"
    # Validation of the tool's own output against the schema takes longer than all the rest, every time.
    command = [program, "requirements", str(lock), "--output-format", "JSON", "--output-reproducible", "--no-validate"]
    command += ["--pyproject", str(project.root / "pyproject.toml"), "--output-file", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(
            f"cyclonedx-py failed: {done.stderr.strip()}",
            expected="a bill of materials",
            where=str(lock),
            next_step="run `kfp-gate images check`",
        )
    return target


def _build_one(project: Project, image: str, tag: str, tool: Builder, options: Sequence[str]) -> None:
    lock = lock_digest(image, project.root / "images")
    arguments = {"COMPONENT": folder_of(image), "LOCK": lock, "VERSION": __version__}
    labels = {}
    if revision := _revision(project.root):
        labels["org.opencontainers.image.revision"] = revision
    containerfile = project.root / "images" / "Containerfile"
    tool.build(project.root, containerfile, tag, arguments, labels, options)


def _revision(root: Path) -> str:
    """The commit of the checkout, marked if files differ from it; empty outside version control."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _image_of(project: Project, component: str) -> str:
    name = component.replace("_", "-")
    name = SHARED.get(name, name)
    if name not in project.images:
        raise InvalidInput(
            f"component {component!r}",
            expected=f"one of {', '.join(project.images)}",
            where="kfp-gate images build",
            next_step="name one of these, or none for all",
        )
    return name
