"""The alias (`champion`) of a registered model: moved by one pipeline at a time, and only from where the gate saw it.

MLflow sets an alias without asking where it stood: of two pipelines that both beat version 3, the second would take
the place of the first without ever having been compared with it. So a mover first leaves a claim on its own
version, "from 3", and only then reads everybody's claims and the alias. Of two movers at least one sees the other:

1. The alias is not where the gate saw it: withdraw, stop.
2. Somebody claims the same move for a lower version: withdraw, stop. Or for the same version, with a lower token (two
   registrations of one model): withdraw, wait until the alias stands at it.
3. Only higher ones claim it: they will withdraw; wait for them, then look again at the alias.
4. Nobody else: keep the previous version in a tag, move, read back.

A claim left behind by a step that was killed counts for two minutes. Clocks of pods may differ by seconds, not more.
"""

import json
import logging
import time
import uuid
from dataclasses import dataclass

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.registry.tracking import Tracking
from kfp_gate.registry.versions import Version, aliases, all_versions, get_version, verify

log = logging.getLogger(__name__)

CLAIM_LIFE = 120.0
"""Seconds until a claim counts as left behind by a step that died."""

RIVAL_WAIT = 30.0
"""Seconds to wait for higher versions to withdraw their claims."""

NONE = "none"


@dataclass(frozen=True, order=True)
class Claim:
    """Who is about to move an alias; the lowest one may."""

    version: int
    token: str


@dataclass(frozen=True)
class Move:
    """Where an alias stood and where it stands. `previous` is None if it was not set before."""

    alias: str
    version: int
    previous: int | None
    moved: bool


def previous_tag(alias: str) -> str:
    """The version tag that holds where the alias stood before: what a rollback goes back to."""
    return f"kfp_gate.alias.{alias}.previous"


def claim_tag(alias: str) -> str:
    """The start of the version tags by which movers say that they are about to move the alias; a token follows."""
    return f"kfp_gate.alias.{alias}.claim."


def move_alias(tracking: Tracking, version: Version, alias: str, *, seen_sha256: str) -> Move:
    """Set `alias` to `version`, if it stands where the gate saw it.

    Args:
        version: a version whose files are verified.
        seen_sha256: digest of the champion that the gate compared with; "" if there was none.

    Raises:
        InvalidInput: the alias stands elsewhere, or another pipeline is moving it. Nothing was changed.
        Unavailable: the server does not answer.
    """
    at = (aliases(tracking, version.name) or {}).get(alias)
    if at == version.number:
        return Move(alias, at, _previous(version, alias), moved=False)
    _check_seen(tracking, version, alias, at, seen_sha256)
    claim = Claim(version.number, uuid.uuid4().hex)
    key = claim_tag(alias) + claim.token
    _set_tag(tracking, version, key, json.dumps({"from": at or NONE, "time": time.time()}))
    try:
        won = _win(tracking, version, alias, at, claim)
        if won:
            # Before the move: were the step killed in between, a tag too many harms nobody.
            _set_tag(tracking, version, previous_tag(alias), str(at or NONE))
            _point(tracking, version, alias)
    finally:
        tracking.call(
            "withdrawing the claim", tracking.client.delete_model_version_tag, version.name, str(version.number), key
        )
    if not won:
        _await(tracking, version, alias)
    log.info("alias %s of %s: version %s, before: %s", alias, version.name, version.number, at or NONE)
    return Move(alias, version.number, at, moved=won)


def rollback(tracking: Tracking, name: str, alias: str, to: int | None = None) -> Move:
    """Set `alias` back to the version before, or to version `to`; that version's files are read back first.

    Raises:
        InvalidInput: no such model, alias or version, or no version before this one is known.
        Broken: the files of the version to go back to are damaged. The alias stays where it is.
    """
    known = aliases(tracking, name)
    if known is None or alias not in known:
        raise InvalidInput(
            f"no model {name!r} with alias {alias!r}", expected=_known(name, known), where=tracking.where,
            next_step="check the model's name and the alias",
        )  # fmt: skip
    current = get_version(tracking, name, known[alias])
    target = to if to is not None else _previous(current, alias)
    if target is None:
        raise InvalidInput(
            f"no version before {current.number} is known for alias {alias!r}",
            expected=f"a tag {previous_tag(alias)} on version {current.number}", where=current.uri,
            next_step="name the version to go back to",
        )  # fmt: skip
    version = get_version(tracking, name, target)
    verify(tracking, version)
    _point(tracking, version, alias)
    _set_tag(tracking, current, f"kfp_gate.alias.{alias}.rolled_back", str(version.number))
    log.info("alias %s of %s rolled back from version %d to %d", alias, name, current.number, version.number)
    return Move(alias, version.number, current.number, moved=version.number != current.number)


