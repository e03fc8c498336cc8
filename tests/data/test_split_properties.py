"""What a split promises, whatever the dataset."""

import random
import shutil
import tempfile
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scenes import clips, picture, write_yolo

from kfp_gate.data.annotations import NO_SPLIT
from kfp_gate.data.assignment import by_hash, hash_positions
from kfp_gate.data.balance import ABSENT, balanced, group_labels
from kfp_gate.data.box_checks import check_boxes
from kfp_gate.data.label_text import _parse_clean, _parse_each, parse_labels
from kfp_gate.data.splitting import split_dataset

SHARES = (0.7, 0.15, 0.15)
few = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
names = st.sets(
    st.text("abcdefgh원()50% ", min_size=1, max_size=6).map(str.strip).filter(bool), min_size=12, max_size=25
)


@dataclass(frozen=True)
class Place:
    split: str
    group: str


def places(result):
    """Split and group of each image; fails if an image is in two splits."""
    out = {}
    for split, manifest in result.manifests.items():
        for row in manifest.rows():
            assert row.image not in out
            out[row.image] = Place(split, row.group)
    return out


def dataset(root, groups, frames):
    return write_yolo(
        root, {f"images/{g}__{i}.png": [(0, 0.5, 0.5, 0.25, 0.25)] for g in sorted(groups) for i in range(frames)}
    )


@few
@given(names, st.integers(1, 3), st.integers(0, 3), st.data())
def test_each_image_is_in_one_place_no_group_is_divided_and_added_files_move_none(groups, frames, seed, data):
    with tempfile.TemporaryDirectory() as folder:
        old = data.draw(st.sets(st.sampled_from(sorted(groups)), min_size=6))
        first = dataset(Path(folder, "old"), old, frames)
        second = dataset(Path(folder, "new"), groups, frames)
        for image in (first / "images").iterdir():  # the same files in both; the new ones are others
            shutil.copy(image, second / "images" / image.name)
        broken = data.draw(st.sampled_from(sorted((second / "labels").iterdir())))
        before = split_dataset(str(first), group_rule="prefix:__", seed=seed)
        broken.write_text("0 0.5\n")
        after = split_dataset(str(second), group_rule="prefix:__", seed=seed, rejects="drop")
    was, now = places(before), places(after)
    rejected = {d.image for d in after.rejects}
    everything = {f"images/{g}__{i}.png" for g in groups for i in range(frames)}
    assert set(now) | rejected == everything and not set(now) & rejected
    by_group = {}
    for place in now.values():
        assert by_group.setdefault(place.group, place.split) == place.split
    hashed = not any("leave" in note for r in (before, after) for note in r.notes)
    if hashed and not before.coverage.duplicates and not after.coverage.duplicates:
        assert all(now[image] == place for image, place in was.items() if image not in rejected)


@few
@given(st.integers(0, 2**32))
def test_equal_input_in_any_file_order_gives_the_same_digest(seed):
    with tempfile.TemporaryDirectory() as folder:
        images = list(clips(8, 3).items())
        digests = []
        for name in ("a", "b"):
            root = Path(folder, name)
            write_yolo(root, dict(images[:0]))
            for image, boxes in images:
                path = root / image
                path.parent.mkdir(parents=True, exist_ok=True)
                picture(zlib.crc32(image.encode())).save(path)
                label = root / "labels" / f"{path.stem}.txt"
                label.parent.mkdir(exist_ok=True)
                label.write_text("".join(" ".join(map(str, box)) + "\n" for box in boxes))
            digests.append([m.digest for m in split_dataset(str(root)).manifests.values()])
            random.Random(seed).shuffle(images)
            images = [(image, boxes[::-1]) for image, boxes in images]  # nor has the order of lines a part
    assert digests[0] == digests[1] and len(set(digests[0])) == 3


