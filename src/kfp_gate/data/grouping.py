"""From rules to groups: every image gets the name of the one group it may not be parted from."""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from kfp_gate.data.annotations import Bools, Ints
from kfp_gate.data.components import components, shared_key_edges
from kfp_gate.data.group_rules import Rule, name_keys
from kfp_gate.data.images import ImageFacts
from kfp_gate.data.near_duplicates import near_duplicate_edges
from kfp_gate.errors import InvalidInput, Problem
from kfp_gate.storage import Store, open_store

_IMAGE_COLUMNS = ("image", "file", "file_name", "filename", "path", "name")


@dataclass(frozen=True)
class Links:
    """What the rules join.

    Attributes:
        a, b: pairs of images that may not be divided.
        tables: per rule with keys the code of each image (-1 for none) and the names of the codes.
        duplicates: images whose bytes equal those of an earlier image.
        notes: sentences a person should read.
    """

    a: Ints
    b: Ints
    tables: tuple[tuple[Ints, list[str]], ...]
    duplicates: int
    notes: tuple[str, ...]

    def keep(self, keep: Bools) -> "Links":
        """Only what joins images where `keep` (shape (n,)) is True, with these numbered anew."""
        if keep.all():
            return self
        number = np.cumsum(keep) - 1
        both = keep[self.a] & keep[self.b]
        tables = tuple((codes[keep], names) for codes, names in self.tables)
        return replace(self, a=number[self.a[both]], b=number[self.b[both]], tables=tables)


def link_images(
    images: Sequence[str], facts: ImageFacts, rules: Sequence[Rule], store: Store, first: Ints | None = None
) -> Links:
    """Apply every rule. Images of equal bytes are always joined.

    Args:
        first: order in which images may stand for what they share, shape (n,). Given if earlier manifests pin
            some: these come first, and every near-duplicate pair is an edge of its own.
    """
    notes: list[str] = []
    content, _ = _encode(facts.sha256)
    duplicates = len(images) - int(content.max(initial=-1) + 1)
    edges = [shared_key_edges(content, first)]
    tables: list[tuple[Ints, list[str]]] = []
    near = 0
    for position, rule in enumerate(rules):
        if rule.kind == "near-duplicates":
            near = len(edges)
            edges.append(near_duplicate_edges(facts.phash, int(rule.argument), first))
            continue
        keys = _keys(rule, images, facts, store, notes)
        # In a union, equal keys of two rules are not one group.
        mark = f"{position + 1}:" if any(r.kind not in ("near-duplicates", "none") for r in rules[:position]) else ""
        codes, distinct = _encode(keys)
        missing = distinct.index("") if "" in distinct else -1
        codes = np.where(codes == missing, -1, codes)
        edges.append(shared_key_edges(codes, first))
        tables.append((codes, [mark + key for key in distinct]))
    _note_joined(edges, near, len(images), notes)
    a, b = (np.concatenate(side) for side in zip(*edges, strict=True))
    return Links(a, b, tuple(tables), duplicates, tuple(notes))


def _note_joined(edges: Sequence[tuple[Ints, Ints]], near: int, images: int, notes: list[str]) -> None:
    """Say what near-duplicates did, in groups: the one rule whose effect nobody can foresee from the files' names."""
    if near and len(edges[near][0]):
        others = [e for i, e in enumerate(edges) if i != near]
        before, after = (
            len(np.unique(components(images, *(np.concatenate(side) for side in zip(*some, strict=True)))))
            for some in (others, edges)
        )
        if after < before:
            notes.append(f"near-duplicates join {before} groups of the other rules into {after}")


