"""What a training starts from, by one short text.

    yolo11n.yaml                              a known architecture, random weights
    yolo11n.yaml:width=0.125                  the same, narrower
    yolo11n.yaml:depth=0.33,width=0.125       the 0.8M-parameter variant of the demo
    /models/base.pt   s3://bucket/base.pt     pretrained weights
    /models/own.yaml                          an architecture of one's own

A scaled variant is written at run time from the installed architecture file: nothing of it is copied into
this library. Names are never downloaded: `yolo11n.pt` without a path must be a file that exists.
"""

import re
from pathlib import Path
from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.storage import open_store

KEYS = ("depth", "width", "max_channels")


def resolve(base_model: str, folder: Path) -> Path:
    """The local file to start from.

    Args:
        base_model: see the module.
        folder: where a variant or a downloaded file is written.

    Returns:
        A `.pt` or `.yaml` file.

    Raises:
        InvalidInput: nothing of that name, or a malformed variant.
        Unavailable: the store that holds it does not answer.
    """
    name, _, variant = base_model.partition(".yaml:")
    if variant:
        return _scaled(f"{name}.yaml", _variant(variant, base_model), folder, base_model)
    if base_model.startswith(("s3://", "file://")):
        parent, _, file = base_model.rpartition("/")
        target = folder / file
        open_store(parent).download(file, target)
        return target
    path = Path(base_model).expanduser()
    if path.suffix == ".pt":
        if not path.is_file():
            raise _unknown(base_model)
        return path.resolve()
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path.resolve()
        if path.name == base_model and _architecture(base_model) is not None:
            # Upstream resolves a bare name, and takes the scale (n, s, m, l, x) from it.
            return Path(base_model)
    raise _unknown(base_model)


def _variant(text: str, base_model: str) -> dict[str, float]:
    values = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if key.strip() not in KEYS or not 0 < number < 1e5:
            raise InvalidInput(
                f"variant {part!r} in {base_model!r}", expected=f"{', '.join(k + '=NUMBER' for k in KEYS)}",
                where="base_model", next_step="write for instance yolo11n.yaml:depth=0.33,width=0.125",
            )  # fmt: skip
        values[key.strip()] = number
    return values


def _scaled(name: str, changes: dict[str, float], folder: Path, base_model: str) -> Path:
    import yaml

    source = Path(name) if Path(name).is_file() else _architecture(name)
    if source is None:
        raise _unknown(base_model)
    architecture: dict[str, Any] = yaml.safe_load(source.read_text(encoding="utf-8"))
    letter = _scale(name) or "n"
    scales = architecture.get("scales") or {letter: [1.0, 1.0, 1024]}
    if letter not in scales:
        raise _unknown(base_model)
    values = dict(zip(KEYS, scales[letter], strict=True)) | changes
    architecture["scales"] = {letter: [values["depth"], values["width"], int(values["max_channels"])]}
    folder.mkdir(parents=True, exist_ok=True)
    # The file's name carries the scale's letter, where upstream looks for it.
    target = folder / (Path(name).name if _scale(name) else f"{Path(name).stem}-yolo1{letter}.yaml")
    target.write_text(yaml.safe_dump(architecture), encoding="utf-8")
    return target


def _scale(name: str) -> str:
    found = re.search(r"yolo(e-)?[v]?\d+([nslmx])", Path(name).stem)
    return found.group(2) if found else ""


def _architecture(name: str) -> Path | None:
    """The installed architecture file that a bare name stands for."""
    from importlib.util import find_spec

    spec = find_spec("ultralytics")
    if spec is None or not spec.submodule_search_locations:
        return None
    root = Path(next(iter(spec.submodule_search_locations)), "cfg", "models")
    plain = re.sub(r"(\d+)([nslmx])(.+)?$", r"\1\3", Path(name).name)
    return next((path for wanted in (name, plain) for path in sorted(root.rglob(wanted))), None)


def _unknown(base_model: str) -> InvalidInput:
    return InvalidInput(
        f"base model {base_model!r}",
        expected="an architecture such as yolo11n.yaml, a variant such as yolo11n.yaml:width=0.125, or a .pt file",
        where="base_model",
        next_step="give a path or s3:// URI for weights; nothing is downloaded by name",
    )
