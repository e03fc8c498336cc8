"""Every cause, planted in a simulated training and read back as a run: it is named first, and nothing is in health."""

import json
from datetime import UTC, datetime, timedelta

import pytest
from observing import replay

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import BAR, CAUSES, Finding, Unjudged
from kfp_gate.diagnosis.reading.runs import Run, read_run

from .simulated import PARTS, Training, simulate, write

ON_DEVICE = {"transfer": 0.004, "forward": 0.05, "loss": 0.01, "backward": 0.12, "optimizer": 0.01}
QUEUEING = {"transfer": 0.002, "forward": 0.03, "loss": 0.01, "backward": 0.04, "optimizer": 0.112}
"""On the host of a GPU run: most of its time it waits for the device, in the optimizer's step."""

READINGS = {"gpu_util": 0.97, "gpu_sm_mhz": 1900, "gpu_power_w": 500, "gpu_throttle": [], "gpu_memory_used": 1 << 30,
            "gpu_memory_total": 1 << 36}  # fmt: skip
DEVICE = {"uuid": "GPU-1", "name": "NVIDIA H200", "mig": False, "driver": "575", "unknown": {}}

CPU = Training(parts={k: (w / 3, c / 3) for k, (w, c) in PARTS.items()})
WORKERS = Training(workers=2)
GPU = Training(
    device=ON_DEVICE, workers=4, step=QUEUEING, gpu=DEVICE, main_cpu=0.5, sample=READINGS, cores=16
)  # fmt: skip
LAUNCHES = {"transfer": 0.002, "forward": 0.05, "loss": 0.02, "backward": 0.12, "optimizer": 0.01}
HEAVY = {k: (w * 8, c * 8) for k, (w, c) in PARTS.items()}

HEALTHY = {
    "cpu": CPU,
    "cpu with workers": WORKERS,
    "cpu, ranks": CPU.but(ranks=2),
    "gpu": GPU,
    "gpu, expensive preparation that keeps up": GPU.but(workers=12, parts=HEAVY),
    "gpu, host waits where the device does not": GPU.but(device={**ON_DEVICE, "backward": 0.19}, workers=1).but(
        parts={k: (w * 3.05, c * 3.05) for k, (w, c) in PARTS.items()}
    ),
    "gpu, ranks": GPU.but(ranks=4),
    "gpu at its power limit but for moments": GPU.but(samples=[
        *[{"gpu_throttle": ["sw_power_cap"], "gpu_sm_mhz": 1500}] * 11, {"gpu_throttle": [], "gpu_sm_mhz": 2040},
    ]),
    "gpu at its power limit": GPU.but(sample={**READINGS, "gpu_throttle": ["sw_power_cap"], "gpu_sm_mhz": 1830}),
    "crowded by others": WORKERS.but(cores=2, stretch=2.5, queued=0.6, loaders_queued=0.6),
}  # fmt: skip

