"""What is measured of a run, against what a simulated training was given."""

import pytest

from kfp_gate.diagnosis.measured.measuring import observe, typical
from kfp_gate.diagnosis.measured.observations import Loading
from kfp_gate.diagnosis.measured.quantities import Unknown, Value, known, mean, reason
from kfp_gate.diagnosis.measured.steady import MOST, merged, steady_steps
from kfp_gate.diagnosis.reading.runs import Run

from .simulated import Training, simulate
from .test_causes import DEVICE, GPU


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    training = Training(workers=2, ranks=2, throttled=0.25, queued=0.1, waiting=0.5, waited=1.0, checkpoint=0.5)
    training = training.with_parts(read=(0.5, 0.01), transform_Own=(0.2, 0.1))
    return observe(simulate(training, tmp_path_factory.mktemp("seen") / "out"))


def test_steps_and_phases_without_the_warm_up(seen):
    for rank in seen.ranks:
        # 0.321 s of compute and 0.766 s of preparation on two processes.
        assert rank.step_s == pytest.approx(0.383, rel=0.03)
        assert rank.phase("forward") == pytest.approx(0.1, rel=0.02)
        assert sum(v.value for v in rank.phases.values()) == pytest.approx(rank.step_s)
        assert isinstance(rank.step, Value) and rank.step.low <= rank.step_s <= rank.step.high and rank.step.n > 3
        assert rank.steps == 3 * 60 - 3


def test_preparation_by_parts(seen):
    loading = seen.ranks[0].loading
    assert isinstance(loading, Loading)
    assert loading.parts["read"].wall == pytest.approx(0.5, rel=0.05)
    assert loading.parts["read"].cpu == pytest.approx(0.01, rel=0.05)
    assert loading.parts["transform:Own"].blocked == pytest.approx(0.1, rel=0.05)
    assert loading.wall == pytest.approx(0.766, rel=0.03) and loading.parts["read"].calls == 16
    assert loading.bytes == 16 * 150_000
    # Ordinary parts are always on a core; the one that waits for something else does not count as queueing.
    assert loading.stretch == pytest.approx(1.0, abs=0.01)


def test_what_the_sampler_said(seen):
    rank = seen.ranks[1]
    assert known(rank.throttled) == pytest.approx(0.25, rel=0.1)
    assert known(rank.queued) == pytest.approx(0.1) and known(rank.waiting) == 0.5
    assert known(rank.pressure["cpu"]) == 0.0
    assert rank.gpu == Unknown("this process uses no GPU")
    assert reason(rank.blocked) == "not readable on this machine"


def test_an_epoch_by_its_parts(seen):
    epoch = seen.epoch
    assert epoch.counted == 3 and epoch.steps == 60
    assert epoch.validation == pytest.approx(0.81, abs=0.01) and epoch.checkpoint == pytest.approx(1.5)
    assert known(epoch.waited) == 1.0
    assert epoch.total == pytest.approx(60 * seen.ranks[0].step_s + 0.81 + 1.5 + 0.01, rel=0.01)
    assert seen.share(seen.ranks[0].step_s) == pytest.approx(epoch.in_steps / epoch.total)


def test_one_stall_in_few_epochs_is_no_rule_and_a_rare_one_in_many_is_a_cost():
    assert typical([0.5, 2.4]) == 0.5 and typical([9.0, 0.5, 0.6]) == 0.6 and typical([]) == 0.0
    assert typical([2.0, 0.5, 2.2]) == 2.0
    assert typical([0.0] * 8 + [10.0] * 2) == 2.0


def test_prepared_and_profiled_steps_are_kept_apart(tmp_path):
    run = simulate(Training(), tmp_path / "out")
    lines, windows = [], 0
    for line in run.ranks[0]:
        line = dict(line)
        if line["kind"] == "window" and not line["warmup"]:
            windows += 1
            if windows % 3:
                line |= {"input": "prepared"} if windows % 2 else {"profiled": True}
                line["seconds"] = {k: 10 * v for k, v in line["seconds"].items()}
        lines.append(line)
    rank = observe(Run("x", {0: lines})).ranks[0]
    assert rank.step_s == pytest.approx(0.387, rel=0.03)


def test_readings_of_a_gpu_are_averaged_and_unknown_stays_unknown(tmp_path):
    samples = [
        {"gpu_util": 0.8, "gpu_sm_mhz": 1500, "gpu_throttle": ["sw_thermal_slowdown", "gpu_idle"]},
        {"gpu_util": None, "gpu_sm_mhz": 1900, "gpu_throttle": ["gpu_idle"]},
        {"gpu_util": 0.4, "gpu_sm_mhz": None, "gpu_throttle": None},
    ]  # fmt: skip
    told = {**DEVICE, "unknown": {"gpu_power_w": "not supported"}}
    gpu = observe(simulate(GPU.but(sample={}, samples=samples, gpu=told), tmp_path / "out")).ranks[0].gpu
    assert known(gpu.util) == pytest.approx(0.6, abs=0.05)
    assert gpu.power == Unknown("not supported")
    # Idle clocks are no slowing down; samples without reasons count on neither side.
    assert gpu.slowed == {"sw_thermal_slowdown": pytest.approx(0.5, abs=0.03)}
    assert known(gpu.clock_slowed) == 1500 and known(gpu.clock) == 1900 and known(gpu.top_clock) == 1900


def test_a_counter_that_starts_again_gives_no_negative_rate(tmp_path):
    run = simulate(Training(throttled=0.2), tmp_path / "out")
    lines = [dict(line) for line in run.ranks[0]]
    for line in lines[len(lines) // 2 :]:
        if line["kind"] == "sample":
            line["throttled_s"] = line["throttled_s"] / 100
    assert known(observe(Run("x", {0: lines})).ranks[0].throttled) == pytest.approx(0.1, abs=0.03)


def test_many_stretches_are_put_together_without_loss(tmp_path):
    one = steady_steps(simulate(Training(workers=2, steps=200), tmp_path / "out"), 0)
    many = one.stretches * 100
    few = merged(many)
    assert len(few) <= MOST < len(many)
    for total in (lambda s: s.steps, lambda s: s.total, lambda s: s.batches, lambda s: s.parts["decode"][0],
                  lambda s: len(s.each), lambda s: s.images):  # fmt: skip
        assert sum(map(total, few)) == pytest.approx(sum(map(total, many)))


def test_a_mean_of_nothing_is_unknown():
    assert mean([None, None], "why") == Unknown("why")
    found = mean([1.0, None, 3.0], "", [1.0, 5.0, 3.0])
    assert found == Value(2.5, 2, pytest.approx(1.1), pytest.approx(2.9))


def test_what_a_profile_window_takes_to_start_and_stop_is_no_time_of_the_epoch(tmp_path):
    """Writing a trace may take longer than all steps of a short run, and would make every cause look small."""
    run = simulate(Training(epochs=1), tmp_path / "out")
    lines = []
    for line in run.ranks[0]:
        if line["kind"] == "phases":
            lines.append({**line, "kind": "profile", "steps": 5, "apart_s": 40.0})
            line = {**line, "seconds": {**line["seconds"], "other": line["seconds"]["other"] + 40.0}}
        lines.append(line)
    usual, profiled = observe(run).epoch, observe(Run("x", {0: lines})).epoch
    assert profiled.total == pytest.approx(usual.total, abs=1e-6)
