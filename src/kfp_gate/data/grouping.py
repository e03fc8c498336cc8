"""From rules to groups: every image gets the name of the one group it may not be parted from."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kfp_gate.data.annotations import Ints
from kfp_gate.data.components import components, shared_key_edges
from kfp_gate.data.group_rules import Rule, name_keys
from kfp_gate.data.images import ImageFacts
from kfp_gate.data.near_duplicates import near_duplicate_clusters
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import Store, open_store

_IMAGE_COLUMNS = ("image", "file", "file_name", "filename", "path", "name")


@dataclass(frozen=True)
class Grouping:
    """The group of each image.

    Attributes:
        names: group name per image.
        codes: integer per image, equal exactly where the names are, shape (n,).
        duplicates: images whose bytes equal those of an earlier image.
        notes: sentences a person should read.
    """

    names: list[str]
    codes: Ints
    duplicates: int
    notes: tuple[str, ...]


def group_images(images: Sequence[str], facts: ImageFacts, rules: Sequence[Rule], store: Store) -> Grouping:
    """Apply every rule and join what any of them joins. Images of equal bytes are always one group.

    A group is named by the smallest key its rules give, so a group by one rule on names keeps its name whatever other
    images come or go. An image without a key is named by its content, so renaming it does not move it either.
    """
    notes: list[str] = []
    content, _ = _encode(facts.sha256)
    duplicates = len(images) - int(content.max(initial=-1) + 1)
    edges = [shared_key_edges(content)] if duplicates else []
    tables: list[tuple[Ints, list[str]]] = []
    for position, rule in enumerate(rules):
        if rule.kind == "near-duplicates":
            edges.append(shared_key_edges(near_duplicate_clusters(facts.phash, int(rule.argument))))
            continue
        keys = _keys(rule, images, facts, store, notes)
        # In a union, equal keys of two rules are not one group.
        mark = f"{position + 1}:" if any(r.kind not in ("near-duplicates", "none") for r in rules[:position]) else ""
        codes, distinct = _encode(keys)
        missing = distinct.index("") if "" in distinct else -1
        codes = np.where(codes == missing, -1, codes)
        edges.append(shared_key_edges(codes))
        tables.append((codes, [mark + key for key in distinct]))
    labels = components(len(images), *(np.concatenate(side) for side in zip(*edges, strict=True))) if edges else content
    groups, group_codes = np.unique(labels, return_inverse=True)
    names = _names(group_codes, len(groups), tables, facts.sha256)
    _note_giant(group_codes, names, rules, notes)
    return Grouping([names[c] for c in group_codes.tolist()], group_codes.astype(np.int64), duplicates, tuple(notes))


def _encode(keys: Sequence[str]) -> tuple[Ints, list[str]]:
    import pyarrow as pa

    encoded = pa.array(keys, pa.string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _names(groups: Ints, count: int, tables: Sequence[tuple[Ints, list[str]]], sha256: Sequence[str]) -> list[str]:
    names = [""] * count
    for codes, distinct in tables:
        keyed = np.flatnonzero(codes >= 0)
        # Each (group, key) once: a key is in one group only, so the first image of each key is enough.
        found, first = np.unique(codes[keyed], return_index=True)
        for code, group in zip(found.tolist(), groups[keyed[first]].tolist(), strict=True):
            if not names[group] or distinct[code] < names[group]:
                names[group] = distinct[code]
    unnamed = np.array([not name for name in names])
    for i in np.flatnonzero(unnamed[groups]).tolist():
        key = f"content:{sha256[i][:24]}"
        group = int(groups[i])
        if not names[group] or key < names[group]:
            names[group] = key
    return names


def _keys(rule: Rule, images: Sequence[str], facts: ImageFacts, store: Store, notes: list[str]) -> list[str]:
    if rule.kind == "csv":
        return _csv_keys(rule, images, store)
    keys = _time_keys(facts, float(rule.argument)) if rule.kind == "exif" else name_keys(rule, images)
    alone = [image for image, key in zip(images, keys, strict=True) if not key]
    if alone and rule.kind != "none":
        shown = ", ".join(repr(image) for image in alone[:3]) + (", ..." if len(alone) > 3 else "")
        if len(alone) == len(images) and rule.kind != "auto":
            raise InvalidInput(
                f"the rule {str(rule)!r} finds a group for none of {len(images)} images, such as {shown}",
                expected="a rule that fits the files", where="group_rule",
                next_step="correct the rule, or choose 'none'",
            )  # fmt: skip
        notes.append(
            f"group rule {str(rule)!r} finds no group for {len(alone)} of {len(images)} images ({shown}): each of them "
            "is its own group. If they are frames of a video, tiles of a picture or shots of one scene, the splits "
            "leak: name a rule that holds them together"
        )
    return keys


def _csv_keys(rule: Rule, images: Sequence[str], store: Store) -> list[str]:
    file, _, column = rule.argument.rpartition(":")
    if "://" in file or file.startswith("/"):
        folder, _, name = file.rpartition("/")
        data, where = open_store(folder or "/").read(name), file
    else:
        data, where = store.read(file), f"{store.uri}/{file}"
    reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig", "replace"), newline=""))
    header = list(reader.fieldnames or [])
    key = next((c for c in _IMAGE_COLUMNS if c in header), None)
    if key is None or column not in header:
        raise InvalidInput(
            f"columns {', '.join(map(repr, header))}",
            expected=f"{column!r} and one of {', '.join(map(repr, _IMAGE_COLUMNS))}", where=where,
            next_step="correct the table's header or the rule",
        )  # fmt: skip
    rows = {str(row[key] or "").strip(): str(row[column] or "").strip() for row in reader}
    bases: dict[str, int] = {}
    for image in images:
        base = image.rpartition("/")[2]
        bases[base] = bases.get(base, 0) + 1
    keys, missing = [], []
    for image in images:
        base = image.rpartition("/")[2]
        value = rows.get(image) or (rows.get(base, "") if bases[base] == 1 else "")
        keys.append(f"csv:{value}")
        if not value:
            missing.append(Problem(image, f"no row with a value in {column!r}"))
    if missing:
        raise InvalidInput(
            f"{len(missing)} of {len(images)} images have no group in the table",
            expected="a row for each image, by its path in the dataset or by a file name that is unique there",
            where=where, next_step="complete the table", problems=missing,
        )  # fmt: skip
    return keys


def _time_keys(facts: ImageFacts, gap: float) -> list[str]:
    """Runs of captures of one camera without a gap above `gap` seconds, named by camera and first capture."""
    keys = [""] * len(facts.camera)
    timed = np.flatnonzero(~np.isnan(facts.taken)).tolist()
    timed.sort(key=lambda i: (facts.camera[i], facts.taken[i]))
    name, before = "", ("\0", 0.0)
    for i in timed:
        camera, taken = facts.camera[i], float(facts.taken[i])
        if camera != before[0] or not taken - before[1] <= gap:
            name = f"time:{camera}@{taken:.3f}"
        keys[i], before = name, (camera, taken)
    return keys


def _note_giant(groups: Ints, names: Sequence[str], rules: Sequence[Rule], notes: list[str]) -> None:
    sizes = np.bincount(groups) if len(groups) else np.zeros(1, np.int64)
    largest = int(sizes.argmax())
    if len(groups) >= 10 and sizes[largest] > len(groups) / 2:
        rule = "+".join(map(str, rules))
        notes.append(
            f"one group, {names[largest]!r}, holds {sizes[largest]} of {len(groups)} images: the rule {rule!r} or "
            "equal files join more than half of the dataset"
        )
