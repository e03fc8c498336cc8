"""`kfp-gate diagnose` as somebody types it."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kfp_gate import cli

from .simulated import Training, write

SLOW = Training(workers=2).with_parts(read=(1.2, 0.01))
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str, str]:
    """A run that waits for its reads, one whose reads are fast, and one of another batch."""
    home = tmp_path_factory.mktemp("홈 50%")
    slow, fast = write(SLOW, home / "slow"), write(Training(workers=2), home / "fast")
    return str(slow), str(fast), str(write(SLOW.but(images=8), home / "batch"))


@pytest.fixture
def diagnose(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kfp-gate", "diagnose", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def test_one_run_gives_the_answer_the_page_and_the_numbers(diagnose: Command, runs: tuple[str, ...]) -> None:
    code, shown, _ = diagnose(runs[0], "--report", "why.html", "--json", "why.json")
    found = json.loads(Path("why.json").read_text(encoding="utf-8"))
    assert code == 0 and found["state"] == "cause" and found["findings"][0]["cause"] == "slow_reads"
    assert shown.startswith(found["answer"][:60]) and "report: why.html" in shown
    assert found["answer"].split(". ")[0] in Path("why.html").read_text(encoding="utf-8")


def test_several_runs_are_compared_with_the_first(diagnose: Command, runs: tuple[str, ...]) -> None:
    code, shown, _ = diagnose(runs[0], runs[1], "--report", "both.html", "--json", "both.json")
    assert code == 0 and shown.startswith("A step takes") and "less than before" in shown
    assert json.loads(Path("both.json").read_text(encoding="utf-8"))["answer"].startswith("A step takes")
    code, _, error = diagnose(*runs)
    assert code == 2 and "--acknowledge batch" in error and "train_images" in error
    named = ("batch", "train_images")
    code, shown, _ = diagnose(*runs, *(a for n in named for a in ("--acknowledge", n)), "--json", "all.json")
    assert code == 0 and shown.count("\nbefore: ") == 2
    assert len(json.loads(Path("all.json").read_text(encoding="utf-8"))) == 2


def test_a_record_grows_and_is_shown(diagnose: Command, runs: tuple[str, ...]) -> None:
    assert diagnose(runs[0], "--record", "slow.jsonl")[0] == 0
    said = ("--hypothesis", "the share", "--change", "<b>a local disk</b>", "--rejected", "workers=8: as slow")
    assert diagnose(runs[0], runs[1], "--record", "slow.jsonl", *said)[0] == 0
    code, shown, _ = diagnose("--record", "slow.jsonl")
    assert code == 0 and shown.count("## ") == 2 and "Rejected: workers=8: as slow" in shown
    assert "<b>" not in shown.replace("\\<b>", "") and "Result: A step takes" in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "no run"),
        (("--record", "r.jsonl", "--rejected", "workers=8"), "--rejected and no run"),
        (("--record", "r.jsonl", "--report", "x.html"), "--report and no run"),
        (("RUN", "--change", "a disk"), "something to record, and no record"),
        (("RUN", "--acknowledge", "batch"), "--acknowledge with one run"),
        (("RUN", "RUN", "--acknowledge", "bath"), "'batch'?"),
        (("nowhere",), "nothing there"),
        (("RUN", "nowhere"), "nothing there"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(
    diagnose: Command, runs: tuple[str, ...], arguments: tuple[str, ...], words: str
) -> None:
    code, shown, error = diagnose(*(runs[0] if a == "RUN" else a for a in arguments))
    assert (code, shown) == (2, "") and words in error and "next step" in error
    assert not list(Path().iterdir()), "nothing is written where nothing is done"