PLANTED = {
    "slow reads, workers": ("slow_reads", WORKERS.but(waiting=0.5).with_parts(read=(1.2, 0.01))),
    "slow reads, none": ("slow_reads", CPU.with_parts(read=(0.5, 0.01))),
    "slow reads, not in state D": ("slow_reads", WORKERS.with_parts(read=(1.2, 0.01))),
    "slow reads, crowded by others": ("slow_reads", WORKERS.but(stretch=2.0, queued=0.5, loaders_queued=0.1, cores=4)
                                      .with_parts(read=(2.4, 0.01))),
    "small files": ("small_files", WORKERS.but(file_bytes=20_000).with_parts(open=(1.0, 0.02))),
    "a loop in a transform": ("preparation_cpu", WORKERS.with_parts(transform_TargetMaps=(1.0, 1.0))),
    "a loop, no workers": ("preparation_cpu", CPU.with_parts(transform_TargetMaps=(1.0, 1.0))),
    "a loop, cores full": ("preparation_cpu", WORKERS.but(cores=3).with_parts(transform_TargetMaps=(1.0, 1.0))),
    "a loop, gpu": ("preparation_cpu", GPU.but(workers=2).with_parts(transform_TargetMaps=(1.0, 1.0))),
    "a transform that waits": ("preparation_cpu", WORKERS.with_parts(transform_Lookup=(1.0, 0.01))),
    "all of preparation, cores full": ("preparation_cpu", GPU.but(workers=2, cores=3, parts=HEAVY)),
    "all of preparation, one core left": ("preparation_cpu", GPU.but(workers=4, cores=6, parts={
        k: (w * 30, c * 30) for k, (w, c) in PARTS.items()
    })),
    "one worker": ("too_few_workers", GPU.but(workers=1, parts=HEAVY)),
    "no worker": ("too_few_workers", GPU.but(workers=0)),
    "quota, no workers": ("cpu_quota", CPU.but(quota=0.5, throttled=0.5, stretch=2.0)),
    "quota, workers": ("cpu_quota", WORKERS.but(quota=1.0, throttled=1.2, stretch=2.0)),
    "transfer": ("transfer", GPU.but(device={**ON_DEVICE, "transfer": 0.08}, step={**QUEUEING, "transfer": 0.08},
                                     pinned=False)),
    "small kernels": ("kernel_launch", GPU.but(device=LAUNCHES, step=LAUNCHES, main_cpu=1.0,
                                               sample={**READINGS, "gpu_util": 0.3})),
    "a slow rank": ("rank_imbalance", CPU.but(ranks=3, rank_step={1: {"forward": 0.4}})),
    "a rank with a slow disk": ("rank_imbalance", WORKERS.but(ranks=2, rank_parts={1: {"read": (1.2, 0.01)}})),
    "a rank with a slow disk, gpu": ("rank_imbalance", GPU.but(ranks=4, rank_parts={2: {"read": (1.6, 0.01)}})),
    "a loop, all ranks": ("preparation_cpu", WORKERS.but(ranks=4).with_parts(transform_TargetMaps=(1.0, 1.0))),
    "slow reads, all ranks, gpu": ("slow_reads", GPU.but(ranks=4).with_parts(read=(1.6, 0.01))),
    "a slow disk for checkpoints": ("checkpoint_stall", CPU.but(checkpoint=6.0)),
    "a slow store": ("upload_stall", CPU.but(waited=6.0, upload=30.0)),
    "a large val set": ("validation", CPU.but(val_images=1500, validation={"load": 2.0, "forward": 9.0})),
    "slow suppression": ("validation", CPU.but(validation={"load": 0.2, "forward": 0.6, "suppress": 5.0})),
    "not finite": ("discarded_work", CPU.but(redo=(2, 3))),
    "preempted": ("discarded_work", CPU.but(died=(2, 50))),
    "heat": ("gpu_throttling", GPU.but(samples=[
        *[{"gpu_throttle": ["sw_thermal_slowdown"], "gpu_sm_mhz": 1100}] * 9, {"gpu_throttle": [], "gpu_sm_mhz": 1900},
    ])),
}  # fmt: skip


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    def make(training: Training) -> Run:
        return simulate(training, tmp_path_factory.mktemp("run") / "out")

    return make


@pytest.mark.parametrize("name", PLANTED)
def test_the_planted_cause_is_named_first(read, name):
    cause, training = PLANTED[name]
    found = diagnose(read(training))
    assert [f.cause for f in found.findings][:1] == [cause], found.answer
    assert found.state == "cause" and found.findings[0].weight >= BAR
    check_whole(found)


@pytest.mark.parametrize("name", HEALTHY)
def test_no_cause_is_named_in_a_healthy_run(read, name):
    found = diagnose(read(HEALTHY[name]))
    assert (found.state, found.findings) == ("no_cause", ()), found.answer
    assert found.answer.startswith("Nothing holds this run back")
    check_whole(found)


def check_whole(found):
    """What holds for every answer: each cause judged once, ranked, with what to do next and what would refute it."""
    judged = [*found.findings, *found.minor, *found.unjudged]
    assert sorted(j.cause for j in judged) == sorted(CAUSES)
    weights = [f.weight for f in found.findings]
    assert weights == sorted(weights, reverse=True) and all(w >= BAR for w in weights)
    for finding in (*found.findings, *found.minor):
        assert 0 <= finding.weight <= 1 and finding.title and finding.next_check and finding.refuted_by
        assert finding.evidence or finding.against or finding.missing
    for finding in found.findings:
        assert finding.evidence and finding.detail["advice"]
        # The number in its title is the one that it is ranked by.
    for unjudged in found.unjudged:
        assert unjudged.missing and all(unjudged.missing)
    json.loads(found.to_json())


