"""Whether test images are new to a model is decided by bytes, look and group, and it is exact."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.gate.separation import compare, compare_splits, near_duplicates, require

hashes = st.lists(st.integers(0, 2**64 - 1), max_size=30)


@given(hashes, hashes, st.integers(0, 8), st.lists(st.lists(st.integers(0, 63), max_size=9), max_size=20))
def test_near_duplicates_equal_brute_force(test, seen, near, flips):
    for i, bits in enumerate(flips):  # hashes a few bits from a seen one, which random ones never are
        if seen:
            value = seen[i % len(seen)]
            for bit in bits:
                value ^= 1 << bit
            test = [*test, value]
    a, b = np.array(test, np.uint64), np.array(seen, np.uint64)
    brute = (np.bitwise_count(a[:, None] ^ b[None]) <= near).any(axis=1)
    assert near_duplicates(a, b, near).tolist() == brute.tolist()


def table(rows):
    names, digests, looks, groups = zip(*rows, strict=True)
    return pa.table(
        {"image": names, "sha256": digests, "phash": pa.array(looks, pa.uint64()), "group": groups}
    )  # fmt: skip


TEST = table([("a.jpg", "1" * 64, 0, "g1"), ("b.jpg", "2" * 64, 0xFF00, "g2"), ("<b>.jpg", "3" * 64, 2**63, "")])
FAR = 0x5555_5555_5555_5555


def test_nothing_shared_is_proven():
    found = compare(TEST, table([("x", "9" * 64, FAR, "g9"), ("y", "8" * 64, ~FAR & (2**64 - 1), "")]))
    assert (found.state, found.compared_with, found.examples) == ("proven", 2, ())
    require(found, allow_unproven=False, where="model")


@pytest.mark.parametrize(
    ("row", "example"),
    [
        (("x", "1" * 64, FAR, "g9"), "a.jpg: same image"),
        (("x", "9" * 64, 0xFF07, "g9"), "b.jpg: near-duplicate"),
        (("x", "9" * 64, FAR, "g2"), "b.jpg: same group"),
    ],
)
def test_each_kind_of_overlap_stops_the_gate(row, example):
    found = compare(TEST, table([row]))
    assert (found.state, found.examples) == ("overlap", (example,))
    with pytest.raises(Broken, match="the model has seen test images"):
        require(found, allow_unproven=True, where="model")


def test_an_empty_group_is_no_group():
    assert compare(TEST, table([("x", "9" * 64, FAR, "")])).state == "proven"


def test_fingerprints_of_no_image_prove_nothing():
    assert compare(TEST, TEST.slice(0, 0)).state == "not proven"


def test_a_model_without_fingerprints_is_judged_only_if_the_caller_says_so():
    found = compare(TEST, None)
    assert found.state == "not proven"
    with pytest.raises(InvalidInput, match="without fingerprints"):
        require(found, allow_unproven=False, where="model")
    require(found, allow_unproven=True, where="model")


def test_message_names_the_images(snapshot):
    with pytest.raises(Broken) as caught:
        require(compare(TEST, table([("x", "1" * 64, FAR, "g2")])), allow_unproven=False, where="models/candidate")
    snapshot("overlap", str(caught.value))


def test_splits_are_compared_before_any_training():
    other = table([("x", "9" * 64, FAR, "g9")])
    assert compare_splits(TEST, [other, other]).state == "proven"
    assert compare_splits(TEST, [other, table([("v", "8" * 64, FAR, "g2")])]).examples == ("b.jpg: same group",)
