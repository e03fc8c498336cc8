"""The three things that can go wrong, told apart by who has to act.

Nothing else is raised across a room's door. Every message has the same four parts: what was found, what
was expected, where, and the next step. Messages never hold a secret, and an `InvalidInput` never shows a
traceback: the reader has to change an input, not to read our code.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

LISTED_PROBLEMS = 20
"""How many problems of one kind a message lists before it only counts the rest."""

_SECRET_VARIABLE = re.compile(r"TOKEN|PASSWORD|PASSWD|SECRET|CREDENTIAL|API_?KEY|ACCESS_KEY|WEBHOOK", re.IGNORECASE)
_USER_INFO = re.compile(r"(?<=://)[^/@\s'\"]+@")
_SHORTEST_SECRET = 4
_NAMES = frozenset({"KFP_GATE_SECRET"})
"""Variables that name a Secret of the cluster: the reader of a message needs the name."""
_SWITCHES = frozenset({"true", "false", "none", "null"})


def hide_secrets(text: str) -> str:
    """`text` without user names and passwords in URIs, and without the value of any secret in the environment.

    A value counts as secret by the name of its variable (token, password, secret, credential, key, webhook); those
    below four characters are left, since they would blank out half of any text.

    >>> hide_secrets("https://user:pass@host/path")
    'https://***@host/path'
    """
    text = _USER_INFO.sub("***@", text)
    secrets = [
        value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET
        and _SECRET_VARIABLE.search(name)
        and name not in _NAMES
        and not _is_harmless(value)
    ]
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _is_harmless(value: str) -> bool:
    """AWS_WEB_IDENTITY_TOKEN_FILE and its like name a file, where to look and not the secret; others are switches."""
    return value.startswith("/") or value.lower() in _SWITCHES


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
        # Whatever a library put into its own message, a secret ends here: errors go to logs, tags and webhooks.
        self.found = hide_secrets(found)
        self.expected = hide_secrets(expected)
        self.where = hide_secrets(where)
        self.next_step = hide_secrets(next_step)
        self.problems = tuple(Problem(hide_secrets(p.where), hide_secrets(p.found)) for p in problems)
        super().__init__(self.found)

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


class InvalidInput(KfpGateError):  # noqa: N818  # named for who has to act
    """The caller must change something. A retry with the same input fails again. Exit code 2."""

    exit_code = 2


class Unavailable(KfpGateError):  # noqa: N818  # named for who has to act
    """A service did not answer, after retries with backoff. The same call may work later. Exit code 1."""


class Broken(KfpGateError):  # noqa: N818  # named for who has to act
    """A contract of our own failed: neither the input nor a service is to blame. Exit code 1."""


def _rebuild(
    kind: type[KfpGateError], found: str, expected: str, where: str, next_step: str, problems: tuple[Problem, ...]
) -> KfpGateError:
    return kind(found, expected=expected, where=where, next_step=next_step, problems=problems)
