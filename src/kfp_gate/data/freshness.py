"""Whether a dataset still is what its manifests say: a listing tells, without reading an image."""

from collections.abc import Mapping
from dataclasses import dataclass

from kfp_gate.data.images import SUFFIXES
from kfp_gate.data.manifest import Manifest
from kfp_gate.storage import open_store


@dataclass(frozen=True)
class Drift:
    """Differences between a listing and the manifests, as image paths.

    Attributes:
        missing: in the manifests, and no longer there.
        resized: there with another number of bytes.
        added: there, and in no manifest (rejected images are among them).
    """

    missing: tuple[str, ...]
    resized: tuple[str, ...]
    added: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.missing or self.resized or self.added)

    def __str__(self) -> str:
        parts = [
            f"{len(images)} {what}, such as {images[0]!r}"
            for what, images in (("missing", self.missing), ("resized", self.resized), ("added", self.added))
            if images
        ]
        return "; ".join(parts) or "no difference"


def listing_drift(manifests: Mapping[str, Manifest], *, source_uri: str | None = None) -> Drift:
    """Compare the listing of the source with manifests of one split.

    A file that was replaced by one of the same size is not noticed here; `materialize` notices it when it downloads.

    Args:
        manifests: by split name; all three, else images of the others count as added.
        source_uri: where the images lie, if no longer at the manifests' `source_uri`.

    Raises:
        InvalidInput, Unavailable: the source cannot be listed.
    """
    root = source_uri or next(iter(manifests.values())).source_uri
    known: dict[str, int] = {}
    for manifest in manifests.values():
        known.update(
            zip(manifest.table.column("image").to_pylist(), manifest.table.column("bytes").to_pylist(), strict=True)
        )
    found = {e.key: e.size for e in open_store(root).list() if e.key in known or e.key.lower().endswith(SUFFIXES)}
    return Drift(
        missing=tuple(sorted(k for k in known if k not in found)),
        resized=tuple(sorted(k for k, size in known.items() if found.get(k, size) != size)),
        added=tuple(sorted(k for k in found if k not in known)),
    )
