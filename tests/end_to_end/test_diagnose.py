"""`kfp-gate run --pipeline diagnose` as somebody asks why a training would be slow here."""

import json
import re
from pathlib import Path

import pytest

from end_to_end.command import TINY, Run, kfp_gate, parameters
from end_to_end.test_datasets import write_set

pytestmark = pytest.mark.all_only

STEPS, PROFILED = 12, 3


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("diagnosed")


@pytest.fixture(scope="module")
def probe(out: Path) -> Run:
    dataset = write_set(out / "data set", ["원뿔 (소형)", "<b>bold</b>", "50%"], groups=40)
    short = parameters(probe_steps=STEPS, profile_steps=PROFILED, image_size=64, batch=4)
    return kfp_gate("run", "--pipeline", "diagnose", "--dataset", str(dataset), *short, "-p", TINY, out=out)


def test_the_answer_is_on_the_screen_with_the_page_behind_it(probe: Run) -> None:
    assert probe.code == 0, probe.text + probe.log[-4000:]
    found = json.loads(probe.artifact("diagnose-training", "diagnosis").read_text(encoding="utf-8"))
    assert found["answer"] in probe.text and found["state"] in ("cause", "no_cause")
    assert found["running"] is False and found["epoch_s"] > 0
    page = Path(re.search(r"diagnosis:\s+(\S+)", probe.text)[1]).read_text(encoding="utf-8")
    assert found["answer"].split(". ")[0] in page and "not ended yet" not in page


def test_the_probe_and_the_profile_are_in_the_answer(probe: Run) -> None:
    lines = (probe.artifact("launch-training", "record") / "timeline.jsonl").read_text(encoding="utf-8").splitlines()
    told = [json.loads(line) for line in lines]
    parts = {line["part"]: line for line in told if line["kind"] == "probe"}
    assert {name: part["steps"] for name, part in parts.items()} == {"usual": STEPS, "prepared": STEPS}
    (profile,) = [line for line in told if line["kind"] == "profile"]
    assert profile["steps"] == PROFILED and profile["functions"] and profile["apart_s"] > 0
    text = probe.artifact("diagnose-training", "diagnosis").read_text(encoding="utf-8")
    assert "in the profile window" in text and "images held in memory" in text


def test_the_runs_folder_can_be_asked_again(probe: Run, out: Path) -> None:
    from kfp_gate.diagnosis.diagnose import diagnose
    from kfp_gate.diagnosis.reading.runs import read_run

    found = json.loads(probe.artifact("diagnose-training", "diagnosis").read_text(encoding="utf-8"))
    assert diagnose(read_run(str(probe.folder), out / "scratch")).answer == found["answer"]


def test_a_data_set_that_is_not_there_is_bad_input(out: Path) -> None:
    run = kfp_gate("run", "--pipeline", "diagnose", "--dataset", str(out / "nowhere"), out=out)
    assert run.code == 2 and "does not exist" in run.text and "Traceback" not in run.text, run.text
