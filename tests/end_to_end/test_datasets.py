"""Data sets of users: one class, eighty, names that trackers refuse, real photographs, and broken ones."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from end_to_end.command import TINY, Run, kfp_gate, parameters

pytestmark = pytest.mark.all_only

AERIAL = Path(__file__).parents[3] / "shared" / "data" / "aerial-trees"
NAMES = ["원뿔 (소형)", "50%", "a/b", "<b>bold</b>", "left, right", *(f"thing {i}" for i in range(74)), "never seen"]
SHORT = [*parameters(epochs=1, image_size=64, batch=8), "-p", TINY]


def write_set(folder: Path, names: list[str], *, groups: int, frames: int = 2, per_image: int = 20) -> Path:
    """A data set of noise; the last class occurs in a single group, so in a single split."""
    rng = np.random.default_rng(0)
    (folder / "images").mkdir(parents=True)
    (folder / "labels").mkdir()
    listed = json.dumps(names, ensure_ascii=False)
    (folder / "data.yaml").write_text(f"train: images\nnames: {listed}\n", encoding="utf-8")
    for group in range(groups):
        for frame in range(frames):
            pixels = rng.integers(0, 255, size=(64, 96, 3), dtype=np.uint8)
            lines = []
            for box in range(per_image):
                # The first classes are everywhere, the last one in a single group, so in a single split.
                index = min(box, 2) if box < 3 else int(rng.integers(max(1, len(names) - 1)))
                index = index % max(1, len(names) - 1) if group else len(names) - 1
                x, y = rng.uniform(0.2, 0.8, size=2)
                lines.append(f"{index} {x:.4f} {y:.4f} 0.1 0.1\n")
            stem = f"clip{group:03d}_frame_{frame:03d}"
            Image.fromarray(pixels).save(folder / "images" / f"{stem}.jpg")
            (folder / "labels" / f"{stem}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def eighty(out: Path) -> Run:
    folder = write_set(out / "eighty classes", NAMES, groups=40)
    thresholds = {"원뿔 (소형)": {"map50": 0.9}, "50%": {"recall": 0.9}, "a/b": {"map50": 0.9}}
    return kfp_gate(
        "run",
        "--dataset",
        str(folder),
        *SHORT,
        *parameters(class_thresholds=thresholds, monitors=["map50_95"]),
        out=out,
    )


def test_eighty_classes_with_hard_names_come_to_an_honest_refusal(eighty: Run) -> None:
    assert eighty.code == 3, eighty.text + eighty.log[-4000:]
    assert "REFUSED" in eighty.text and "class/원뿔 (소형)/map50" in eighty.text
    verdict = json.loads(eighty.artifact("validation-gate", "verdict").read_text(encoding="utf-8"))
    assert {e["state"] for e in verdict["entries"]} <= {"missed", "insufficient"}
    assert "nan" not in json.dumps(verdict).lower().replace("nanosecond", "")
    assert len(verdict["ungated"]) == len(NAMES) - 3


def test_a_class_without_instances_in_a_split_is_reported(eighty: Run) -> None:
    report = eighty.artifact("split-dataset", "coverage").read_text(encoding="utf-8")
    assert "never seen" in report
    assert "<b>bold</b>" not in report and "&lt;b&gt;bold&lt;/b&gt;" in report


def test_hard_names_are_inert_in_the_report(eighty: Run) -> None:
    page = eighty.artifact("validation-gate", "report").read_text(encoding="utf-8")
    assert "<b>bold</b>" not in page and "원뿔 (소형)" in page


@pytest.mark.skipif(not AERIAL.is_dir(), reason="the aerial photographs are not part of a clone")
def test_real_photographs_with_four_groups(out: Path) -> None:
    run = kfp_gate("run", "--dataset", str(AERIAL), "-p", TINY, *parameters(epochs=2, image_size=160, batch=8), out=out)
    assert run.code == 3, run.text + run.log[-4000:]
    assert "4 groups cannot give the asked shares 70/15/15; they give train 76.6%" in run.text
    verdict = json.loads(run.artifact("validation-gate", "verdict").read_text(encoding="utf-8"))
    assert verdict["separation"]["state"] == "proven"


BAD = {
    "no dataset": ({"dataset": "nowhere"}, {}),
    "no labels": ({"labels": None}, {}),
    "four numbers": ({"labels": "0 0.5 0.5 0.1\n"}, {}),
    "unknown class index": ({"labels": "7 0.5 0.5 0.1 0.1\n"}, {}),
    "threshold for an unknown class": ({}, {"class_thresholds": {"thing": {"map50": 0.5}}}),
    "threshold outside 0..1": ({}, {"min_map50": 50.0}),
    "unknown metric": ({}, {"class_thresholds": {"thing 1": {"mAP@50": 0.5}}}),
    "unreachable tracking server": ({}, {"tracking_uri": "http://127.0.0.1:9"}),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_stops_before_training_with_one_message(case: str, out: Path, tmp_path: Path) -> None:
    data, values = BAD[case]
    folder = write_set(tmp_path / "set", ["thing 1", "thing 2"], groups=12, frames=1, per_image=2)
    for index, label in enumerate(sorted((folder / "labels").iterdir())):
        if "labels" in data and data["labels"] is None:
            label.unlink()
        elif "labels" in data and index < 25:
            label.write_text(data["labels"], encoding="utf-8")
    given = {"dataset": data.get("dataset", str(folder)), **values}
    run = kfp_gate("run", "--dataset", given.pop("dataset"), *SHORT, *parameters(**given), out=out)
    assert run.code == 2, run.text
    assert "launch_training" not in run.events
    assert "Traceback" not in run.text
    for part in ("found:", "expected:", "where:", "next step:"):
        assert part in run.text
