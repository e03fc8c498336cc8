"""The first cause that a diagnosis names is the one that was planted, in real trainings; none in healthy ones."""

from pathlib import Path

import pytest

from .planted.judging import judge
from .planted.plantings import PLANTINGS
from .planted.running import CannotBePlantedError, run

IN_CI = ("slow_reads_alone", "preparation_cpu_alone", "upload_stall")


def check(name: str, home: Path) -> None:
    try:
        ran = run(name, home)
    except CannotBePlantedError as reason:
        pytest.skip(str(reason))
    judged = judge(PLANTINGS[name], ran.out, home / "scratch")
    print(judged.diagnosis.to_json())
    assert judged.named == PLANTINGS[name].cause, judged.diagnosis.answer
    assert judged.right, (judged.diagnosis.state, judged.unsaid)


@pytest.mark.all_only
@pytest.mark.parametrize("name", IN_CI)
def test_names_what_was_planted(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in PLANTINGS if n not in IN_CI])
def test_names_what_was_planted_in_all(name: str, tmp_path: Path) -> None:
    check(name, tmp_path)