def _check_seen(tracking: Tracking, version: Version, alias: str, at: int | None, seen_sha256: str) -> None:
    if at is None and not seen_sha256:
        return
    found = get_version(tracking, version.name, at).sha256 if at is not None else ""
    if at is not None and found and found == seen_sha256:
        return
    stands = f"version {at} (sha256 {found[:12] or 'unknown'})" if at is not None else "no version"
    raise _stop(version, alias, f"alias {alias!r} stands at {stands}", seen_sha256)


def _win(tracking: Tracking, version: Version, alias: str, at: int | None, own: Claim) -> bool:
    """Return True once nobody else is about to make the same move, False if somebody makes it for the same version."""
    deadline = time.monotonic() + RIVAL_WAIT
    while True:
        now = (aliases(tracking, version.name) or {}).get(alias)
        if now == version.number:
            return False
        if now != at:
            raise _stop(version, alias, f"alias {alias!r} was moved to version {now} meanwhile", "")
        rivals = _rivals(tracking, version.name, alias, at, own)
        if not rivals:
            return True
        first = min(rivals)
        if first < own:
            if first.version == own.version:
                return False
            raise _stop(version, alias, f"version {first.version} is moving alias {alias!r} at the same time", "")
        if time.monotonic() > deadline:
            raise _stop(version, alias, f"version {first.version} does not give up moving alias {alias!r}", "")
        time.sleep(0.5)


def _await(tracking: Tracking, version: Version, alias: str) -> None:
    """Wait until the other registration of the same version has moved the alias."""
    deadline = time.monotonic() + RIVAL_WAIT
    while (now := (aliases(tracking, version.name) or {}).get(alias)) != version.number:
        if time.monotonic() > deadline:
            raise _stop(version, alias, f"alias {alias!r} stands at {now or 'no version'}: another step that was to "
                                        "move it did not", "")  # fmt: skip
        time.sleep(0.5)


def _rivals(tracking: Tracking, name: str, alias: str, at: int | None, own: Claim) -> list[Claim]:
    found = []
    for version in all_versions(tracking, name):
        for key, text in version.tags.items():
            claim = Claim(version.number, key.removeprefix(claim_tag(alias)))
            if key.startswith(claim_tag(alias)) and claim != own and _is_live(text, at):
                found.append(claim)
    return found


def _is_live(text: str, at: int | None) -> bool:
    try:
        value = json.loads(text)
        return bool(value["from"] == (at or NONE) and time.time() - float(value["time"]) < CLAIM_LIFE)
    except (ValueError, KeyError, TypeError):
        return False


def _point(tracking: Tracking, version: Version, alias: str) -> None:
    client = tracking.client
    tracking.call(f"moving alias {alias}", client.set_registered_model_alias, version.name, alias, str(version.number))
    now = (aliases(tracking, version.name) or {}).get(alias)
    if now != version.number:
        raise Broken(
            f"alias {alias!r} stands at version {now} right after it was set to {version.number}",
            expected=f"version {version.number}", where=version.uri,
            next_step="somebody moves this alias by other means: look at it in MLflow before it is served",
        )  # fmt: skip


def _set_tag(tracking: Tracking, version: Version, key: str, value: str) -> None:
    tracking.call(
        "tagging the version", tracking.client.set_model_version_tag, version.name, str(version.number), key, value
    )


def _previous(version: Version, alias: str) -> int | None:
    value = version.tags.get(previous_tag(alias), "")
    return int(value) if value.isdigit() else None


def _stop(version: Version, alias: str, found: str, seen_sha256: str) -> InvalidInput:
    compared = f"the champion that the gate compared with (sha256 {seen_sha256[:12]})" if seen_sha256 else (
        "where it stood when the gate looked"
    )  # fmt: skip
    return InvalidInput(
        f"{found}; version {version.number} is registered, the alias was not moved",
        expected=f"alias {alias!r} at {compared}", where=version.uri,
        next_step="run the pipeline again (training comes from the cache): the gate then meets the new champion",
    )  # fmt: skip


def _known(name: str, known: dict[str, int] | None) -> str:
    if known is None:
        return f"a registered model {name!r}"
    return f"one of its aliases: {', '.join(sorted(known)) or 'it has none'}"
