"""The specification as ranks in pods need it: files of the launcher's own disk are uploaded, named by content."""

import hashlib
import json
from pathlib import Path

from kfp_gate.launching.options import LaunchOptions
from kfp_gate.storage import open_store

FIELDS = ("train_manifest", "val_manifest")


def prepare(spec: str, storage: str, options: LaunchOptions) -> str:
    """The specification for pods: local manifests replaced by copies below `storage`, and the heartbeat's bound set.

    The copy's name is its digest: a launcher that runs again, on another machine and with other paths, arrives
    at the same specification.

    Raises:
        InvalidInput, Unavailable: from the store.
    """
    values = json.loads(spec)
    if not isinstance(values, dict):
        return spec
    for field in FIELDS:
        path = Path(str(values.get(field) or "").removeprefix("file://"))
        if str(path) == "." or not path.is_file():
            continue
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        key = f"{field}-{digest[:16]}.parquet"
        store = open_store(f"{storage}/inputs")
        if not store.exists(key):
            store.upload(path, key)
        values[field] = f"{storage}/inputs/{key}"
    if not options.command and not values.get("heartbeat_bound_s"):
        values["heartbeat_bound_s"] = options.heartbeat_bound_seconds
    return json.dumps(values, sort_keys=True)
