"""The kept record."""

import json
import multiprocessing
from datetime import UTC, datetime

import pytest

from kfp_gate.diagnosis.comparing.compare import compare
from kfp_gate.diagnosis.comparing.notes import add_note, markdown, read_notes
from kfp_gate.diagnosis.findings import Diagnosis, Finding
from kfp_gate.errors import InvalidInput

from .test_compare import run

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
FOUND = Diagnosis(
    "runs/a", "cause", "The GPU waits 60% of the time for images.",
    findings=(Finding("preparation_cpu", "transform Cones takes 57 of 60 ms", 0.6),),
    conditions={"batch": 4, "workers": 0, "device": "cuda:0", "settings": {"hidden": 1}}, epoch_s=100.0,
)  # fmt: skip


def test_a_hunt_is_kept_and_read_back(tmp_path, snapshot):
    path = tmp_path / "deep" / "hunt.jsonl"
    first = add_note(path, FOUND, rejected=["more loader workers: no difference"], now=NOW)
    both = compare(run(noise=0), run("after", 0.02, noise=0))
    second = add_note(path, both, hypothesis="Cones loops over points", change="vectorised Cones", now=NOW)
    assert read_notes(path) == (first, second)
    assert first.hypothesis == "transform Cones takes 57 of 60 ms"
    assert first.conditions == {"batch": 4, "workers": 0, "device": "cuda:0"}
    assert second.numbers["step"]["ratio"] == pytest.approx(0.07 / 0.11, rel=0.05)
    snapshot("kept_record", path.read_text(encoding="utf-8").rstrip("\n"))
    snapshot("kept_record_markdown", markdown(read_notes(path)).rstrip("\n"))


def test_it_only_grows(tmp_path):
    path = tmp_path / "hunt.jsonl"
    add_note(path, FOUND)
    before = path.read_bytes()
    add_note(path, FOUND)
    assert path.read_bytes().startswith(before)
    assert path.read_bytes().count(b"\n") == 2


def _add_many(path, who):
    for i in range(20):
        add_note(path, FOUND, change=f"{who} {i} " + "x" * 3000)


def test_many_may_add_at_once(tmp_path):
    path = tmp_path / "hunt.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_many, args=(path, who)) for who in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert {w.exitcode for w in writers} == {0}
    changes = {n.change.split(" x")[0] for n in read_notes(path)}
    assert changes == {f"{who} {i}" for who in range(4) for i in range(20)}


def test_a_line_that_was_cut_costs_itself_alone(tmp_path):
    path = tmp_path / "hunt.jsonl"
    add_note(path, FOUND)
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:40])
    assert len(read_notes(path)) == 1
    add_note(path, FOUND)
    lines = path.read_bytes().split(b"\n")
    assert [len(line) > 0 for line in lines] == [True, True, True, False]
    with pytest.raises(InvalidInput, match="line 2"):
        read_notes(path)


def test_an_unfinished_merge_is_named(tmp_path, snapshot):
    path = tmp_path / "hunt.jsonl"
    add_note(path, FOUND, now=NOW)
    line = path.read_text()
    newer = json.dumps({**json.loads(line), "schema_version": 2})
    path.write_text(f"{line}<<<<<<< ours\n{line}=======\n[1]\n{newer}\n")
    with pytest.raises(InvalidInput) as caught:
        read_notes(path)
    snapshot("unfinished_merge", str(caught.value).replace(str(tmp_path), "FOLDER"))


def test_what_is_no_record_is_left_alone(tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<html>\n")
    with pytest.raises(InvalidInput, match="no such record"):
        add_note(page, FOUND)
    assert page.read_text() == "<html>\n"
    with pytest.raises(InvalidInput, match="cannot be written"):
        add_note(tmp_path, FOUND)
    with pytest.raises(InvalidInput, match="unreadable"):
        read_notes(tmp_path / "missing.jsonl")


def test_secrets_and_hostile_text(tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    path = tmp_path / "hunt.jsonl"
    evil = (
        "<script>alert(1)</script> [x](javascript:1) \x1b[2J\u202e`a`\n# head ![](http://b/c) \ud800 | hunter2hunter2"
    )
    note = add_note(path, FOUND, symptom=evil, change="y" * 9000, rejected=[evil, ""])
    assert "hunter2" not in path.read_text(encoding="utf-8")
    assert len(read_notes(path)) == 1
    assert len(note.change) == 4000
    shown = markdown(read_notes(path))
    for bad in ("<script", "](", "\x1b", "\u202e", "\n# head", "://b"):
        assert bad not in shown.replace("\\<", "").replace("\\]", "").replace("\\:", ""), bad
    assert shown.count("\n## ") == 1


def test_unknown_keys_of_a_friend_are_tolerated(tmp_path):
    path = tmp_path / "hunt.jsonl"
    add_note(path, FOUND)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "mood": "good", "rejected": None, "conditions": 3}) + "\n\n")
    (note,) = read_notes(path)
    assert (note.rejected, note.conditions) == ((), {})
