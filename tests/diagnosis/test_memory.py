"""Growth, copies and pressure of memory, from made-up timelines and from real processes that leak."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import BAR, Finding, Unjudged
from kfp_gate.diagnosis.memory.forked_copies import ORDINARY
from kfp_gate.diagnosis.memory.growth import growth, memory_findings
from kfp_gate.diagnosis.reading.runs import Run, read_run
from kfp_gate.observing.memory import Memory

MIB, GIB = 1 << 20, 1 << 30
UNKNOWN = dict.fromkeys(("cgroup", "limit", "cgroup_peak", "anon", "file", "shmem", "oom_kills"))


def lines_of(
    at: Callable[[int], dict[str, Any]], *, seen: int = 10, epochs: int = 60, rank: int = 0, samples: Sequence[Any] = ()
) -> list[dict[str, Any]]:
    """A rank's lines when its memory at the end of epoch e is `at(e)`."""
    lines: list[dict[str, Any]] = [
        {"kind": "start", "rank": rank, "mono": 0.0},
        {"kind": "conditions", "rank": rank, "epochs": epochs, "mono": 1.0},
    ]  # fmt: skip
    for epoch in range(1, seen + 1):
        lines += [{"kind": "sample", "rank": rank, "mono": 10.0 * epoch + i, **s} for i, s in enumerate(samples)]
        values = Memory().values() | at(epoch)
        lines.append({"kind": "memory", "rank": rank, "epoch": epoch, "mono": 10.0 * epoch + 9, **values})
    return lines


def made(*ranks: list[dict[str, Any]]) -> Run:
    return Run("made up", dict(enumerate(ranks)))


def judged(run: Run) -> dict[str, Finding | Unjudged]:
    found = memory_findings(run)
    assert [f.cause for f in found] == ["memory_growth", "forked_copies", "memory_pressure"]
    return {f.cause: f for f in found}


def finding(run: Run, cause: str) -> Finding:
    found = judged(run)[cause]
    assert isinstance(found, Finding), found
    return found


def text(found: Finding) -> str:
    parts = [f"{found.cause} {found.weight:.2f}: {found.title}"]
    for name in ("evidence", "against", "missing"):
        parts += [f"  {name}: {line}" for line in getattr(found, name)]
    return "\n".join([*parts, f"  next: {found.next_check}", f"  refuted by: {found.refuted_by}"])


def evaluator(epoch: int) -> dict[str, Any]:
    kept = 48 * MIB * epoch
    return {
        "rss": GIB + kept, "children": 0, "children_count": 0, "cgroup": 2 * GIB + kept + 100 * MIB * epoch,
        "limit": 4 * GIB, "anon": GIB + kept, "file": GIB + 100 * MIB * epoch, "shmem": 0,
        "by_phase": {"train": {"rss": 3 * MIB}, "validate": {"rss": 48 * MIB}, "checkpoint": {"rss": -3 * MIB}},
    }  # fmt: skip


# Growth -------------------------------------------------------------------------------------------------------------


def test_an_evaluator_that_keeps_its_predictions_is_named_as_such(snapshot: Any) -> None:
    run = made(lines_of(evaluator, epochs=80))
    first, *rest = growth(run)
    assert (first.what, first.phase, first.since, first.limit, first.limit_epoch) == ("rss", "validate", 2, 4 * GIB, 64)
    assert first.low <= first.slope <= first.high and first.slope == pytest.approx(48 * MIB)
    assert [g.what for g in rest] == ["anon", "cgroup"], "page cache grows too, and is no growth"
    found = finding(run, "memory_growth")
    assert found.weight == 1.0 and found.detail["phase"] == "validate"
    snapshot("memory-evaluator", text(found))


def test_a_limit_that_comes_after_the_last_epoch_is_less_urgent() -> None:
    weights = [finding(made(lines_of(evaluator, epochs=n)), "memory_growth").weight for n in (80, 64, 63, 32, 10)]
    assert weights == sorted(weights, reverse=True)
    assert weights[1] == 1.0 > weights[2] and weights[3] == pytest.approx(0.25) and weights[4] < BAR


