"""Which tracking server to talk to, and whether it may be sent anything at all.

A tracking URI that arrives as a pipeline parameter was typed by whoever started the run; credentials arrive from
the cluster's Secret. If any host could be named, any caller could have the token sent to a host of theirs.
So a host is accepted only if it is this machine, the environment's own server, or on the operator's list.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from kfp_gate.errors import InvalidInput

HOSTS_VARIABLE = "KFP_GATE_TRACKING_HOSTS"
"""Comma-separated hosts that a tracking URI parameter may name: `host`, `host:port` or `*.domain`."""

URI_VARIABLE, RUN_VARIABLE, EXPERIMENT_ID_VARIABLE, EXPERIMENT_NAME_VARIABLE = (
    "MLFLOW_TRACKING_URI", "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME",
)  # fmt: skip
"""What MLflow reads and what the KFP backend injects where its MLflow plugin is on."""


@dataclass(frozen=True)
class Address:
    """A tracking server that may be used. `injected_run` and `experiment_id` come with the environment's own."""

    uri: str
    injected_run: str = ""
    experiment_id: str = ""
    experiment_name: str = ""

    @property
    def is_server(self) -> bool:
        """Whether it is reached over http; else it is a sqlite file of this machine."""
        return self.uri.startswith(("http://", "https://"))


def resolve(tracking_uri: str = "", environ: Mapping[str, str] | None = None) -> Address:
    """The address to use for a `tracking_uri` parameter; empty means the environment's.

    Raises:
        InvalidInput: no server is named, the URI has a form that is not supported or holds a password, or its
            host is not on the list.
    """
    env = os.environ if environ is None else environ
    own = env.get(URI_VARIABLE, "").strip()
    uri = tracking_uri.strip() or own
    if not uri:
        raise InvalidInput(
            "no tracking server", expected=f"tracking_uri, or {URI_VARIABLE} in the step's environment",
            where="parameter tracking_uri",
            next_step="name the server (https://host) or, on one machine, a file (sqlite:////folder/mlflow.db)",
        )  # fmt: skip
    _check_form(uri)
    if _same(uri, own):
        return Address(
            uri, env.get(RUN_VARIABLE, ""), env.get(EXPERIMENT_ID_VARIABLE, ""), env.get(EXPERIMENT_NAME_VARIABLE, "")
        )
    if not uri.startswith("sqlite:"):
        _check_host(uri, env.get(HOSTS_VARIABLE, ""))
    return Address(uri)


def _check_form(uri: str) -> None:
    try:
        parts = urlsplit(uri)
        host, user, _ = parts.hostname, parts.username or parts.password, parts.port
    except ValueError as error:
        raise _form(f"a tracking URI that cannot be read ({error})") from None
    if user:
        # Not repeated in the message: it holds a password.
        raise InvalidInput(
            "a tracking URI with credentials in it", expected="https://host without user and password",
            where="parameter tracking_uri",
            next_step="put them into MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, from a Secret",
        )  # fmt: skip
    if parts.scheme in ("http", "https") and host:
        return
    if uri.startswith("sqlite:///") and len(uri) > len("sqlite:///"):
        return
    raise _form(f"tracking URI {uri!r}")


def _form(found: str) -> InvalidInput:
    return InvalidInput(
        found, expected="https://host, http://host:port or sqlite:////folder/mlflow.db", where="parameter tracking_uri",
        next_step="name an MLflow server; a folder such as ./mlruns is not supported by MLflow 3",
    )  # fmt: skip


def _check_host(uri: str, allowed: str) -> None:
    parts = urlsplit(uri)
    host = (parts.hostname or "").rstrip(".")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if _is_loopback(host):
        return
    for entry in filter(None, (e.strip().lower() for e in allowed.split(","))):
        name, colon, wanted_port = entry.rpartition(":")
        # An IPv6 address has colons of its own: it is listed in brackets when a port is given.
        if not colon or not wanted_port.isdigit() or (name.count(":") and not name.startswith("[")):
            name, wanted_port = entry, ""
        name = name.strip("[]")
        if wanted_port and int(wanted_port) != port:
            continue
        # "*.example.org" stands for names below that domain, never for "evil-example.org".
        if host == name or (name.startswith("*.") and len(name) > 2 and host.endswith(name[1:])):
            return
    raise InvalidInput(
        f"tracking host {host!r}", expected=f"a host listed in {HOSTS_VARIABLE}, or the server of {URI_VARIABLE}",
        where="parameter tracking_uri",
        next_step=f"leave tracking_uri empty to use {URI_VARIABLE}, or have the operator add the host to "
        f"{HOSTS_VARIABLE} in the credentials Secret: no token is sent to a host that a pipeline parameter made up",
    )  # fmt: skip


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _same(uri: str, own: str) -> bool:
    return bool(own) and uri.rstrip("/") == own.rstrip("/")
