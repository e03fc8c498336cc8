"""Whether storage and tracking answer from here, tried as they will be used."""

import secrets
import urllib.error
import urllib.request
from typing import Literal
from urllib.parse import urlsplit

from kfp_gate.errors import KfpGateError
from kfp_gate.storage import open_store

Row = tuple[Literal["ok", "warning", "error"], str, str, str]
SECONDS = 10.0


def check_storage(uri: str) -> Row | None:
    """Write, read and delete one small object below `uri`; None if there is no URI."""
    if not uri:
        return None
    what = f"storage {uri}"
    key, text = f".kfp-gate-probe-{secrets.token_hex(6)}", b"probe"
    try:
        store = open_store(uri)
        store.write(key, text)
        same = store.read(key) == text
        store.delete(key)
    except KfpGateError as error:
        return "error", what, error.found, error.next_step
    except OSError as error:
        return "error", what, f"{type(error).__name__}: {error.strerror}", "check the path and its permissions"
    if not same:
        return "error", what, "an object came back changed", "check what lies between here and the store"
    return "ok", what, "writes, reads and deletes", ""


def check_tracking(uri: str) -> Row | None:
    """Ask an MLflow server whether it is well; None for no URI or one that is not HTTP."""
    parts = urlsplit(uri)
    if parts.scheme not in ("http", "https"):
        return None
    host = f"{parts.hostname}:{parts.port}" if parts.port else str(parts.hostname)
    what = f"tracking {parts.scheme}://{host}"
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=SECONDS) as answer:  # noqa: S310  # http(s) only
            answer.read(100)
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            return "ok", what, f"answers, and asks for credentials ({error.code})", ""
        return "error", what, f"answers {error.code}", "check the URI and the server"
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        return "error", what, f"does not answer: {reason}", "check the URI, and the network between here and the server"
    return "ok", what, "answers", ""