def judged(found, cause):
    return next(j for j in (*found.findings, *found.minor, *found.unjudged) if j.cause == cause)


def test_the_part_and_the_number_of_workers_are_named(read):
    found = diagnose(read(PLANTED["a loop in a transform"][1]))
    assert "transform TargetMaps takes 94% of the preparation" in found.answer
    # 1.07 s of preparation beside a step of 0.33 s: four processes keep up, and there are cores for them.
    assert "try workers=4" in found.answer
    full = diagnose(read(PLANTED["a loop, cores full"][1]))
    assert "no free core" in full.answer


def test_the_proposed_number_of_workers_is_enough(read):
    training = PLANTED["one worker"][1]
    wanted = judged(diagnose(read(training)), "too_few_workers").detail["wanted"]
    after = diagnose(read(training.but(workers=wanted)))
    assert after.state == "no_cause", after.answer
    assert diagnose(read(training.but(workers=wanted - 1))).state == "cause"


def test_ranks_of_one_node_share_its_idle_cores(read):
    """Four ranks with one loader process each on ten cores: a fifth of a core a rank is no room for one more."""
    crowded = WORKERS.but(workers=1, ranks=4, cores=10).with_parts(decode=(0.6, 0.6))
    runs = []
    for local in (1, 4):
        run = read(crowded)
        for lines in run.ranks.values():
            for line in lines:
                line["node"] = "one node" if local == 4 else line["node"]
                if line["kind"] == "start":
                    line["ranks"]["local_world_size"] = local
        runs.append(diagnose(run))
    assert "try workers=" in judged(runs[0], "preparation_cpu").detail["advice"]
    assert "no free core" in judged(runs[1], "preparation_cpu").detail["advice"]


def test_fixing_what_is_named_shows_the_next_cause_and_then_health(read):
    """A loop over points builds target maps; ten times faster the run still starves, for its reads."""
    slow = GPU.but(workers=2).with_parts(transform_TargetMaps=(1.0, 1.0), read=(0.6, 0.01))
    between = slow.with_parts(transform_TargetMaps=(0.1, 0.1))
    after = between.with_parts(read=(0.01, 0.01))
    answers = [diagnose(read(t)) for t in (slow, between, after)]
    assert [[f.cause for f in a.findings][:1] for a in answers] == [["preparation_cpu"], ["slow_reads"], []]


def test_advice_is_what_can_be_done(read):
    """Fewer val images cost as much where the weights are what takes long; 8-bit images need not become 8-bit ones."""
    fixed = judged(diagnose(read(CPU.but(validation={"weights": 6.0, "forward": 0.6}))), "validation")
    assert "more steps" in fixed.detail["advice"] and "nearly as long" in fixed.next_check
    assert fixed.refuted_by == "a validation that takes half as long with half of the images"
    slow = {**ON_DEVICE, "transfer": 0.08}
    for pinned, images, words in (
        (False, 16, "Pin the batches"), (True, 16, "moved as 8 bits already"), (True, 4, "Move 8-bit images"),
    ):  # fmt: skip
        run = read(GPU.but(device=slow, step={**QUEUEING, "transfer": 0.08}, pinned=pinned))
        for line in run.lines("conditions"):
            # The bytes stay: with a quarter of the images they are those of floats.
            line["rank_batch"] = images
        assert words in judged(diagnose(run), "transfer").detail["advice"]


def test_a_wait_that_the_device_does_not_feel_explains_nothing(read):
    """The host waits for images a third of its time, while the device still computes what was queued."""
    step = {"transfer": 0.002, "forward": 0.03, "loss": 0.01, "backward": 0.04, "optimizer": 0.01}
    training = GPU.but(step=step, workers=1, device={**ON_DEVICE, "backward": 0.106}, parts={
        k: (w * 3, c * 3) for k, (w, c) in PARTS.items()
    })  # fmt: skip
    run = read(training)
    host = next(run.lines("window"))["seconds"]
    assert host["data"] > 0.3 * sum(host.values())
    found = diagnose(run)
    assert found.state == "no_cause", found.answer


