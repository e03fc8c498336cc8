"""The data.yaml of a YOLO dataset: class names, and where its splits lie."""

from dataclasses import dataclass
from typing import Any

from kfp_gate.errors import InvalidInput
from kfp_gate.storage import Readable

YAML_NAMES = ("data.yaml", "data.yml", "dataset.yaml", "dataset.yml")
CLASS_LISTS = ("classes.txt", "obj.names")
SPLIT_KEYS = {"train": "train", "val": "val", "validation": "val", "valid": "val", "test": "test"}


@dataclass(frozen=True)
class YoloHeader:
    """What data.yaml says: the class names and, per split, the folders or list files of its images."""

    file: str
    classes: tuple[str, ...]
    splits: dict[str, list[str]]
    path: str = ""


def read_header(store: Readable, listing: dict[str, int], yaml_file: str) -> YoloHeader:
    """Read the yaml named, else the first of `YAML_NAMES`, else any at the top, else a plain list of classes.

    Raises:
        InvalidInput: there is none, or it does not state usable class names.
    """
    import yaml

    found = [yaml_file] if yaml_file else [name for name in YAML_NAMES if name in listing]
    if not found:
        found = sorted(k for k in listing if "/" not in k and k.endswith((".yaml", ".yml")))
    if not found:
        lists = [name for name in CLASS_LISTS if name in listing]
        if lists:
            text = store.read(lists[0]).decode("utf-8-sig", "replace")
            return YoloHeader(lists[0], _class_names([x.strip() for x in text.splitlines() if x.strip()], lists[0]), {})
        raise InvalidInput(
            "no data.yaml", expected="a data.yaml with `names`, or a classes.txt", where=store.uri,
            next_step="add a data.yaml that lists the class names, or choose another dataset_format",
        )  # fmt: skip
    where = f"{store.uri}/{found[0]}"
    try:
        # BaseLoader keeps every scalar as it is written: a class named `no` or `1e3` stays that text.
        content: Any = yaml.load(store.read(found[0]), Loader=yaml.BaseLoader)  # noqa: S506 - BaseLoader makes strings only
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"not YAML: {' '.join(str(error).split())}", expected="a YAML mapping with `names`", where=where,
            next_step="correct the file",
        ) from None  # fmt: skip
    if not isinstance(content, dict) or "names" not in content:
        raise InvalidInput(
            f"no `names` in {found[0]}", expected="names: [first, second] or names: {0: first, 1: second}",
            where=where, next_step="add the class names",
        )  # fmt: skip
    classes = _class_names(content["names"], where)
    if content.get("nc") and str(content["nc"]) != str(len(classes)):
        raise InvalidInput(
            f"nc is {content['nc']} and names has {len(classes)}", expected="equal numbers", where=where,
            next_step="remove `nc` or correct `names`",
        )  # fmt: skip
    splits: dict[str, list[str]] = {}
    for key, split in SPLIT_KEYS.items():
        value = content.get(key)
        if value:
            splits.setdefault(split, []).extend(str(v) for v in (value if isinstance(value, list) else [value]))
    return YoloHeader(found[0], classes, splits, str(content.get("path") or ""))


def _class_names(names: Any, where: str) -> tuple[str, ...]:
    if isinstance(names, dict):
        wanted = [str(i) for i in range(len(names))]
        if sorted(names) != sorted(wanted):
            raise InvalidInput(
                f"names has the keys {', '.join(map(str, list(names)[:20]))}",
                expected=f"0 to {len(names) - 1}, no gap",
                where=where, next_step="number the classes from 0",
            )  # fmt: skip
        names = [names[i] for i in wanted]
    if not isinstance(names, list) or not names or not all(isinstance(n, str) and n.strip() for n in names):
        raise InvalidInput(
            f"names is {names!r}"[:200], expected="a list of class names, none of them empty", where=where,
            next_step="write names: [first, second] or names: {0: first, 1: second}",
        )  # fmt: skip
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise InvalidInput(
            f"class {twice[0]!r} appears {names.count(twice[0])} times", expected="each class name once", where=where,
            next_step="rename or merge the classes: results are reported by name",
        )  # fmt: skip
    return tuple(names)
