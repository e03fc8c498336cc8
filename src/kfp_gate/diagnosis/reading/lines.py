"""Timeline lines as a reader may trust them: known keys hold what they should hold, or null.

A timeline may be cut, old, of another version, or written by somebody else altogether. What it says is checked here
once, so that nobody behind this door meets a text where a number belongs. Keys and kinds that are not known stay as
they are. Null is unknown, never zero.
"""

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from kfp_gate.diagnosis.reading.shapes import clean
from kfp_gate.errors import InvalidInput

LONGEST_LINE = 8 << 20
"""Bytes; a profile of a large model is below one."""

LARGEST_FILE, MOST_LINES = 2 << 30, 5_000_000
"""Bytes and lines of one timeline, unpacked: months of windows. A small packed file may hold more than any memory."""


@dataclass(frozen=True)
class Lines:
    """What one file gave.

    Attributes:
        lines: in the order of the file.
        dropped: lines that were no JSON object with a kind; a last line that was cut is not counted.
        cut: whether the file ends in the middle of a line or of its packing.
    """

    lines: tuple[Mapping[str, Any], ...]
    dropped: int = 0
    cut: bool = False


def read_lines(path: Path, where: str) -> Lines:
    """The lines of a timeline file, plain or packed by gzip (told by its content, not by its name).

    Args:
        path: the file.
        where: how to name it in messages.

    Raises:
        InvalidInput: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            return _read(gzip.GzipFile(fileobj=raw) if packed else raw, where)  # type: ignore[arg-type]
    except OSError as error:
        raise InvalidInput(
            f"cannot be read: {error.strerror or error}", expected="a timeline", where=where,
            next_step="check the file, its permissions and the mount",
        ) from None  # fmt: skip


def _read(file: BinaryIO, where: str) -> Lines:
    found: list[Mapping[str, Any]] = []
    dropped, cut, total, count = 0, False, 0, 0
    pieces = _whole_lines(file)
    while True:
        try:
            raw = next(pieces, None)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            # A packed file that was cut, or is damaged further on: what came before holds.
            cut = True
            break
        if raw is None:
            break
        text, whole = raw
        total, count = total + len(text), count + 1
        if total > LARGEST_FILE or count > MOST_LINES:
            raise InvalidInput(
                f"more than {LARGEST_FILE >> 30} GiB or {MOST_LINES:,} lines", expected="the timeline of one training",
                where=where, next_step="check what this file is; a timeline holds a few megabytes a day",
            )  # fmt: skip
        line = parse(text)
        if line is not None:
            found.append(line)
        elif not whole:
            cut = True
        elif text.strip():
            dropped += 1
    return Lines(tuple(found), dropped, cut)


def _whole_lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Each line and whether it is whole; of a line that is too long a piece, and the rest is skipped."""
    while line := file.readline(LONGEST_LINE):
        if line.endswith(b"\n") or len(line) < LONGEST_LINE:
            yield line, line.endswith(b"\n")
            continue
        yield b"too long", True
        skipped = line
        total = len(line)
        while skipped and not skipped.endswith(b"\n"):
            skipped = file.readline(LONGEST_LINE)
            total += len(skipped)
            if total > LARGEST_FILE:
                return


def parse(raw: bytes) -> Mapping[str, Any] | None:
    """One line; None if it is no JSON object with a kind."""
    try:
        value = json.loads(raw.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return None
    if b"\\ud" in raw.lower():
        try:
            value = _without_surrogates(value)
        except RecursionError:
            return None
    return clean(value)


def _without_surrogates(value: Any) -> Any:
    """Half of a character is valid in JSON, and in no file that is written later."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return [_without_surrogates(v) for v in value] if isinstance(value, list) else value