def test_a_container_that_tells_nothing_leaves_the_process(snapshot: Any) -> None:
    run = made(lines_of(lambda e: {"rss": GIB + 100 * MIB * e, **UNKNOWN}))
    (found,) = growth(run)
    assert (found.what, found.limit, found.limit_epoch, found.phase) == ("rss", None, None, "")
    memory = finding(run, "memory_growth")
    assert BAR <= memory.weight <= 0.5
    snapshot("memory-no-container", text(memory))


@pytest.mark.parametrize(
    "at",
    [
        lambda e: {"rss": GIB, "cgroup": (2 + e) * GIB, "file": e * GIB, "anon": 2 * GIB, "limit": 32 * GIB},
        lambda e: {"rss": GIB + 300 * MIB * (e > 5), **UNKNOWN},
        lambda e: {"rss": GIB + (e % 2) * 30 * MIB, **UNKNOWN},
        lambda e: {"rss": GIB + MIB * e, "cgroup": 2 * GIB, "file": 0, "limit": 4 * GIB},
    ],
    ids=["page cache", "one jump", "to and fro", "an allocator's creep"],
)
def test_this_is_no_growth(at: Callable[[int], dict[str, Any]]) -> None:
    run = made(lines_of(at, seen=12))
    assert growth(run) == ()
    found = finding(run, "memory_growth")
    assert found.weight == 0.0 and found.title == "no memory grows from epoch to epoch"


@pytest.mark.parametrize("seen", [0, 1, 4])
def test_too_few_epochs_are_not_judged(seen: int) -> None:
    found = judged(made(lines_of(evaluator, seen=seen)))["memory_growth"]
    assert found == Unjudged("memory_growth", (f"memory at the end of 5 epochs: {seen} were recorded",))


def test_a_machine_that_tells_nothing_is_not_judged() -> None:
    found = judged(made(lines_of(lambda e: {})))
    assert all(isinstance(f, Unjudged) and f.missing for f in found.values())


def test_a_run_without_a_line_is_not_judged() -> None:
    assert growth(Run("nothing", {})) == ()
    assert all(isinstance(f, Unjudged) for f in memory_findings(Run("nothing", {})))


def test_the_rank_that_leaks_is_named() -> None:
    steady = lines_of(lambda e: {"rss": GIB, **UNKNOWN})
    leaks = lines_of(lambda e: {"rss": GIB + 100 * MIB * e, **UNKNOWN}, rank=1)
    (found,) = growth(made(steady, leaks))
    assert found.text.startswith("rank 1: memory of the training process grows by 100 MiB an epoch")
    assert finding(made(steady, leaks), "memory_growth").detail["rank"] == 1


def test_what_an_earlier_attempt_held_is_gone() -> None:
    earlier = lines_of(lambda e: {"rss": GIB + 500 * MIB * e, **UNKNOWN})
    now = [{**x, "epoch": x.get("epoch", 0) + 10} for x in lines_of(lambda e: {"rss": GIB, **UNKNOWN})]
    assert growth(made([*earlier, *now])) == ()
    assert len(growth(made([*now, *earlier]))) == 1


@pytest.mark.parametrize("what", ["children", "shmem", "cuda_reserved"])
def test_other_kinds(what: str) -> None:
    def at(epoch: int) -> dict[str, Any]:
        grown = 200 * MIB * epoch
        held = 0 if what == "cuda_reserved" else grown
        values = {"rss": GIB, "children": GIB, "children_count": 2, "cgroup": 3 * GIB + held, "file": 0, "shmem": 0,
                  "limit": 16 * GIB, "cuda_reserved": GIB, "cuda_total": 24 * GIB}  # fmt: skip
        if what == "shmem":
            values["file"] = grown
        return values | {what: values[what] + grown}

    found = finding(made(lines_of(at, epochs=130)), "memory_growth")
    assert found.detail["what"] == what and found.weight == 1.0
    assert found.detail["limit"] == (24 if what == "cuda_reserved" else 16) * GIB