def test_who_waits_for_whom_and_why(read):
    found = judged(diagnose(read(PLANTED["a rank with a slow disk"][1])), "rank_imbalance")
    assert found.detail["slow_rank"] == 1 and found.detail["waiting"] == [0] and found.detail["phase"] == "data"
    # The shared part of loading is judged by a rank that is not the slow one.
    assert judged(diagnose(read(PLANTED["a rank with a slow disk"][1])), "slow_reads").weight < BAR


def test_ranks_that_are_all_starved_do_not_blame_the_one_that_is_last(read):
    """Loaders that are equally slow: whoever is last by chance stays it, and the others hardly wait for images."""
    for seed in range(3):
        found = diagnose(read(PLANTED["a loop, all ranks"][1].but(seed=seed)))
        assert found.findings[0].cause == "preparation_cpu" and found.findings[0].weight > 0.15
        assert judged(found, "rank_imbalance").weight < BAR
        evened = next(s for s in found.scenarios if s.change.startswith("all 4 ranks as fast"))
        assert evened.seconds > 0.9 * found.epoch_s


def test_a_host_that_gets_ahead_while_it_waits_is_no_faster(read):
    """Two ranks that launch equally slowly: the one that waits in backward has its next forward queued by then."""
    queued = {**LAUNCHES, "forward": 0.05}
    run = read(GPU.but(ranks=2, device=queued, step=queued, main_cpu=1.0))
    for line in run.lines("window", 1):
        hidden = 0.035 * line["steps"]
        line["device"]["forward"] -= hidden
        line["device"]["backward"] += hidden
    assert judged(diagnose(run), "rank_imbalance").weight < 0.05


def test_a_probe_and_a_cold_cache_are_weighed(read):
    slow = WORKERS.with_parts(read=(1.2, 0.01))
    for prepared, side in ((0.33, "evidence"), (0.52, "against")):
        probes = [
            {"kind": "probe", "part": part, "steps": 20, "step_s": s, "low": s - 0.02, "high": s + 0.02}
            for part, s in (("usual", 0.53), ("prepared", prepared))
        ]
        found = judged(diagnose(read(slow.but(extra=probes))), "slow_reads")
        assert any("images held in memory" in text for text in getattr(found, side))
    run = read(CPU.with_parts(read=(0.5, 0.01)))
    for line in run.lines("window"):
        if line["epoch"] > 1:
            line["loader"]["parts"]["read"][0] /= 50
    assert any("memory holds it now" in text for text in judged(diagnose(run), "slow_reads").against)


def test_a_busy_host_without_utilisation_is_no_health(read):
    """The device's clock has the gaps between small kernels inside; a host that has time left rules them out."""
    blind = GPU.but(sample={"gpu_util": None, "gpu_power_w": 300}, gpu={**DEVICE, "unknown": {"gpu_util": "MIG"}})
    found = diagnose(read(blind.but(device=LAUNCHES, step=LAUNCHES, main_cpu=1.0)))
    assert found.state == "not_enough" and "utilisation of the GPU: MIG" in found.answer
    assert diagnose(read(blind)).state == "no_cause"


@pytest.mark.parametrize("util", [0.9, 1.0])
def test_utilisation_alone_does_not_rule_out_small_kernels(read, util):
    """NVML counts any kernel in its period: small ones with gaps give 100%. A profile window tells."""
    launching = GPU.but(device=LAUNCHES, step=LAUNCHES, main_cpu=1.0, sample={**READINGS, "gpu_util": util})
    found = diagnose(read(launching))
    assert found.state == "not_enough" and "profile window" in found.answer, found.answer
    window = {"kind": "profile", "steps": 5, "step_s": 0.3, "around_s": 0.2, "kernels": 15000}
    found = diagnose(read(launching.but(extra=[{**window, "device_busy_s": 0.3}])))
    assert found.findings[0].cause == "kernel_launch"
    assert diagnose(read(launching.but(extra=[{**window, "device_busy_s": 0.97}]))).state == "no_cause"


def test_a_host_that_is_far_ahead_rules_out_small_kernels_without_nvml(read):
    found = diagnose(read(GPU.but(sample={}, gpu=None, main_cpu=1.0)))
    assert judged(found, "kernel_launch").weight == 0.0 and found.state == "no_cause"


