"""The name of a metric, and its exact image in MLflow."""

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kfp_gate.errors import InvalidInput
from kfp_gate.metric_names import (
    METRICS,
    MLFLOW_NAME_LIMIT,
    SIZE_BANDS,
    MetricName,
    from_mlflow,
    known_names,
    parse,
    per_class,
    suggestions,
    to_mlflow,
)

# Hostile on purpose: escapes, digests, path parts, letters that older Unicode versions do not know, marks, surrogates.
texts = st.one_of(
    st.text(max_size=40),
    st.text(alphabet=":/\\._- ()%0123456789abcdef\n\t", max_size=40),
    st.text(alphabet="원뿔é名\u0301\u200d\ua7cb\U0001e900\ud800\uff21a", max_size=20),
)
long_texts = st.text(alphabet="(원/.:a\\", min_size=200, max_size=400)


@settings(deadline=None)
@given(texts | long_texts, st.sampled_from(sorted(METRICS)), st.sampled_from([None, *SIZE_BANDS]), st.none() | texts)
@example("", "map50", None, "")
@example("a/", "map50", "small", "..")
def test_a_name_is_read_back_as_what_it_was_made_of(
    class_name: str, metric: str, size: str | None, slice_: str | None
) -> None:
    name = MetricName(metric, class_name, size, slice_)
    assert parse(str(name)) == name
    assert parse(str(name), classes=[class_name]) == name


@settings(deadline=None)
@given(texts)
@example("class/(_0123456789abcdef)/map50")
@example("::")
@example(":_0123456789abcdef:")
@example("")
@example("a//b/./../c")
def test_every_text_comes_back_from_its_key(name: str) -> None:
    key = to_mlflow(name)
    if len(key) < MLFLOW_NAME_LIMIT:
        assert from_mlflow(key) == name


@settings(deadline=None)
@given(st.lists(texts | long_texts, unique=True, max_size=8))
@example(["(_0123456789abcdef)", ":28:_0123456789abcdef:29:"])
@example(["x" * 300, "x" * 301, "x" * 300 + "/map50"])
def test_no_two_names_share_a_key(names: list[str]) -> None:
    assert len({to_mlflow(name) for name in names}) == len(names)


@settings(deadline=None)
@given(texts | long_texts)
@example("/" + ":" * 200)
def test_mlflow_takes_every_key(name: str) -> None:
    """By MLflow's own check, which the server makes too. A newline would slip through it, and is escaped as well."""
    from mlflow.utils.validation import _validate_metric_name

    key = to_mlflow(name)
    _validate_metric_name(key)
    assert len(key) <= MLFLOW_NAME_LIMIT
    assert key.isprintable()


@settings(deadline=None)
@given(st.text(max_size=60))
@example(":_0123456789abcdef:")
@example(":110000:")
@example(":28")
@example("a:41:")
@example("//")
def test_a_key_is_decoded_to_the_name_that_makes_it_or_refused(key: str) -> None:
    try:
        name = from_mlflow(key)
    except InvalidInput:
        return
    assert to_mlflow(name) == key


def test_letters_stay_readable_and_only_what_must_be_is_escaped() -> None:
    assert to_mlflow("class/원뿔 (소형)/map50") == "class/원뿔 :28:소형:29:/map50"
    assert to_mlflow("class/50%/map50_95") == "class/50:25:/map50_95"
    assert to_mlflow("slice/weather=rain/map50") == "slice/weather:3d:rain/map50"
    assert to_mlflow("e\u0301") == "e:301:"
    # A letter of Unicode 14: a server on an older Python would refuse the whole batch.
    assert to_mlflow("\ua7d0") == ":a7d0:"


def test_a_name_that_is_too_long_keeps_its_metric_and_needs_the_map() -> None:
    name = per_class("(" * 200, "map50")
    key = to_mlflow(name)
    assert len(key) <= MLFLOW_NAME_LIMIT
    assert key.endswith(":/map50")
    assert from_mlflow(key, {key: name}) == name
    for known in (None, {}, {"other": "x"}):
        with pytest.raises(InvalidInput, match="was shortened"):
            from_mlflow(key, known)


def test_numpy_and_other_numbers_are_told_from_what_is_none() -> None:
    import numpy as np

    from kfp_gate.registry.gate_run import split_finite

    finite, missing = split_finite({
        "a": 0.5, "b": np.float32(0.25), "c": np.int64(3), "d": 1, "e": np.float64("nan"), "f": float("inf"),
        "g": -np.inf, "h": None, "i": True, "j": np.bool_(True), "k": "0.5", "l": np.array(0.5),
    })  # fmt: skip
    assert finite == {"a": 0.5, "b": 0.25, "c": 3.0, "d": 1.0, "l": 0.5}
    assert all(type(value) is float for value in finite.values())
    assert missing == {
        "e": "not finite (nan)", "f": "not finite (inf)", "g": "not finite (-inf)", "h": "None",
        "i": "True is not a number", "j": "np.True_ is not a number", "k": "0.5",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "classes", "close"),
    [
        ("class/cone/mAP50", None, "'class/cone/map50' or 'class/cone/map75' or 'class/cone/map50_95'"),
        ("class/cone/mAP50", ["cone"], "'class/cone/map50' or 'class/cone/map75' or 'class/cone/map50_95'"),
        ("class/Cone/map50", ["cone", "car"], "'class/cone/map50' or 'class/cone/map75' or 'class/cone/map50_95'"),
        ("metrics/mAP50-95(B)", None, "'map50_95' or 'map50' or 'map75'"),
        ("metrics/recall(B)", None, "'recall'"),
        ("map@0.5:0.95", None, "'map50_95' or 'map50' or 'map75'"),
        ("size/smal/recal", None, "'size/small/recall'"),
        ("recall/class/cone", None, None),
        ("fitness", None, None),
        ("class/cone", None, None),
        ("class/cone/class/car/map50", None, "'class/car/map50' or 'class/car/map75' or 'class/car/map50_95'"),
        ("size/small/class/cone/map50", None, "'class/cone/size/small/map50' or 'class/cone/size/small/map75' or "
                                              "'class/cone/size/small/map50_95'"),
        ("", None, None),
        ("/map50", None, "'map50' or 'map75' or 'map50_95'"),
        ("map50/", None, None),
        ("class/a\\b/map50", None, "'class/ab/map50' or 'class/ab/map75' or 'class/ab/map50_95'"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused_with_close_ones_and_never_guessed(
    name: str, classes: list[str] | None, close: str | None
) -> None:
    with pytest.raises(InvalidInput) as caught:
        parse(name, classes=classes, where="parameter monitors")
    assert caught.value.found == f"unknown metric {name!r}"
    assert caught.value.where == "parameter monitors"
    assert caught.value.next_step == (f"did you mean {close}?" if close else "choose a name from the list")


@settings(deadline=None)
@given(texts, st.none() | st.lists(texts, max_size=3))
def test_what_is_suggested_can_be_used(name: str, classes: list[str] | None) -> None:
    for suggested in suggestions(name, classes):
        parse(suggested, classes=classes)


def test_classes_may_be_any_iterable() -> None:
    def names() -> Iterator[str]:
        yield from ("cone", "car")

    assert parse("class/car/map50", classes=names()).class_name == "car"
    with pytest.raises(InvalidInput, match="unknown metric"):
        parse("class/bus/map50", classes=names())
    assert known_names(names())[-1] == "class/car/calibration_error"
