"""Files of the launcher's own disk that ranks in pods need: uploaded once, named by their content."""

import hashlib
import json
from pathlib import Path

from kfp_gate.storage import open_store

FIELDS = ("train_manifest", "val_manifest")


def upload_inputs(spec: str, storage: str) -> str:
    """The specification with local manifests replaced by their copies below `storage`.

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
    return json.dumps(values, sort_keys=True)
