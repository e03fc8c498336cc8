"""`images/images.lock`: the digest of every image that was built and pushed.

One JSON object, keyed by image name, so that building one image changes one entry. Readers ignore keys they
do not know; a file of another `format` is refused. An empty file means that nothing was pushed yet.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from kfp_gate.errors import InvalidInput

FORMAT = 1
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_FIELDS = ("registry", "digest", "content", "version")


@dataclass(frozen=True)
class PushedImage:
    """Where one image lies, and what it was built from."""

    registry: str
    """Host and path before the image's name, as given to `images build --registry`."""
    digest: str
    """`sha256:` and 64 hexadecimal digits, as the registry reported it after the push."""
    content: str
    """`names.content_hash` at the time of the build: another value now means the digest is out of date."""
    version: str
    """Version of kfp-gate inside the image."""


def parse_digests(text: str, *, where: str = "images/images.lock") -> dict[str, PushedImage]:
    """Read the text of an `images.lock`.

    Returns:
        Image name (with dashes) to what was pushed; empty for an empty file.

    Raises:
        InvalidInput: not JSON, another format, or an entry without a complete digest.
    """
    if not text.strip():
        return {}
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise _refused(f"text that is not JSON: {error}", where) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("images"), dict):
        raise _refused(f"format {content.get('format') if isinstance(content, dict) else content!r}", where)
    pushed = {}
    for name, entry in content["images"].items():
        if not isinstance(entry, dict) or not all(isinstance(entry.get(field), str) for field in _FIELDS):
            raise _refused(f"entry {name!r} without the texts {', '.join(_FIELDS)}", where)
        if not _DIGEST.fullmatch(entry["digest"]):
            raise _refused(f"digest {entry['digest']!r} of {name!r}", where)
        pushed[name] = PushedImage(**{field: entry[field] for field in _FIELDS})
    return pushed


def write_digests(path: Path, pushed: Mapping[str, PushedImage]) -> None:
    """Write `pushed` to `path`, sorted by image, so that a build shows as a change of one entry."""
    content = {"format": FORMAT, "images": {name: asdict(pushed[name]) for name in sorted(pushed)}}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _refused(found: str, where: str) -> InvalidInput:
    return InvalidInput(
        found,
        expected=f'{{"format": {FORMAT}, "images": {{NAME: {{{", ".join(_FIELDS)}}}}}}}, digests as sha256:<64 hex>',
        where=where,
        next_step="restore the file from version control, or empty it and run `kfp-gate images build --push` again",
    )
