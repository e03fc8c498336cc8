"""The words of an answer: its sentence, and its findings with what speaks for and against them."""

import pytest

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import Diagnosis, Finding

from .simulated import simulate
from .test_causes import CPU, GPU, HEALTHY, PLANTED


def shown(found: Diagnosis) -> str:
    lines = [found.answer, *(f"note: {note}" for note in found.notes)]
    for finding in found.findings:
        lines += _finding(finding)
    return "\n".join(lines)


def _finding(finding: Finding) -> list[str]:
    return [
        f"{finding.cause} {finding.weight:.2f}: {finding.title}", *(f"  for: {e}" for e in finding.evidence),
        *(f"  against: {a}" for a in finding.against), f"  next: {finding.next_check}",
        f"  refuted by: {finding.refuted_by}", *(f"  missing: {m}" for m in finding.missing),
    ]  # fmt: skip


@pytest.mark.parametrize("family", ["loading", "device", "others"])
def test_answers_by_family(family, tmp_path, snapshot):
    loading = ("slow reads", "small files", "a loop", "a transform", "all of", "one worker", "no worker")
    device = ("transfer", "small kernels", "heat", "a loop, gpu")
    names = [
        n for n in PLANTED
        if (n.startswith(device) and family == "device")
        or (n.startswith(loading) and not n.startswith(device) and family == "loading")
        or (not n.startswith((*loading, *device)) and family == "others")
    ]  # fmt: skip
    texts = [f"# {n}\n{shown(diagnose(simulate(PLANTED[n][1], tmp_path / n)))}" for n in names]
    snapshot(f"answers-{family}", "\n\n".join(texts))


def test_answers_without_a_cause(tmp_path, snapshot):
    cases = {**HEALTHY, "four steps": CPU.but(steps=4, epochs=1), "no step": CPU.but(epochs=0),
             "idle gpu": GPU.but(sample={"gpu_util": 0.2}, main_cpu=0.1)}  # fmt: skip
    texts = [f"# {n}\n{shown(diagnose(simulate(t, tmp_path / n)))}" for n, t in cases.items()]
    snapshot("answers-without-a-cause", "\n\n".join(texts))