def test_heat_in_every_sample_is_measured_by_the_boards_clock_or_unknown(read):
    hot = GPU.but(sample={**READINGS, "gpu_throttle": ["sw_thermal_slowdown"], "gpu_sm_mhz": 1100})
    found = diagnose(read(hot))
    assert found.state == "not_enough" and "slowed down in every sample" in found.answer
    found = diagnose(read(hot.but(gpu={**DEVICE, "max_sm_mhz": 1980})))
    assert found.findings[0].cause == "gpu_throttling" and found.findings[0].weight > 0.3


@pytest.mark.parametrize("scale", [3.55, 3.6, 3.7, 3.8])
@pytest.mark.parametrize("cores", [2, 16])
def test_a_wait_just_above_the_bar_is_not_split_until_nothing_is_named(read, scale, cores):
    parts = {k: (w * scale, c * scale) for k, (w, c) in PARTS.items()}
    found = diagnose(read(GPU.but(workers=1, cores=cores, parts=parts)))
    assert found.state == "cause", found.answer
    assert found.findings[0].cause == ("too_few_workers" if cores == 16 else "preparation_cpu")


def test_waiting_for_others_is_no_computing(read):
    found = diagnose(read(PLANTED["a slow rank"][1]))
    assert judged(found, "device_busy").weight == pytest.approx(1 - found.findings[0].weight, abs=0.15)