def test_older_timelines_show_the_phase_by_their_samples() -> None:
    phases = ["train"] * 3 + ["validate"] * 4 + ["checkpoint"] * 2

    def run(keeps: str) -> Run:
        lines, rss = [], GIB
        for line in lines_of(lambda e: {"rss": 0}, seen=12, samples=[{"phase": p} for p in phases]):
            if line["kind"] == "sample":
                rss += 20 * MIB if line["phase"] == keeps else 0
                line["rss"] = rss
            if line["kind"] == "memory":
                line["rss"] = rss
            lines.append(line)
        return made(lines)

    assert [(g.what, g.phase) for g in growth(run("validate"))] == [("rss", "validate")]
    assert [g.phase for g in growth(run("train"))] == ["train"]
    assert [g.phase for g in growth(run("checkpoint"))] == [""], "seen mostly between phases: not told"


@pytest.mark.parametrize(
    "kept", [None, "x", [], {"validate": "x"}, {"validate": {"rss": "x"}}, {"validate": {"rss": None}}]
)
def test_a_timeline_with_nonsense_is_read(kept: Any) -> None:
    at = lambda e: {"rss": GIB + 100 * MIB * e, "pss": "x", "cgroup": -1, "children": True, "by_phase": kept}  # noqa: E731
    lines = lines_of(at)
    lines[1]["epochs"] = "many"
    lines.insert(3, {"kind": "memory", "epoch": None})
    lines.insert(3, {"kind": "sample", "mono": "x", "pressure_memory": "x", "oom_kills": None})
    lines[-1]["at_start"] = kept
    (found,) = growth(made(lines))
    assert (found.what, found.phase) == ("rss", "")
    assert len(memory_findings(made(lines))) == 3


# Copies -------------------------------------------------------------------------------------------------------------


def copying(epoch: int) -> dict[str, Any]:
    """Two loaders that were forked from a process with 700 MiB; each has mapped 40 MiB of buffers too."""
    copied = 60 * MIB * epoch
    values = {
        "rss": GIB, "children": 2 * GIB, "children_count": 2, "pss": 700 * MIB, "children_pss": 400 * MIB + copied,
        "process_anon": 750 * MIB, "children_anon": 1480 * MIB, "family_anon": 830 * MIB + copied,
        "cgroup": 1200 * MIB + copied, "anon": 1100 * MIB + copied, "file": 0, "shmem": 0, "limit": 2 * GIB,
    }  # fmt: skip
    return (
        values | {"at_start": {"process_anon": 700 * MIB, "children_count": 0, "anon": 970 * MIB}}
        if epoch == 1
        else values
    )


def test_copies_of_the_parents_memory_are_no_leak(snapshot: Any) -> None:
    run = made(lines_of(copying))
    copies, leak = finding(run, "forked_copies"), finding(run, "memory_growth")
    assert copies.weight == 1.0, "at this rate the limit is reached in epoch 15 of 60, and there is as much to copy"
    assert (copies.detail["copies"], copies.detail["own"]) == (600 * MIB, 80 * MIB)
    assert leak.weight == 0.0 and "copies" in leak.against[0]
    snapshot("memory-copies", text(copies))
    assert {g.what for g in growth(run)} == {"cgroup", "anon", "family_anon"}


def test_copies_that_end_before_the_limit_weigh_what_they_hold() -> None:
    """Two loaders cannot copy more than they have mapped."""
    for at in (lambda e: copying(min(e, 8)) | ({} if e > 1 else copying(1)), lambda e: copying(e) | {"limit": 4 * GIB}):
        lines = lines_of(at, seen=14)
        found = finding(made(lines), "forked_copies")
        beyond = found.detail["copies"] - 2 * ORDINARY
        assert found.weight == pytest.approx(beyond / lines[-1]["limit"]) and BAR < found.weight < 0.3


@pytest.mark.parametrize("limit", [2 * GIB, None])
def test_what_any_loader_copies_is_no_cause(limit: int | None) -> None:
    def at(epoch: int) -> dict[str, Any]:
        return copying(2) | {"limit": limit} | ({"at_start": copying(1)["at_start"]} if epoch == 1 else {})

    found = finding(made(lines_of(at)), "forked_copies")
    assert (
        found.detail["copies"] == 120 * MIB and found.weight == 0.0 and "any loader copies as much" in found.against[0]
    )


