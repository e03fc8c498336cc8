"""The three things that can go wrong, told apart by who has to act.

Nothing else is raised across a room's door. Every message has the same four parts: what was found, what
was expected, where, and the next step. Messages never hold a secret, and an `InvalidInput` never shows a
traceback: the reader has to change an input, not to read our code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

LISTED_PROBLEMS = 20
"""How many problems of one kind a message lists before it only counts the rest."""


@dataclass(frozen=True)
class Problem:
    """One finding among several of the same kind, for instance one bad label line."""

    where: str
    found: str


class KfpGateError(Exception):
    """What all errors of this library have in common.

    Args:
        found: what arrived, with the offending value in `repr` form.
        expected: what would have been accepted.
        where: file and line, parameter, or address.
        next_step: what the reader can do about it.
        problems: all findings of this kind; the message lists the first 20 and counts the rest.
    """

    exit_code = 1

    def __init__(
        self, found: str, *, expected: str, where: str, next_step: str, problems: Sequence[Problem] = ()
    ) -> None:
        self.found = found
        self.expected = expected
        self.where = where
        self.next_step = next_step
        self.problems = tuple(problems)
        super().__init__(found)

    def __str__(self) -> str:
        lines = [f"found:     {self.found}"]
        lines += [f"             {p.where}: {p.found}" for p in self.problems[:LISTED_PROBLEMS]]
        if len(self.problems) > LISTED_PROBLEMS:
            lines.append(f"             ... and {len(self.problems) - LISTED_PROBLEMS} more")
        lines += [
            f"expected:  {self.expected}",
            f"where:     {self.where}",
            f"next step: {self.next_step}",
        ]
        return "\n".join(lines)

    def __reduce__(self) -> tuple:  # type: ignore[type-arg]  # pickle protocol: the shape is its own
        return (_rebuild, (type(self), self.found, self.expected, self.where, self.next_step, self.problems))


class InvalidInput(KfpGateError):
    """The caller must change something. A retry with the same input fails again. Exit code 2."""

    exit_code = 2


class Unavailable(KfpGateError):
    """A service did not answer, after retries with backoff. The same call may work later. Exit code 1."""


class Broken(KfpGateError):
    """A contract of our own failed: neither the input nor a service is to blame. Exit code 1."""


def _rebuild(
    kind: type[KfpGateError], found: str, expected: str, where: str, next_step: str, problems: tuple[Problem, ...]
) -> KfpGateError:
    return kind(found, expected=expected, where=where, next_step=next_step, problems=problems)
