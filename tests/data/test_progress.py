"""A long step tells how far it is, at what rate, and how long it still takes."""

import logging

from scenes import clips, write_yolo

from kfp_gate.data import progress
from kfp_gate.data.progress import Meter
from kfp_gate.data.splitting import split_dataset


def test_every_stage_reports_up_to_its_end(tmp_path):
    seen = []
    split_dataset(str(write_yolo(tmp_path / "set", clips(8, 2))), reporter=seen.append)
    for stage in ("reading labels", "reading images"):
        last = [p for p in seen if p.stage == stage][-1]
        assert (last.done, last.total, last.eta_s) == (16, 16, 0.0) and last.rate > 0


def test_reports_are_rare_and_estimate_the_rest(monkeypatch, caplog):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    seen = []
    meters = Meter("loading", 100_000, seen.append), Meter("loading", 100_000)
    with caplog.at_level(logging.INFO, logger=progress.__name__):
        for _ in range(50_000):
            clock[0] += 0.001
            for meter in meters:
                meter.add()
    assert 400 < len(seen) < 600
    assert round(seen[-1].rate) == 1000 and round(seen[-1].eta_s) == 50
    assert 9 <= len(caplog.messages) <= 10
    assert caplog.messages[0] == "loading: 5000 of 100000, 1000/s, 1:35 left"