def test_loaders_that_leak_are_no_copies() -> None:
    def at(epoch: int) -> dict[str, Any]:
        grown = 60 * MIB * epoch
        return copying(epoch) | {"children": 2 * GIB + grown, "children_anon": 1480 * MIB + grown}

    run = made(lines_of(at))
    assert finding(run, "forked_copies").weight < BAR
    leak = finding(run, "memory_growth")
    assert leak.detail["what"] == "children" and leak.weight == 1.0 and "workers to 0" in leak.next_check


def test_no_loaders_no_copies() -> None:
    assert finding(made(lines_of(evaluator)), "forked_copies").title == "there are no loader processes"


def test_ranks_that_share_a_container_go_by_shared_pages() -> None:
    """The other rank's growth would look like copies in what the container holds."""

    def at(epoch: int) -> dict[str, Any]:
        return copying(2) | {"anon": 1220 * MIB + 200 * MIB * epoch} | (
            {"at_start": copying(1)["at_start"]} if epoch == 1 else {})  # fmt: skip

    two = [lines_of(at), lines_of(at, rank=1)]
    assert finding(made(*two), "forked_copies").detail["copies"] == 120 * MIB
    alone = finding(made(lines_of(lambda e: copying(e) | {"family_anon": None})), "forked_copies")
    assert alone.detail["copies"] == 600 * MIB, "short epochs have no shares"


@pytest.mark.parametrize("missing", [("family_anon", "anon"), ("children_count",), ("at_start",), ("process_anon",)])
def test_copies_need_one_of_two_measures(missing: tuple[str, ...]) -> None:
    found = judged(made(lines_of(lambda e: copying(e) | dict.fromkeys(missing))))["forked_copies"]
    assert isinstance(found, Unjudged) and "anonymous memory of the loader" in found.missing[0]


# Pressure -----------------------------------------------------------------------------------------------------------


def pressed(share: float | None, held: float | None, **more: Any) -> Run:
    sample = {"pressure_memory": share, "major_faults": 40, "phase": "train"}
    memory: dict[str, Any] = {"rss": GIB, **UNKNOWN}
    if held is not None:
        memory |= {"limit": 4 * GIB, "cgroup": round(held * 4 * GIB) + GIB, "file": GIB, "shmem": 0}
    return made(lines_of(lambda e: memory, samples=[sample, sample | more]))


def test_pressure_is_the_share_of_the_time(snapshot: Any) -> None:
    found = finding(pressed(0.3, 0.95), "memory_pressure")
    assert found.weight == pytest.approx(0.3)
    snapshot("memory-pressure", text(found))


def test_processes_that_were_killed_are_pressure_enough() -> None:
    run = pressed(0.0, 0.5, oom_kills=1)
    run.ranks[0][2]["oom_kills"] = 0  # type: ignore[index]
    found = finding(run, "memory_pressure")
    assert found.weight == 1.0 and found.evidence[0].startswith("the kernel killed 1 process of")


def test_a_process_killed_in_the_first_epoch_is_told_by_the_last_line_alone() -> None:
    """No epoch has ended, and no sample was taken between the kill and the end."""
    lines = [
        {"kind": "start", "rank": 0, "mono": 0.0}, {"kind": "sample", "mono": 1.0, "phase": "train", "oom_kills": 2},
        {"kind": "failure", "mono": 2.0, "failure": "memory",
         **UNKNOWN, "oom_kills": 3, "limit": 4 * GIB, "cgroup": 3 * GIB, "file": GIB, "shmem": 0},
    ]  # fmt: skip
    found = diagnose(made(lines))
    assert [f.cause for f in found.findings] == ["memory_pressure"], found.answer
    assert found.findings[0].evidence[0].startswith("the kernel killed 1 process of")
    assert found.findings[0].detail["limit"] == 4 * GIB


@pytest.mark.parametrize(
    ("share", "held", "judgement"), [(0.0, None, 0.0), (None, 0.5, 0.0), (None, 0.95, None), (None, None, None)]
)
def test_unknown_pressure_is_only_judged_where_there_is_room(
    share: float | None, held: float | None, judgement: float | None
) -> None:
    found = judged(pressed(share, held))["memory_pressure"]
    if judgement is None:
        assert isinstance(found, Unjudged) and "pressure stall information" in found.missing[0]
    else:
        assert isinstance(found, Finding) and found.weight == judgement and found.missing


