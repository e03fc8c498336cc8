"""What an epoch would take: on timelines whose arithmetic can be done by hand."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kfp_gate.diagnosis.pacing.counterfactual import estimate, phase_shares, scenarios
from kfp_gate.diagnosis.reading.runs import Run

from .recorded import recorded


def conditions(**more):
    return {
        "kind": "conditions", "workers": 0, "prefetch": None, "steps_per_epoch": 100, "device": "cpu", "cpus": 8,
        "cpu_quota": None, **more,
    }  # fmt: skip


def epoch(number=1, steps=100, device=None, **seconds):
    return {"kind": "phases", "epoch": number, "steps": steps, "seconds": seconds, "device": device}


def window(seconds, steps=20, **more):
    """`seconds` a step by phase; `parts` seconds a batch of one process."""
    parts = more.pop("parts", None)
    if parts is not None:
        sums = {n: [w * steps, c * steps, steps] for n, (w, c) in parts.items()}
        more["loader"] = {"batches": steps, "parts": sums, "bytes": 0, "ready": None}
    return {
        "kind": "window", "epoch": 1, "batches": [0, steps - 1], "steps": steps, "images": 4 * steps, "warmup": False,
        "input": "usual", "profiled": False, "device": None,
        "seconds": {k: v and v * steps for k, v in seconds.items()}, **more,
    }  # fmt: skip


def made(*lines, more_ranks=()):
    return Run("runs/here", {i: [{"kind": "start"}, *own] for i, own in enumerate([lines, *more_ranks])})


def rows(run):
    return {s.change: s for s in estimate(run).scenarios}


def test_the_table_of_sixty_twenty_twenty():
    run = made(conditions(), epoch(data=60.0, forward=8.0, loss=2.0, backward=10.0, validation=15.0, other=5.0))
    now, found = scenarios(run)
    table = {s.change: s.seconds for s in found}
    assert now == pytest.approx(100.0, abs=1e-9)
    assert table["preparation halved"] == pytest.approx(70.0, abs=1e-9)
    assert table["device compute halved"] == pytest.approx(90.0, abs=1e-9)
    assert table["preparation free"] == pytest.approx(40.0, abs=1e-9)
    assert table["validation halved"] == pytest.approx(92.5, abs=1e-9)
    # One epoch has no spread, and says so instead of a narrow interval.
    assert all("spread unknown" in s.note for s in found)


def test_without_loader_processes_reads_and_the_heaviest_part_come_off_the_step():
    parts = {"read": (0.1, 0.0), "open": (0.02, 0.0), "transform:Cones": (0.4, 0.4), "other": (0.08, 0.08)}
    run = made(conditions(), *[window({"data": 0.6, "forward": 0.4}, parts=parts)] * 3, epoch(validation=10.0))
    table = rows(run)
    assert estimate(run).epoch_s == pytest.approx(110.0)
    assert table["reads free"].seconds == pytest.approx(98.0)
    assert table["transform:Cones halved"].seconds == pytest.approx(90.0)


@pytest.mark.parametrize("parts", [{"read": (0.03, 0.0), "transform:Slow": (0.17, 0.17)}, None])
def test_a_starved_run_gets_nothing_from_a_faster_device(parts):
    # Two workers need 200 ms a batch each, so a batch every 100 ms; the rest of the step takes 40 ms.
    run = made(
        conditions(workers=2, prefetch=2), *[window({"data": 0.06, "forward": 0.04}, parts=parts)] * 5,
        epoch(validation=0.0), {"kind": "sample", "phase": "train", "cpu": 0.5},
    )  # fmt: skip
    table = rows(run)
    assert table["device compute halved"].seconds == pytest.approx(10.0, rel=0.01)
    assert table["preparation halved"].seconds == pytest.approx(5.0, rel=0.03)
    assert table["preparation free"].seconds == pytest.approx(4.0, rel=0.01)
    assert "sets the pace" in table["preparation halved"].note
    if parts:
        # 2 x 2 workers make a batch every 50 ms.
        assert table["twice the loader workers"].seconds == pytest.approx(5.0, rel=0.03)
        assert table["transform:Slow halved"].seconds == pytest.approx(5.75, rel=0.03)
    else:
        assert "twice the loader workers" not in table
        assert any("twice the loader workers" in u for u in estimate(run).unknown)


def test_a_run_that_is_fed_gets_nothing_from_faster_loading():
    parts = {"read": (0.01, 0.0), "transform:Slow": (0.07, 0.07)}
    run = made(
        conditions(workers=2, prefetch=2), *[window({"data": 0.001, "forward": 0.1}, parts=parts)] * 5,
        epoch(validation=1.0), {"kind": "sample", "phase": "train", "cpu": 1.0},
    )  # fmt: skip
    table = rows(run)
    now = estimate(run).epoch_s
    for change in ("preparation halved", "preparation free", "reads free", "twice the loader workers"):
        assert table[change].seconds == pytest.approx(now)
    # Halved it stays above the loader's 40 ms a batch; free it does not.
    assert table["device compute halved"].seconds == pytest.approx(1 + 5.1, rel=0.02)
    assert table["device compute free"].seconds == pytest.approx(1 + 4.0, rel=0.05)
    unknown = made(conditions(workers=2), *[window({"data": 0.001, "forward": 0.1})] * 5, epoch(validation=0.0))
    assert "device compute halved" not in rows(unknown)
    assert any("how much faster it could go was not recorded" in u for u in estimate(unknown).unknown)


def test_more_workers_give_no_more_than_the_cores():
    parts = {"transform:Slow": (0.2, 0.2)}
    lines = [window({"data": 0.06, "forward": 0.04}, parts=parts)] * 5
    sample = {"kind": "sample", "phase": "train", "cpu": 0.0}
    on = {n: rows(made(conditions(workers=2, prefetch=2, cpus=n), *lines, epoch(), sample)) for n in (2, 3, 8)}
    # 0.2 s of CPU a batch: 0.1 s on two cores, 0.067 on three, and 0.05 where four workers have a core each.
    assert on[2]["twice the loader workers"].seconds == pytest.approx(10.0, rel=0.01)
    assert on[3]["twice the loader workers"].seconds == pytest.approx(6.67, rel=0.01)
    assert on[8]["twice the loader workers"].seconds == pytest.approx(5.0, rel=0.03)
    quota = made(conditions(workers=2, prefetch=2, cpu_quota=2.0), *lines, epoch(), sample)
    assert rows(quota)["twice the loader workers"].seconds == pytest.approx(10.0, rel=0.01)
    crowded = made(conditions(workers=2, prefetch=2), *lines, epoch(), {**sample, "pressure_cpu": 0.6})
    assert any("something else uses them" in u for u in estimate(crowded).unknown)


def test_a_queue_that_is_full_at_the_start_is_not_taken_for_speed():
    # Ten steps an epoch: four batches lie ready after validation, and only the other six are waited for.
    parts = {"transform:Slow": (0.2, 0.0)}
    run = made(
        conditions(workers=2, prefetch=2, steps_per_epoch=10),
        *[window({"data": 0.03, "forward": 0.04}, steps=10, parts=parts)] * 4,
        *[epoch(i, 10, validation=5.0) for i in (1, 2)], {"kind": "sample", "phase": "train", "cpu": 0.1},
    )  # fmt: skip
    found = estimate(run)
    assert found.epoch_s == pytest.approx(5.7)
    halved = {s.change: s for s in found.scenarios}["preparation halved"].seconds
    assert 5.39 <= halved < 5.6


def test_on_a_gpu_the_host_only_queues():
    host = {"data": 0.01, "transfer": 0.001, "forward": 0.01, "loss": 0.004, "backward": 0.01, "optimizer": 0.065}
    device = {"data": 0.5, "transfer": 1.0, "forward": 3.0, "loss": 0.5, "backward": 4.0, "optimizer": 1.0}
    gpu = conditions(workers=4, prefetch=4, device="cuda:0")
    parts = {"decode": (0.1, 0.1)}
    sample = {"kind": "sample", "phase": "train", "cpu": 1.0}
    known = made(gpu, *[window(host, device=device, parts=parts)] * 5, epoch(), sample)
    table = rows(known)
    assert estimate(known).epoch_s == pytest.approx(10.0)
    # 75 of 100 ms, of which the host needs 24 ms to queue it, and 4 of the 5 ms of the loss.
    assert table["device compute halved"].seconds == pytest.approx(10.0 - 3.6, rel=0.02)
    assert table["device compute free"].seconds == pytest.approx(10.0 - 7.5 + 2.4, rel=0.05)
    assert {p.name: round(p.share, 3) for p in phase_shares(known)} == {
        "data": 0.05, "transfer": 0.1, "forward": 0.3, "loss": 0.05, "backward": 0.4, "optimizer": 0.1
    }  # fmt: skip
    # A loss in which the host waits for its results stays; forward and backward still shrink.
    waits = {**host, "loss": 0.02, "optimizer": 0.049}
    device = {**device, "loss": 2.0, "backward": 2.5}
    found = rows(made(gpu, *[window(waits, device=device, parts=parts)] * 5, epoch(), sample))
    assert found["device compute halved"].seconds == pytest.approx(10.0 - 2.75, rel=0.02)
    unknown = made(gpu, *[window(host, parts=parts)] * 5, epoch(), sample)
    assert not [c for c in rows(unknown) if "device" in c or "transfer" in c or "optimizer" in c]
    assert any("no device clock" in u for u in estimate(unknown).unknown)


def test_a_host_as_slow_as_its_gpu_is_judged_by_a_profile_or_not_at_all():
    host = {"data": 0.0, "forward": 0.04, "backward": 0.04, "optimizer": 0.02}
    device = {"data": 0.0, "forward": 4.0, "backward": 4.0, "optimizer": 2.0}
    lines = [conditions(device="cuda:0"), *[window(host, device=device)] * 5, epoch()]
    assert any("a profile window tells" in u for u in estimate(made(*lines)).unknown)
    busy = {"kind": "profile", "steps": 10, "device_busy_s": 0.97}
    assert rows(made(*lines, busy))["device compute halved"].seconds == pytest.approx(6.0)
    idle = {"kind": "profile", "steps": 10, "device_busy_s": 0.3}
    assert rows(made(*lines, idle))["device compute halved"].seconds == pytest.approx(10.0)


def test_ranks_as_fast_as_the_fastest():
    def rank(data, backward):
        return [conditions(), *[window({"data": data, "forward": 0.1, "backward": backward})] * 4, epoch()]

    # Rank 1 prepares 300 ms longer, and rank 0 waits for it in its backward.
    run = made(*rank(0.1, 0.5), more_ranks=[rank(0.4, 0.2)])
    found = estimate(run)
    assert found.epoch_s == pytest.approx(70.0)
    table = rows(run)
    assert table["all 2 ranks as fast as the fastest"].seconds == pytest.approx(40.0)
    # Half of 400 ms on rank 1 and of 100 ms on rank 0: rank 1 stays the slower.
    assert table["preparation halved"].seconds == pytest.approx(50.0)


def test_a_rank_that_waits_for_rank_0_in_forward_is_not_the_slow_one():
    first = [conditions(), *[window({"data": 0.4, "forward": 0.1, "backward": 0.2})] * 4, epoch()]
    second = [conditions(), *[window({"data": 0.1, "forward": 0.4, "backward": 0.2})] * 4]
    table = rows(made(*first, more_ranks=[second]))
    assert table["all 2 ranks as fast as the fastest"].seconds == pytest.approx(40.0)


def test_what_is_unknown_has_no_row():
    assert estimate(Run("nothing", {})).unknown == ("no steps after the warm-up were recorded",)
    assert phase_shares(Run("nothing", {0: []})) == ()
    no_count = made(window({"data": 1.0, "forward": 1.0}))
    assert estimate(no_count).epoch_s is None
    old = made(epoch(data=50.0, forward=50.0, validation=10.0))
    found = estimate(old)
    # A timeline without conditions: validation can go, but whether preparation overlaps is not known.
    assert found.epoch_s == pytest.approx(110.0)
    assert [s.change for s in found.scenarios] == ["validation halved", "validation free"]
    assert any("not known whether loader processes ran" in u for u in found.unknown)
    running = made(conditions(), *[window({"data": 0.5, "forward": 0.5})] * 2)
    assert estimate(running).steps_only
    null = made(
        conditions(), window({"data": None, "forward": 0.5}), *[window({"data": 0.5, "forward": 0.5})] * 4, epoch()
    )
    assert estimate(null).epoch_s == pytest.approx(100.0)


def test_only_the_steady_steps_of_the_last_attempt_count():
    usual = {"data": 0.1, "forward": 0.1}
    odd = [
        window({"data": 9.0, "forward": 9.0}, warmup=True), window({"data": 0.0, "forward": 9.0}, input="prepared"),
        window({"data": 9.0, "forward": 9.0}, profiled=True),
    ]  # fmt: skip
    lines = [
        {"kind": "start"}, conditions(), window({"data": 5.0, "forward": 5.0}), {"kind": "start"}, conditions(), *odd,
        window(usual), window(usual), epoch(data=10.0, forward=10.0),
    ]  # fmt: skip
    assert estimate(Run("here", {0: lines})).epoch_s == pytest.approx(20.0)
    assert sum(p.seconds for p in phase_shares(Run("here", {0: lines}))) == pytest.approx(0.2)


def test_intervals_widen_with_the_spread_and_hold_the_point():
    def run(spread):
        draw = random.Random(4)
        lines = [window({"data": 0.1 * (1 + spread * draw.uniform(-1, 1)), "forward": 0.1}) for _ in range(12)]
        return made(conditions(), *lines, epoch())

    calm, wild = (rows(run(s))["device compute halved"] for s in (0.02, 0.5))
    assert calm.low <= calm.seconds <= calm.high
    assert wild.high - wild.low > 5 * (calm.high - calm.low)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    """Eight stretches of uneven preparation (mean 100 ms, a third of spread) beside 100 ms: halved 150 ms a step."""
    held, runs = 0, 80
    for number in range(runs):
        draw = random.Random(number)
        lines = [window({"data": 0.1 * draw.lognormvariate(-0.045, 0.3), "forward": 0.1}) for _ in range(8)]
        halved = rows(made(conditions(), *lines, epoch(steps=1)))["preparation halved"]
        held += halved.low <= 15.0 <= halved.high
    assert 0.8 <= held / runs <= 0.99


@pytest.mark.parametrize("kind", [{}, {"gpu": False}, {"older": True}, {"ranks": 1}, {"epochs": 1, "ended": False}])
def test_any_run_gives_rows_that_hold_together(kind):
    check_bounds(recorded(**kind))


@settings(max_examples=60, deadline=None)
@given(
    workers=st.integers(0, 5), prefetch=st.integers(1, 4), steps=st.integers(1, 60), wait=st.floats(0, 0.3),
    rest=st.floats(0.001, 0.3), production=st.one_of(st.none(), st.floats(0.001, 1.5)), idle=st.floats(0, 5),
    cores=st.sampled_from([None, 1, 16]), seed=st.integers(0, 99),
)  # fmt: skip
def test_removing_work_never_costs_time(workers, prefetch, steps, wait, rest, production, idle, cores, seed):
    draw = random.Random(seed)
    parts = (
        {"read": (production * 0.3, 0.0), "transform:T": (production * 0.7, production * 0.5)} if production else None
    )
    lines = []
    for _ in range(4):
        each = [[wait, wait + rest * draw.uniform(0.5, 1.5)] for _ in range(8)]
        lines.append(
            window({"data": wait, "forward": rest / 2, "optimizer": rest / 2}, steps=8, parts=parts, each=each)
        )
    run = made(
        conditions(workers=workers, prefetch=prefetch, steps_per_epoch=steps, cpus=cores), *lines,
        epoch(1, steps, validation=idle), {"kind": "sample", "phase": "train", "cpu": 0.7},
    )  # fmt: skip
    check_bounds(run)


def check_bounds(run):
    found = estimate(run)
    now = found.epoch_s
    assert now is not None
    table = {s.change: s for s in found.scenarios}
    assert len(table) == len(found.scenarios)
    for name, one in table.items():
        assert math.isfinite(one.seconds) and one.low <= one.seconds <= one.high
        if name != "two loader workers in place of none":
            assert one.seconds <= now * (1 + 1e-5), name
        if name.endswith(" free") and name.replace(" free", " halved") in table:
            assert one.seconds <= table[name.replace(" free", " halved")].seconds * (1 + 1e-9), name
    for part in set(table) - {"preparation free", "preparation halved"}:
        if part.startswith(("reads", "transform:")):
            whole = "preparation free" if part.endswith("free") else "preparation halved"
            assert table[whole].seconds <= table[part].seconds * (1 + 1e-9)
    shares = phase_shares(run)
    assert sum(p.share for p in shares) == pytest.approx(1.0)
