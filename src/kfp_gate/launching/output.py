"""Where the ranks' lines go: standard output, or whoever asked for them."""

import sys
from collections.abc import Callable, Sequence


def write_lines(lines: Sequence[str]) -> None:
    """Lines to standard output, seen at once. A reader that does not keep up holds us, and through us the ranks."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def writer(say: Callable[[str], None] | None) -> Callable[[Sequence[str]], None]:
    """What writes lines: `write_lines`, or `say` for each of them."""
    if say is None:
        return write_lines

    def each(lines: Sequence[str]) -> None:
        for line in lines:
            say(line)

    return each
