"""What MLflow accepts as the name of a registered model and of an alias, told before anything is sent."""

import posixpath
import re

from kfp_gate.errors import InvalidInput, Problem

NAME_LIMIT = 256
ALIAS_LIMIT = 255
_ALIAS = re.compile(r"[\w\-]+")
_RESERVED_ALIAS = re.compile(r"latest|v\d+", re.IGNORECASE)


def name_problems(name: str) -> list[Problem]:
    """What is wrong with a registered model's name; empty if nothing is."""
    where = "parameter registered_model"
    if not name.strip():
        return [Problem(where, "empty")]
    found = []
    if bad := sorted({c for c in name if c in "/:"}):
        found.append(Problem(where, f"{name!r} holds {' and '.join(bad)}, which separate parts of a models:/ URI"))
    elif posixpath.normpath(name) != name or name.startswith(".."):
        found.append(Problem(where, f"{name!r} reads as a path"))
    if "@" in name:
        found.append(Problem(where, f"{name!r} holds @, which starts an alias in models:/NAME@ALIAS"))
    if "'" in name and '"' in name:
        found.append(Problem(where, f"{name!r} holds both kinds of quotes, so that MLflow cannot search for it"))
    if name != name.strip() or any(not c.isprintable() for c in name):
        found.append(Problem(where, f"{name!r} holds a blank at an end or an unprintable character"))
    if len(name) > NAME_LIMIT:
        found.append(Problem(where, f"{len(name)} characters, at most {NAME_LIMIT}"))
    return found


def alias_problems(alias: str) -> list[Problem]:
    """What is wrong with an alias; empty if nothing is, or if no alias is asked for."""
    where = "parameter alias"
    if not alias:
        return []
    if not _ALIAS.fullmatch(alias):
        return [Problem(where, f"{alias!r} holds characters other than letters, digits, _ and -")]
    if _RESERVED_ALIAS.fullmatch(alias):
        return [Problem(where, f"{alias!r} is reserved by MLflow")]
    if len(alias) > ALIAS_LIMIT:
        return [Problem(where, f"{len(alias)} characters, at most {ALIAS_LIMIT}")]
    return []


def check_names(name: str, alias: str) -> None:
    """Raise one `InvalidInput` with all that is wrong with the two."""
    problems = name_problems(name) + alias_problems(alias)
    if problems:
        raise InvalidInput(
            "a name that the model registry refuses",
            expected="a name without / : @, an alias of letters, digits, _ and -, neither `latest` nor `v<number>`",
            where="parameters registered_model and alias", next_step="choose other names", problems=problems,
        )  # fmt: skip
