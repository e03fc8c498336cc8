"""Files of /proc and /sys: made as they are read, and missing where a kernel or a container withholds them."""

from pathlib import Path


def read_text(path: Path) -> str | None:
    """The text of a file; None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
