"""The training spec: exact round trip, and every problem at once."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import InvalidInput
from kfp_gate.training.spec import TrainingSpec

GOOD = {"train_manifest": "a.parquet", "val_manifest": "s3://b/v.parquet"}

specs = st.builds(
    TrainingSpec,
    train_manifest=st.text(min_size=1), val_manifest=st.text(min_size=1), epochs=st.integers(1, 10**6),
    image_size=st.integers(1, 64).map(lambda i: 32 * i), batch=st.integers(1, 4096), seed=st.integers(0, 2**31),
    monitors=st.lists(
        st.sampled_from(["map50", "map50_95", "class/원뿔/recall", "false_alarm_rate"]), min_size=1, unique=True
    ).map(tuple),
    min_delta=st.floats(0, 1), confidence=st.floats(0, 1),
    overrides=st.dictionaries(st.sampled_from(["lr0", "optimizer", "mosaic"]), st.one_of(st.floats(0, 1), st.text())),
)  # fmt: skip


@given(specs)
def test_a_spec_survives_the_way_to_a_rank(spec: TrainingSpec) -> None:
    assert TrainingSpec.from_json(spec.to_json()) == spec


def test_all_problems_are_told_at_once() -> None:
    bad = {
        **GOOD, "epochs": 0, "image_size": 100, "batch": True, "min_delta": float("nan"),
        "monitors": ["mAP50", "recall", "recall"],
        "stop_on": "map75", "overrides": {"val": False, "epochs": 3, "rect": True}, "device": "tpu",
    }  # fmt: skip
    with pytest.raises(InvalidInput) as caught:
        TrainingSpec.from_json(json.dumps(bad))
    text = str(caught.value)
    for part in (
        "epochs: 0", "image_size: 100", "batch: True", "min_delta: nan", "unknown metric 'mAP50'", "a name twice",
        "stop_on: 'map75'",
        "validation would never run", "overrides.epochs: is set by epochs", "overrides.rect: refused", "device: 'tpu'",
    ):  # fmt: skip
        assert part in text


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON list"),
        ('{"train_manifest": "a"}', "settings that do not fit"),
        (json.dumps({**GOOD, "epoch": 3}), "settings that do not fit"),
        (json.dumps({**GOOD, "schema_version": 9}), "schema_version 9"),
        (json.dumps({**GOOD, "monitors": "map50"}), "settings that do not fit"),
    ],
)
def test_what_is_no_spec_is_refused(text: str, found: str) -> None:
    with pytest.raises(InvalidInput, match=found):
        TrainingSpec.from_json(text)


def test_slices_are_not_watched() -> None:
    with pytest.raises(InvalidInput, match="settings that do not fit") as caught:
        TrainingSpec(**GOOD, monitors=("slice/weather=rain/map50",)).check()
    assert "slices are judged by the gate" in str(caught.value)


def test_a_monitored_class_must_exist() -> None:
    spec = TrainingSpec(**GOOD, monitors=("class/cone/map50",))
    spec.check(classes=("cone", "tree"))
    with pytest.raises(InvalidInput) as caught:
        spec.check(classes=("cones", "tree"))
    assert "did you mean 'class/cones/map50'" in str(caught.value)


def test_differences_are_those_that_a_person_cares_for() -> None:
    first = TrainingSpec(**GOOD, epochs=10, checkpoint_uri="s3://a", overrides={"lr0": 0.01})
    second = first.with_changes(epochs=20, checkpoint_uri="s3://b", overrides={"lr0": 0.02})
    earlier = json.loads(json.dumps(first.settings()))
    assert second.differences(earlier) == {"epochs": (10, 20), "overrides": ({"lr0": 0.01}, {"lr0": 0.02})}
    assert first.differences(earlier) == {}


def test_a_version_before_this_one_is_no_difference() -> None:
    """It did not know what is off by default, and wrote 4 where the number of loader processes was left open."""
    spec = TrainingSpec(**GOOD, epochs=10)
    earlier = json.loads(json.dumps(spec.settings())) | {"workers": 4}
    del earlier["probe_steps"], earlier["profile_steps"]
    assert spec.differences(earlier) == {}
    assert spec.with_changes(workers=4).differences(earlier) == {}
    assert spec.with_changes(workers=2, profile_steps=9).differences(earlier) == {
        "workers": (4, 2), "profile_steps": (0, 9),
    }  # fmt: skip
    assert spec.differences({**earlier, "probe_steps": 0}) == {"workers": (4, -1)}
