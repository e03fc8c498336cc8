"""One message to a chat tool when a pipeline ends, if the Secret names an address.

The JSON has a `text` that Slack, Mattermost and Google Chat show, and our fields beside it. The address is a secret
of its own (it holds a token), so it is never logged, and a failure to post is told without it.
"""

import json
import logging
import os
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

log = logging.getLogger(__name__)

VARIABLE = "KFP_GATE_WEBHOOK"
TIMEOUT = 10
"""Seconds; a chat tool must not hold up the end of a pipeline."""


def notify(message: Mapping[str, Any]) -> bool:
    """Post `message` to the webhook. Best effort: it never raises.

    Returns:
        Whether it was taken. False without a warning if no address is set.
    """
    address = os.environ.get(VARIABLE, "").strip()
    if not address:
        return False
    try:
        usable = urlsplit(address).scheme in ("https", "http")
    except ValueError:
        usable = False
    if not usable:
        log.warning("%s is not an http(s) address; nothing was posted", VARIABLE)
        return False
    body = json.dumps(message, ensure_ascii=False, default=str).encode()
    request = urllib.request.Request(  # noqa: S310  # the scheme was checked above
        address, data=body, headers={"Content-Type": "application/json; charset=utf-8"}, method="POST"
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT):  # noqa: S310  # as above
            return True
    except HTTPError as error:
        log.warning("the webhook answered %d; nothing was posted", error.code)
    except Exception as error:
        # The text of such an error may repeat the address: only its kind is told.
        log.warning("the webhook could not be reached (%s); nothing was posted", type(error).__name__)
    return False
