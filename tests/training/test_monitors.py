"""Monitors: what was best when, and when to stop."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kfp_gate.errors import Broken, InvalidInput
from kfp_gate.training.monitors import Monitors
from kfp_gate.training.spec import TrainingSpec


def monitors(*names: str, **settings: object) -> Monitors:
    return Monitors(TrainingSpec(train_manifest="t", val_manifest="v", monitors=names or ("map50",), **settings))  # type: ignore[arg-type]


def stop_epoch(watch: Monitors, rows: list[dict[str, float | None]]) -> int | None:
    for epoch, row in enumerate(rows, start=1):
        if watch.observe(epoch, row).stop:
            return epoch
    return None


@given(st.lists(st.one_of(st.none(), st.floats(0, 1)), min_size=1, max_size=30), st.integers(1, 29))
def test_the_best_is_the_first_largest_and_a_restored_state_goes_on_alike(series: list[float | None], cut: int) -> None:
    whole, parts = monitors(patience=5), monitors(patience=5)
    for epoch, value in enumerate(series, start=1):
        if epoch == cut:
            state = json.loads(json.dumps(parts.state()))
            parts = monitors(patience=5)
            assert parts.restore(state) == ()
        assert whole.observe(epoch, {"map50": value}) == parts.observe(epoch, {"map50": value})
    computed = [(v, -e) for e, v in enumerate(series) if v is not None]
    if computed and max(computed)[0] > 0:
        best = whole.watched["map50"]
        assert (best.best, best.best_epoch) == (max(computed)[0], -max(computed)[1] + 1)


def test_fitness_is_finite_and_higher_is_better() -> None:
    watch = monitors("false_alarm_rate")
    first, second = watch.observe(1, {"false_alarm_rate": 0.5}), watch.observe(2, {"false_alarm_rate": 0.2})
    assert second.improved == ("false_alarm_rate",) and second.fitness > first.fitness
    third = watch.observe(3, {"false_alarm_rate": None})
    assert math.isfinite(third.fitness) and third.improved == ()
    assert watch.observe(4, {"false_alarm_rate": 0.3}).improved == ()


def test_at_zero_the_later_weights_are_kept_and_patience_still_runs() -> None:
    """Upstream calls every epoch at mAP 0 an improvement and never stops."""
    watch = monitors(patience=3)
    rows: list[dict[str, float | None]] = [{"map50": 0.0}] * 9
    assert stop_epoch(watch, rows) == 4
    assert watch.watched["map50"].best_epoch == 4


def test_stop_on_one_all_or_never() -> None:
    rows: list[dict[str, float | None]] = [{"map50": 0.5, "recall": min(0.9, 0.1 * e)} for e in range(1, 20)]
    assert stop_epoch(monitors("map50", "recall", patience=3), rows) == 4
    assert stop_epoch(monitors("map50", "recall", patience=3, stop_on="recall"), rows) == 12
    assert stop_epoch(monitors("map50", "recall", patience=3, stop_on="all"), rows) == 12
    assert stop_epoch(monitors("map50", "recall", patience=3, stop_on="off"), rows) is None
    assert stop_epoch(monitors("map50", "recall", patience=0), rows) is None
    assert stop_epoch(monitors("map50", "recall", patience=3, min_epochs=10), rows) == 10


def test_tiny_gains_do_not_keep_a_training_alive() -> None:
    rows: list[dict[str, float | None]] = [{"map50": 0.5 + 0.0001 * e} for e in range(20)]
    assert stop_epoch(monitors(patience=5), rows) is None
    watch = monitors(patience=5, min_delta=0.01)
    assert stop_epoch(watch, rows) == 6
    assert watch.watched["map50"].best_epoch == 6


def test_a_monitor_without_a_value_cannot_train_for_ever() -> None:
    assert stop_epoch(monitors("precision", patience=4), [{"precision": None}] * 10) == 4


def test_a_flat_mean_names_the_class_that_still_improves() -> None:
    watch = monitors("map50", patience=0)
    for epoch in range(1, 8):
        grows = 0.1 * epoch
        watch.observe(
            epoch, {"map50": 0.5, "class/cone/map50": grows, "class/tree/map50": 1 - grows, "class/cone/recall": grows}
        )
    assert watch.flattened() == {"map50": ["class/cone/map50"]}
    assert watch.record()[0]["flat_while_improving"] == ["class/cone/map50"]


def test_a_wrong_name_is_refused_with_close_matches() -> None:
    with pytest.raises(InvalidInput) as caught:
        monitors("class/cone/map50").look_up({"map50": 0.1, "class/cones/map50": 0.1})
    assert "did you mean 'class/cones/map50'" in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_our_own_fault(value: float) -> None:
    with pytest.raises(Broken):
        monitors().observe(1, {"map50": value})