def name_groups(links: Links, sha256: Sequence[str], former: Sequence[str] = ()) -> tuple[Ints, list[str]]:
    """Group code of each image, shape (n,), and the name of each code.

    A group keeps the name that earlier manifests gave its images. Else it is named by the smallest key its rules give:
    a group by one rule on names keeps its name whatever other images come or go. An image without a key is named by
    its content, so that renaming it does not move it either.

    Args:
        former: group of each image in earlier manifests, "" for a new image.
    """
    labels = components(len(sha256), links.a, links.b)
    groups, codes = np.unique(labels, return_inverse=True)
    codes = codes.astype(np.int64)
    names = [""] * len(groups)
    if any(former):
        _take_smallest(names, codes, *_without_empty(*_encode(former)))
    given = list(names)
    for table in links.tables:
        _take_smallest(names, codes, *table, frozen=given)
    unnamed = np.array([not name for name in names])
    for i in np.flatnonzero(unnamed[codes]).tolist():
        key = f"content:{sha256[i][:24]}"
        group = int(codes[i])
        if not names[group] or key < names[group]:
            names[group] = key
    return codes, names


def _without_empty(codes: Ints, distinct: list[str]) -> tuple[Ints, list[str]]:
    return np.where(codes == distinct.index(""), -1, codes) if "" in distinct else codes, distinct


def _take_smallest(
    names: list[str], groups: Ints, codes: Ints, distinct: list[str], frozen: Sequence[str] = ()
) -> None:
    """Give each group the smallest of its keys, unless it has a smaller name or a frozen one."""
    keyed = np.flatnonzero(codes >= 0)
    pairs = np.unique(codes[keyed] * len(names) + groups[keyed])
    for code, group in zip((pairs // len(names)).tolist(), (pairs % len(names)).tolist(), strict=True):
        if not (frozen and frozen[group]) and (not names[group] or distinct[code] < names[group]):
            names[group] = distinct[code]


def _encode(keys: Sequence[str]) -> tuple[Ints, list[str]]:
    import pyarrow as pa

    encoded = pa.array(keys, pa.string()).dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _keys(rule: Rule, images: Sequence[str], facts: ImageFacts, store: Store, notes: list[str]) -> list[str]:
    if rule.kind == "csv":
        return _csv_keys(rule, images, store)
    keys = _time_keys(facts, float(rule.argument)) if rule.kind == "exif" else name_keys(rule, images)
    if rule.kind == "auto" and any(keys):
        found = [key for key in keys if key]
        notes.append(f"group rule 'auto' took {len(set(found))} groups of {len(found)} images from the file names")
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
    rows, torn = _csv_rows(reader, key, column, where)
    if torn:
        raise InvalidInput(
            f"{len(torn)} rows that give an image another group than a row before", where=where, problems=torn,
            expected="one group for each image, else one of two groups would be divided",
            next_step="give both groups one name, or correct the rows",
        )  # fmt: skip
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


def _csv_rows(reader: Any, key: str, column: str, where: str) -> tuple[dict[str, str], list[Problem]]:
    """Group by image, and the rows that contradict an earlier one."""
    rows: dict[str, str] = {}
    torn: list[Problem] = []
    try:
        for row in reader:
            name, value = str(row[key] or "").strip(), str(row[column] or "").strip()
            if (before := rows.setdefault(name, value)) != value:
                torn.append(Problem(f"line {reader.line_num}", f"{name!r} is in {value!r} and in {before!r}"))
    except csv.Error as error:
        raise InvalidInput(
            f"no table: {error}", expected="comma-separated values", where=f"{where}:{reader.line_num}",
            next_step="correct the file",
        ) from None  # fmt: skip
    return rows, torn


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


def giant_note(codes: Ints, names: Sequence[str], rule: str) -> str:
    """A warning if one group holds more than half of ten or more images, else ""."""
    sizes = np.bincount(codes)
    largest = int(sizes.argmax())
    if len(codes) < 10 or sizes[largest] <= len(codes) / 2:
        return ""
    return (
        f"one group, {names[largest]!r}, holds {sizes[largest]} of {len(codes)} images: the rule {rule!r} or equal "
        "files join more than half of the dataset"
    )
