"""Which cause is named in trainings with one planted cause each, and in healthy ones: a confusion table.

    python benchmarks/diagnosis.py [--only NAME ...] [--seed-case] [--keep FOLDER]

Real trainings of a small model on this machine: the worker's own code, with one thing slow where it would really sit
(`tests/diagnosis/planted`). Beside our answer stand the fixed rules of torch_tb_profiler 0.4.3 (a loader above 5% of
the step: more workers; communication above 10%: compress or accumulate), applied to the same numbers, and what CPU
utilisation alone would say, as one looks at nvidia-smi. The rules count as right wherever they point at the right area.

`--seed-case`: one training in three states. Its transform builds target maps by a loop over points; then by rows; then
the images lie on a local disk.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "diagnosis"))

from planted.judging import Judged, confusion, judge, plain, table
from planted.plantings import PLANTINGS, SEED_CASE
from planted.running import CannotBePlantedError, run

CURED = 0.8
"""What an epoch must take, of its former time, once the settings are changed as the cause asks for."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PLANTINGS), metavar="NAME", help=", ".join(PLANTINGS))
    parser.add_argument("--seed-case", action="store_true")
    parser.add_argument("--keep", type=Path, help="a folder that keeps the timelines")
    options = parser.parse_args()
    names = options.only or (SEED_CASE if options.seed_case else [n for n in PLANTINGS if n not in SEED_CASE])
    judged: list[tuple[str, Judged]] = []
    cured: dict[str, float] = {}
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            home = (options.keep or Path(scratch)) / name
            shutil.rmtree(home, ignore_errors=True)
            home.mkdir(parents=True)
            try:
                ran = run(name, home)
            except CannotBePlantedError as reason:
                print(f"{name}: not planted: {reason}\n")
                continue
            one = judge(PLANTINGS[name], ran.out, home / "scratch")
            judged.append((name, one))
            print(f"{name}: {PLANTINGS[name].about}{f' ({ran.note})' if ran.note else ''}; {ran.seconds:.0f} s")
            print(f"    {one.diagnosis.answer}")
            if PLANTINGS[name].cure:
                cured[name] = cure(name, home / "cured", one)
            print(flush=True)
            if options.keep is None:
                shutil.rmtree(home)
    foretold(dict(judged))
    print(table(judged), end="\n\n")
    print(confusion(judged), end="\n\n")
    idle = {kind: idle_share([o for _, o in judged if bool(o.planting.cause) is (kind == "slow")]) for kind in KINDS}
    print(f"CPU utilisation alone reads idle in {idle['slow']} slow trainings and in {idle['healthy']} healthy ones.")
    print(f"{len(judged)} trainings in {time.monotonic() - started:.0f} s")
    right, rules = sum(o.right for _, o in judged), sum(o.rules_right for _, o in judged)
    print(json.dumps({
        "name": "diagnosis", "ours": {"right": right, "of": len(judged), "runs": {n: plain(o) for n, o in judged}},
        "peers": {
            "torch_tb_profiler rules": {"right": rules, "of": len(judged)}, "CPU utilisation": {"idle_in": idle},
        },
        "ratios": {"right_over_rules": round(right / max(rules, 1), 2), "cured": cured},
        "bars": {"right": len(judged), "cured": CURED},
        "met": bool(judged) and right == len(judged) and all(c < CURED for c in cured.values()),
    }))  # fmt: skip


KINDS = ("slow", "healthy")


def idle_share(judged: Sequence[Judged]) -> str:
    return f"{sum('idle' in o.utilisation_says for o in judged)} of {len(judged)}"


FORETOLD = (
    ("seed_before", "transform:TargetMaps free", "seed_between"), ("seed_between", "reads free", "seed_after"),
)  # fmt: skip
"""A change that the first run's table foretells, and the run in which it was made."""


def foretold(judged: Mapping[str, Judged]) -> None:
    """Print what the table said of a change beside what the change did."""
    for before, change, after in FORETOLD:
        if before not in judged or after not in judged:
            continue
        row = next((s for s in judged[before].diagnosis.scenarios if s.change == change), None)
        measured = judged[after].diagnosis.epoch_s
        if row is not None and measured is not None:
            print(
                f"{before}, {change}: an epoch foretold to take {row.seconds:.1f} s ({row.low:.1f} to {row.high:.1f});"
                f" {after} takes {measured:.1f} s\n"
            )


def cure(name: str, home: Path, before: Judged) -> float:
    """Run once more with the planting's cure; returns an epoch's time over what it was."""
    settings = PLANTINGS[name].cure
    home.mkdir()
    after = judge(PLANTINGS[name], run(name, home, settings=settings).out, home / "scratch").diagnosis.epoch_s
    was = before.diagnosis.epoch_s
    changed = ", ".join(f"{k}={v}" for k, v in settings.items())
    if after is None or was is None:
        raise SystemExit(f"{name}: no epoch with {changed}")
    print(f"    with {changed} an epoch takes {after:.2f} s instead of {was:.2f} s")
    return round(after / was, 3)


if __name__ == "__main__":
    main()
