"""The name of the image that a component runs in.

A compiled pipeline names an image by digest where `images/images.lock` knows one that was built from the files
as they are now, else by a tag that holds a hash of those files. Either way a changed pin changes the name, and
Kubeflow's step cache, whose key holds the name and not the content, cannot answer with a stale result.
"""

import hashlib
import importlib.resources
from importlib.resources.abc import Traversable

from kfp_gate import __version__
from kfp_gate.errors import InvalidInput
from kfp_gate.images.digests import parse_digests

DEFAULT_REGISTRY = "kfp-gate"
"""Names without a host: they resolve where the images were built or loaded onto the nodes."""

SHARED = {"preflight": "validation-gate"}
"""Components that run in another component's image. Preflight tries the gate's own image and GPU, so it has none."""

_HASHED = ("constraints.txt", "requirements.in")


def image_files() -> Traversable:
    """The folder `images/`, as package data: the same in a checkout and in an installed wheel."""
    return importlib.resources.files("kfp_gate.image_files")


def image_names() -> tuple[str, ...]:
    """All images, by name with dashes, sorted."""
    return tuple(sorted(f.name.replace("_", "-") for f in image_files().iterdir() if f.joinpath(_HASHED[1]).is_file()))


def image_of(component: str) -> str:
    """The image that `component` (with dashes or underscores) runs in, by name with dashes.

    Raises:
        InvalidInput: no image belongs to that name.
    """
    name = component.replace("_", "-")
    name = SHARED.get(name, name)
    if name not in image_names():
        raise InvalidInput(
            f"component {component!r}",
            expected=f"one of {', '.join(sorted({*image_names(), *SHARED}))}",
            where="images/",
            next_step="use one of these names, or add a folder for the new image and run `kfp-gate images lock`",
        )
    return name


def folder_of(image: str) -> str:
    """Name of the folder of `image` below `images/`: that of its component, with underscores."""
    return image.replace("-", "_")


def content_hash(component: str, files: Traversable | None = None) -> str:
    """12 hexadecimal digits over what decides the content of the component's image.

    That is its constraints, its requirements, the Containerfile, and the version of kfp-gate.

    Args:
        files: the folder `images/` of another checkout than this installation's.
    """
    image = component if files else image_of(component)
    files = files or image_files()
    parts = [files.joinpath(folder_of(image), name) for name in _HASHED] + [files.joinpath("Containerfile")]
    digest = hashlib.sha256(__version__.encode())
    for part in parts:
        # Length first, so that moving a line from one file to the next cannot give the same hash.
        content = part.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"\n{part.name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]


def lock_digest(component: str, files: Traversable | None = None) -> str:
    """`sha256:` and the digest of the image's `constraints.txt`: equal digests mean equal Python packages.

    An image carries it as the label `kfp-gate.lock` and in the variable KFP_GATE_IMAGE_LOCK.
    """
    image = component if files else image_of(component)
    lock = (files or image_files()).joinpath(folder_of(image), "constraints.txt")
    return "sha256:" + hashlib.sha256(lock.read_bytes().replace(b"\r\n", b"\n")).hexdigest()


def reference(component: str, registry: str = "", files: Traversable | None = None) -> str:
    """The image of `component` as a compiled pipeline names it.

    Args:
        component: name of a component or image, with dashes or underscores.
        registry: host and path before the image's name. Empty: the registry that `images.lock` recorded for this
            image, else `DEFAULT_REGISTRY`. A mirror may be named: a digest is the same in every registry.
        files: the folder `images/` of another checkout than this installation's.

    Returns:
        `<registry>/<image>@sha256:...` if the image was pushed as the files now stand, else
        `<registry>/<image>:<content_hash>`.

    Raises:
        InvalidInput: an unknown component, or an unreadable `images.lock`.
    """
    image = image_of(component)
    files = files or image_files()
    content = content_hash(image, files)
    pushed = parse_digests(files.joinpath("images.lock").read_text(encoding="utf-8")).get(image)
    if pushed and pushed.content == content:
        return f"{registry.rstrip('/') or pushed.registry}/{image}@{pushed.digest}"
    return f"{registry.rstrip('/') or DEFAULT_REGISTRY}/{image}:{content}"