def test_digest_changes_with_any_content(tmp_path):
    root = write_yolo(tmp_path / "set", clips(8, 3))
    digest = split_dataset(str(root)).manifests["train"].digest
    image = next(split_dataset(str(root)).manifests["train"].rows()).image
    label = root / image.replace("images", "labels").replace("png", "txt")
    label.write_text(label.read_text().replace("0.25", "0.2500001", 1))
    assert split_dataset(str(root)).manifests["train"].digest != digest


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.floats(0.05, 0.9), st.floats(0.05, 0.9))
def test_shares_converge_with_the_number_of_groups(seed, a, b):
    total = a + b + 0.2
    shares = (0.2 / total, a / total, b / total)
    splits = by_hash(hash_positions([f"group {i}" for i in range(20_000)], seed), shares)
    given_shares = np.bincount(splits, minlength=3) / 20_000
    # Five standard deviations of a binomial share at its largest.
    assert np.abs(given_shares - shares).max() < 5 * 0.5 / np.sqrt(20_000)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_balanced_splits_pin_fill_and_beat_hashing(data):
    count, classes = data.draw(st.integers(3, 40)), data.draw(st.integers(1, 5))
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    groups = np.concatenate([np.arange(count), rng.integers(0, count, 3 * count)])
    owner = rng.integers(0, len(groups), 6 * count)
    labels = group_labels(groups, count, owner, rng.integers(0, classes, len(owner)), classes)
    positions = hash_positions([str(i) for i in range(count)], 0)
    pinned = np.where(rng.random(count) < data.draw(st.sampled_from([0.0, 0.3])), rng.integers(0, 3, count), NO_SPLIT)
    splits = balanced(labels, positions, SHARES, pinned, 1e-6)
    held = pinned != NO_SPLIT
    assert (splits[held] == pinned[held]).all()
    if (~held).sum() >= 3:
        assert len(set(splits.tolist())) == 3
    hashed = by_hash(positions, SHARES)
    if not held.any() and len(set(hashed.tolist())) == 3:
        assert spread(labels, splits) <= spread(labels, hashed) + 0.02


def spread(labels, splits):
    """The sum that balancing minimises, computed anew."""
    owner = np.repeat(np.arange(len(splits)), np.diff(labels.starts))
    held = np.zeros((3, len(labels.totals)))
    np.add.at(held, (splits[owner], labels.label), labels.amount / labels.totals[labels.label])
    squares = ((held - np.array(SHARES)[:, None]) ** 2)[:, labels.totals > 0].sum()
    return float(squares + ((held == 0)[:, labels.totals > 0] * np.array(ABSENT)[:, None]).sum())


numbers = st.one_of(
    st.floats(-2, 2).map(repr), st.integers(-3, 200).map(str), st.sampled_from(["nan", "1_0", "x", "NA", '"1"', ""])
)
lines = st.lists(numbers, max_size=6).map(" ".join)
files = st.lists(st.lists(lines, max_size=4).map("\n".join), min_size=1, max_size=6)


@settings(max_examples=300, deadline=None)
@given(files, st.sampled_from(["", "\n", "\r\n", " \n"]))
def test_the_fast_label_parser_agrees_with_the_one_that_explains(texts, end):
    data = [(t + end).encode() for t in texts]
    slow, fast = _parse_each(data), _parse_clean(data)
    assert parse_labels(data).problems == slow.problems
    if fast is not None:
        assert not slow.problems
        for a, b in ((fast.counts, slow.counts), (fast.rows, slow.rows), (fast.lines, slow.lines)):
            np.testing.assert_array_equal(a, b)


def test_clean_files_take_the_fast_path():
    texts = [b"0 0.5 0.5 0.25 0.25\n1 0.1 0.2 0.1 0.1\n", b"", b"2 0.5 0.5 0.1 0.1", b"0 .5 5e-1 0.25 0.25\r\n"]
    fast = _parse_clean(texts)
    assert fast is not None and fast.counts.tolist() == [2, 0, 1, 1] and fast.lines.tolist() == [1, 2, 1, 1]


@pytest.mark.parametrize("fix", [False, True])
def test_no_box_leaves_the_checks_bad(tmp_path, fix):
    from kfp_gate.data.sources import open_dataset, read_annotations

    root = write_yolo(tmp_path / "set", clips(4, 1))
    rng = np.random.default_rng(3)
    for label in (root / "labels").iterdir():
        rows = np.column_stack([rng.integers(-1, 4, 300), rng.normal(0.5, 0.6, (300, 4)).round(1)])
        label.write_text("".join(f"{int(r[0])} {' '.join(map(str, r[1:]))}\n" for r in rows.tolist()))
    store, _, listing, named = open_dataset(str(root))
    checked = check_boxes(read_annotations(store, listing, named=named), fix=fix)
    bad = Counter((d.image, d.line) for d in checked.defects if d.action == "refused")
    owner = checked.owner
    seen = set()
    for b in range(len(checked.boxes)):
        where = (checked.images[owner[b]], int(checked.lines[b]))
        cx, cy, w, h = checked.boxes[b].tolist()
        inside = min(cx - w / 2, cy - h / 2) >= -0.001 and max(cx + w / 2, cy + h / 2) <= 1.001
        key = (where[0], int(checked.box_class[b]), cx, cy, w, h)
        good = 0 <= checked.box_class[b] < 2 and w > 0 and h > 0 and inside and key not in seen
        assert good == (where not in bad), (where, checked.boxes[b])
        seen.add(key)
