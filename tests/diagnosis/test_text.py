"""What a person reads in the terminal."""

from dataclasses import replace

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import Diagnosis, Unjudged
from kfp_gate.diagnosis.pages.text import WIDTH, text

from .recorded import diagnosed, recorded


def test_answer_first_then_why_then_what_a_change_would_bring(snapshot):
    snapshot("diagnosis", text(diagnosed(recorded(epochs=2))))


def test_not_enough_is_an_answer(snapshot):
    found = Diagnosis(
        "runs/new", "not_enough", "Not enough observations to say what holds this run back.", running=True,
        unjudged=(Unjudged("slow_reads", ("no steady steps", "no samples")),),
    )  # fmt: skip
    snapshot("diagnosis-not-enough", text(found))


def test_no_line_is_wider_and_no_name_steers_the_terminal():
    name = "\x1b[31mred\x1b[0m\r\n" + "long_" * 60
    written = text(replace(diagnosed(recorded(epochs=2), name), where=name, notes=(name,)))
    assert "\x1b" not in written and "\r" not in written
    assert max(map(len, written.splitlines())) <= WIDTH


def test_what_was_really_judged_is_told():
    run = recorded(epochs=3, mig=(0, 1))
    found = diagnose(run)
    written = text(found)
    words = " ".join(written.split())
    assert written.startswith(found.answer[:60])
    for finding in found.findings:
        assert finding.title[1:] in words and finding.next_check in words
    for unjudged in found.unjudged:
        assert all(m in words for m in unjudged.missing)