def test_gaps_lost_lines_and_time_in_no_phase_are_said(read):
    run = read(CPU.but(step={**CPU.step, "other": 0.1}, stretch=1.0))
    lines = [dict(line) for line in run.ranks[0]]
    for line in lines[len(lines) // 2 :]:
        line["time"] = line["time"].replace("T09", "T12")
    lines[40]["lines_lost"] = 7
    lines[-1] = {**lines[-1], "kind": "failure", "phase": "train", "failure": "memory", "message": "killed\nmore"}
    found = diagnose(Run("x", {0: lines}))
    assert any(n.startswith("a gap in the timeline of rank 0, 3 h in all, the longest 3 h from 2026-11-30T09")
               for n in found.notes)  # fmt: skip
    assert "the run failed: rank 0 in phase 'train', memory: killed" in found.notes
    assert "7 lines of the timeline were lost, as on a full disk" in found.notes
    assert any("of a step is in none of its phases" in n for n in found.notes)


def test_causes_of_a_gpu_are_not_judged_without_one(read):
    found = diagnose(read(CPU))
    for cause in ("kernel_launch", "gpu_throttling"):
        assert judged(found, cause) == Unjudged(cause, ("this run used no GPU",))


@pytest.mark.parametrize("name", ["mig", "no_driver", "lost_mid_run"])
def test_what_nvml_does_not_tell_stays_unknown(read, tmp_path, name):
    recorded = [
        json.loads(line)
        for line in replay.write_timeline(name, tmp_path / "replayed.jsonl", samples=20).read_text().splitlines()
    ]
    readings = [
        {k: v for k, v in line.items() if k.startswith("gpu_") or k == "unknown"}
        for line in recorded if line["kind"] == "sample"
    ]  # fmt: skip
    told = next(({k: v for k, v in line.items() if k in ("uuid", "name", "mig", "driver", "unknown")}
                 for line in recorded if line["kind"] == "gpu"), None)  # fmt: skip
    # The host queues all the time: without utilisation nobody can say whether the device has gaps.
    found = diagnose(read(GPU.but(device=LAUNCHES, step=LAUNCHES, main_cpu=1.0, sample={}, samples=readings, gpu=told)))
    for cause in ("kernel_launch",) if name == "mig" else ("kernel_launch", "gpu_throttling"):
        verdict = judged(found, cause)
        if name == "lost_mid_run" and isinstance(verdict, Finding):
            continue
        assert isinstance(verdict, Unjudged), verdict
        assert any("utilisation" in m or "GPU" in m for m in verdict.missing)


def test_a_healthy_gpu_by_nvmls_own_answers(read, tmp_path):
    recorded = [
        json.loads(line)
        for line in replay.write_timeline("healthy", tmp_path / "replayed.jsonl", samples=20).read_text().splitlines()
    ]
    readings = [
        {k: v for k, v in line.items() if k.startswith("gpu_")} for line in recorded if line["kind"] == "sample"
    ]
    found = diagnose(read(GPU.but(sample={}, samples=readings)))
    assert isinstance(judged(found, "gpu_throttling"), Finding) and isinstance(judged(found, "kernel_launch"), Finding)
    assert found.state == "no_cause", found.answer


def test_a_run_that_still_goes_on_is_answered_from_what_there_is(tmp_path):
    folder = write(WORKERS.with_parts(read=(1.2, 0.01)), tmp_path / "out")
    path = folder / "rank0" / "timeline.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    steps = [i for i, line in enumerate(lines) if '"window"' in line]
    path.write_text("\n".join(lines[: steps[6]]) + "\n" + lines[steps[6]][:40], encoding="utf-8")
    found = diagnose(read_run(str(folder), tmp_path))
    assert found.running and found.findings[0].cause == "slow_reads"
    assert any("no epoch has ended" in n for n in found.notes)
    assert judged(found, "validation") == Unjudged("validation", ("no epoch has ended",))


def test_a_run_that_was_killed_is_not_taken_for_one_that_goes_on(read):
    lines = read(CPU.but(ended=False)).ranks[0]
    last = datetime.fromisoformat(lines[-1]["time"])
    for ago, said in ((20, False), (7200, True)):
        later = datetime.now(UTC) - timedelta(seconds=ago) - last
        moved = [{**line, "time": (datetime.fromisoformat(line["time"]) + later).isoformat()} for line in lines]
        notes = diagnose(Run("x", {0: moved})).notes
        assert any("2 h ago: it was killed, or its lines do not get here" in n for n in notes) is said, notes


def test_too_few_steps_are_said_and_nothing_is_guessed(read):
    found = diagnose(read(CPU.but(steps=4, epochs=1, checkpoint=30.0)))
    assert found.state == "not_enough" and found.findings == ()
    assert "only 4 of the 10" in found.answer
    check_whole(found)
    failure = {"kind": "failure", "failure": "broken", "message": "'lr0' is an invalid value", "phase": "train"}
    failed = diagnose(read(CPU.but(steps=4, epochs=1, extra=[failure], ended=False)))
    assert "before the run failed" in failed.answer and "the run failed: rank 0" in failed.notes[0]


def test_a_wait_of_unknown_cause_is_not_health(read, tmp_path):
    folder = write(WORKERS.with_parts(read=(1.2, 0.01)), tmp_path / "out")
    path = folder / "rank0" / "timeline.jsonl"
    old = []
    for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
        if line["kind"] == "window":
            for key in ("loader", "steps", "images", "input", "profiled", "each", "bytes", "device"):
                del line[key]
        if line["kind"] != "conditions":
            old.append(json.dumps(line))
    path.write_text("\n".join(old) + "\n", encoding="utf-8")
    found = diagnose(read_run(str(folder), tmp_path))
    assert found.state == "not_enough"
    assert "of the time waits for images" in found.answer and "parts of loading" in found.answer
    check_whole(found)


def test_lost_work_counts_what_was_done_again_and_only_that(read):
    # Epochs 2 and 3 of 3 are done twice: 2 of 5 epochs of work.
    found = judged(diagnose(read(CPU.but(redo=(2, 3)))), "discarded_work")
    assert found.weight == pytest.approx(2 / 5, abs=0.02) and found.detail["recovers"] == 2
    # 50 of 60 steps of epoch 2 are lost with the worker: 50 of 230 steps.
    found = judged(diagnose(read(CPU.but(died=(2, 50)))), "discarded_work")
    assert found.weight == pytest.approx(50 / 230, abs=0.02) and found.detail["resumes"] == 1


def test_no_more_loader_processes_are_proposed_than_the_training_would_start(read):
    for most in (None, 2, 1):
        found = judged(diagnose(read(GPU.but(workers=1, parts=HEAVY, workers_most=most))), "too_few_workers")
        assert found.detail["wanted"] > 2 if most is None else found.detail["wanted"] == most
        assert (found.weight == 0) == (most == 1)
    assert "starts no more than 1 loader process" in found.next_check