# Real processes -----------------------------------------------------------------------------------------------------

LEAK = """
import os, sys, logging
from pathlib import Path
from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.memory_watch import MemoryWatch

logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
timeline = Timeline(Path(sys.argv[1]) / "timeline.jsonl", run="r", rank=0, node="here")
timeline.write("start", pid=os.getpid())
timeline.write("conditions", epochs=40)
group = find_control_group()
read = lambda **more: read_memory(group=group, **more)
watch = MemoryWatch(timeline, epochs=40, read=read)
kept = []
for epoch in range(1, 9):
    timeline.phase = "train"
    borrowed = os.urandom(1 << 20) * 40
    del borrowed
    timeline.phase = "validate"
    kept.append(os.urandom(1 << 20) * 24)
    timeline.phase = "checkpoint"
    timeline.phase = ""
    memory = read(children=True, pss=True)
    timeline.write("memory", epoch=epoch, **memory.values(), **watch.take())
    watch.epoch_ends(epoch, memory)
"""

COPIES = """
import os, sys
from pathlib import Path
from kfp_gate.observing.memory import find_control_group, read_memory
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.memory_watch import MemoryWatch

timeline = Timeline(Path(sys.argv[1]) / "timeline.jsonl", run="r", rank=0, node="here")
timeline.write("start", pid=os.getpid())
timeline.write("conditions", epochs=8)
group = find_control_group()
read = lambda **more: read_memory(group=group, **more)
watch = MemoryWatch(timeline, epochs=8, read=read)
annotations = [(float(i), float(-i)) for i in range(900_000)]
timeline.phase = "train"
loaders = []
for _ in range(2):
    ask, answer = os.pipe(), os.pipe()
    if not os.fork():
        while (epoch := os.read(ask[0], 1)):
            part = len(annotations) // 8
            sum(a[0] for a in annotations[(epoch[0] - 1) * part : epoch[0] * part])
            os.write(answer[1], b"x")
        os._exit(0)
    loaders.append((ask[1], answer[0]))
for epoch in range(1, 9):
    timeline.phase = "train"
    for ask, answer in loaders:
        os.write(ask, bytes([epoch]))
        os.read(answer, 1)
    timeline.phase = ""
    timeline.write("memory", epoch=epoch, **read(children=True, pss=True).values(), **watch.take())
os.kill(0, 15)
"""


def record(code: str, folder: Path) -> tuple[Run, str]:
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, start_new_session=True
    )
    assert (folder / "timeline.jsonl").is_file(), done.stderr
    return read_run(str(folder / "timeline.jsonl"), folder), done.stdout


def test_a_real_process_whose_validation_leaks(tmp_path: Path) -> None:
    run, log = record(LEAK, tmp_path)
    found = {g.what: g for g in growth(run)}
    assert found["rss"].phase == "validate"
    assert found["rss"].slope == pytest.approx(24 * MIB, rel=0.15)
    memory = finding(run, "memory_growth")
    assert "kept by validation" in memory.title and memory.detail["what"] == "rss"
    if memory.detail["limit"] is None:
        assert "memory of the training process grows by 24 MiB an epoch" in log
        assert "mainly in the phase validate; see docs/oom.md" in log
        assert [x["phase"] for x in run.lines("growth")] == ["validate"]
        assert memory.weight >= BAR


def test_real_loaders_that_copy_a_list_by_reading_it(tmp_path: Path) -> None:
    run, _ = record(COPIES, tmp_path)
    copies = finding(run, "forked_copies")
    # Each of two loaders reads all of it: 900,000 tuples with two floats, of 56 and 24 bytes and more.
    assert copies.detail["copies"] > 2 * 60 * MIB and copies.detail["own"] < 8 * MIB
    grown = {g.what for g in growth(run)}
    assert "family_anon" in grown and not {"rss", "children"} & grown
    assert finding(run, "memory_growth").weight < BAR
