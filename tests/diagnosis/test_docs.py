"""The table of docs/diagnosis.md is what the tool says."""

import re
from pathlib import Path

import pytest

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import CAUSES
from kfp_gate.diagnosis.pages.scenario_rows import scenario_table

from .simulated import Training, simulate

TEXT = (Path(__file__).parents[2] / "docs" / "diagnosis.md").read_text(encoding="utf-8")

GPU = {"transfer": 0.0002, "forward": 0.04, "loss": 0.004, "backward": 0.056, "optimizer": 0.0002}
PROFILE = {"kind": "profile", "steps": 10, "step_s": 0.41, "around_s": 0.4, "device_busy_s": 1.0, "kernels": 4000}
EXAMPLE = Training(
    parts={"read": (0.020, 0.002), "decode": (0.024, 0.024), "transform:TargetMaps": (0.256, 0.256)},
    step=GPU, device=GPU, steps=200, images=64, files=64, epochs=4, checkpoint=0.0, upload=0.0, extra=(PROFILE,),
    validation={"forward": 18.0, "load": 1.9, "gather": 0.1},
)  # fmt: skip
"""An epoch of 100 s: 60 preparing (4 ms an image for target maps), 20 on the GPU, 20 validating."""

ROWS = {
    "as it is": "as it is", "preparation halved": "preparation halved", "validation halved": "validation halved",
    "the GPU twice as fast": "device compute halved",
}  # fmt: skip


@pytest.mark.parametrize(("column", "workers"), [(1, 0), (2, 1)])
def test_the_60_20_20_table(tmp_path, column, workers):
    found = scenario_table(diagnose(simulate(EXAMPLE.but(workers=workers), tmp_path / "run")))
    told = {"as it is": found.now} | {r.scenario.change: r.scenario.seconds for r in found.rows}
    told |= {name: found.now for name in found.idle}
    shown = re.search(r"<!-- example: 60/20/20 -->\n((?:\|.*\n)+)", TEXT).group(1).splitlines()[2:]
    assert len(shown) == len(ROWS)
    for line in shown:
        cells = [c.strip() for c in line.strip("|").split("|")]
        assert float(cells[column].removesuffix(" s")) == pytest.approx(told[ROWS[cells[0]]], abs=1.0), cells[0]


def test_every_cause_has_its_check():
    section = TEXT.split("## Causes and their checks")[1].split("\n## ")[0]
    for cause, name in CAUSES.items():
        assert f"| {name} |" in section, cause
