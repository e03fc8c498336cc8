"""The CUDA clock's sums, with events whose moments the test decides: there is no device here."""

from collections.abc import Iterator

import pytest

from kfp_gate.training import device_clock
from kfp_gate.training.device_clock import CudaClock


class Device:
    """A stream that is at one moment; events lie at the moments at which they were recorded."""

    recorded = done = 0.0
    waited = 0


class Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Device.recorded += 10.0
        self.at = Device.recorded

    def query(self) -> bool:
        return self.at <= Device.done

    def synchronize(self) -> None:
        Device.waited += 1
        Device.done = max(Device.done, self.at)

    def elapsed_time(self, end: "Event") -> float:
        return end.at - self.at


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Device.recorded = Device.done = 0.0
    Device.waited = 0
    monkeypatch.setattr(device_clock.torch.cuda, "Event", Event)
    yield


def test_what_is_not_done_is_left_for_later_and_nothing_waits() -> None:
    clock = CudaClock()
    for phase in ("data", "forward", "backward", "data"):
        clock.mark(phase)
    assert clock.so_far() == {} and Device.waited == 0
    Device.done = 25.0
    assert clock.so_far() == {"data": 0.01}
    Device.done = 40.0
    assert clock.so_far() == pytest.approx({"data": 0.01, "forward": 0.01, "backward": 0.01})
    assert Device.waited == 0


def test_an_epochs_sums_start_again_and_the_running_ones_do_not() -> None:
    clock = CudaClock()
    for phase in ("forward", "data", "forward"):
        clock.mark(phase)
    assert clock.collect() == pytest.approx({"forward": 0.01, "data": 0.01}) and Device.waited == 1
    assert clock.collect() == {}
    clock.mark("data")
    assert clock.collect() == pytest.approx({"forward": 0.01})
    assert clock.so_far() == pytest.approx({"forward": 0.02, "data": 0.01})


def test_marks_are_added_up_before_they_are_too_many() -> None:
    clock = CudaClock()
    Device.done = 1e9
    for _ in range(3 * device_clock.KEPT):
        clock.mark("forward")
    assert len(clock._marks) <= device_clock.KEPT + 1
    assert clock.so_far()["forward"] == pytest.approx(0.01 * (3 * device_clock.KEPT - 1))
