"""Texts without credentials: for logs, evidence and tags, whatever library they come from."""

import re

from kfp_gate.errors import hide_secrets

_SECRETS = (
    re.compile(r"(?i)\b((?:[\w-]*(?:password|passwd|secret|token|api[_-]?key|access[_-]?key(?:_id)?|authorization))[\"']?\s*[=:]\s*[\"']?)"
               r"(?:(?:bearer|basic)\s+)?[^\s,;'\"}]+"),
    re.compile(r"(?i)(\b(?:bearer|basic)\s+)[A-Za-z0-9._~+/=-]{8,}"),
    re.compile(r"(://)[^/\s@:]+:[^/\s@]+(?=@)"),
    re.compile(r"()\bAKIA[0-9A-Z]{16}\b"),
    re.compile(r"(?i)([?&](?:X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token|sig|signature)=)[^&\s]+"),
)  # fmt: skip


def redact(text: str) -> str:
    """The text without what looks like a credential, nor any secret of the environment.

    >>> redact("password=abc, url https://u:p@host/x")
    'password=***, url https://***@host/x'
    """
    for pattern in _SECRETS:
        text = pattern.sub(r"\1***", text)
    return hide_secrets(text)
