"""What a diagnosis says of a planted training, and what fixed rules would say of the same numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kfp_gate.diagnosis.diagnose import diagnose
from kfp_gate.diagnosis.findings import Diagnosis
from kfp_gate.diagnosis.reading.runs import Run, read_run

from .plantings import Planting

DATA_LOADER, COMMUNICATION = 0.05, 0.10
"""Shares of a step from which torch_tb_profiler 0.4.3 speaks of the loader and of communication
(`profiler/data.py:228-336`). Its rules on GPU utilisation, tensor cores and GPU memory need a GPU: silent here."""

BUSY = 0.80
"""CPU utilisation from which a person who looks at nothing else calls the machine busy."""

STEP = ("data", "transfer", "forward", "loss", "backward", "optimizer", "other")


@dataclass(frozen=True)
class Judged:
    """One planting and what was said of it.

    Attributes:
        diagnosis: ours.
        rules: what torch_tb_profiler's rules recommend.
        utilisation: mean CPU utilisation of the training's processes, 0..1; None where it was not sampled.
        unsaid: words that the first finding should hold and does not.
    """

    planting: Planting
    diagnosis: Diagnosis
    rules: tuple[str, ...]
    utilisation: float | None
    unsaid: tuple[str, ...]

    @property
    def named(self) -> str:
        """The first cause; "" if none."""
        return self.diagnosis.findings[0].cause if self.diagnosis.findings else ""

    @property
    def right(self) -> bool:
        expected = "cause" if self.planting.cause else "no_cause"
        return self.named == self.planting.cause and self.diagnosis.state == expected and not self.unsaid

    @property
    def rules_right(self) -> bool:
        """Their one remedy for a waiting loader is more workers: counted wherever the loader is slow at all."""
        slow_loader = self.planting.cause in LOADER_CAUSES
        if not self.planting.cause:
            return not self.rules
        if self.planting.cause == "rank_imbalance":
            return "communication" in self.rules
        return slow_loader and "data loader" in self.rules

    @property
    def utilisation_says(self) -> str:
        if self.utilisation is None:
            return "unknown"
        return f"{self.utilisation:.0%}: {'busy' if self.utilisation >= BUSY else 'idle'}"


LOADER_CAUSES = ("slow_reads", "small_files", "preparation_cpu", "too_few_workers", "too_many_workers")


def judge(planting: Planting, where: Path, scratch: Path) -> Judged:
    run = read_run(str(where), scratch)
    found = diagnose(run)
    told = json.dumps(asdict(found.findings[0]), ensure_ascii=False, default=str) if found.findings else ""
    unsaid = tuple(word for word in planting.says if word not in told)
    return Judged(planting, found, _rules(run), _utilisation(run), unsaid)


def _rules(run: Run) -> tuple[str, ...]:
    by_rank = {rank: _phases(run, rank) for rank in run.ranks}
    total = sum(sum(seconds.values()) for seconds in by_rank.values())
    said = []
    if sum(s.get("data", 0.0) for s in by_rank.values()) > DATA_LOADER * total:
        said.append("data loader")
    # Gradients are exchanged within the backward pass: what it takes over the fastest rank's is waiting for others.
    backward = [s.get("backward", 0.0) for s in by_rank.values()]
    if len(backward) > 1 and sum(b - min(backward) for b in backward) > COMMUNICATION * total:
        said.append("communication")
    return tuple(said)


def _phases(run: Run, rank: int) -> Mapping[str, float]:
    """Seconds by phase of a rank's steps, without the first ones."""
    sums = dict.fromkeys(STEP, 0.0)
    for line in run.lines("window", rank):
        if not line.get("warmup"):
            for name in STEP:
                sums[name] += line.get("seconds", {}).get(name, 0.0)
    return sums


def _utilisation(run: Run) -> float | None:
    """CPU of all ranks and their loaders over the cores they may use, while steps, validation and checkpoints run."""
    used = 0.0
    for rank in run.ranks:
        seen = [
            line["cpu"] + ((line.get("loaders") or {}).get("cpu") or 0.0)
            for line in run.lines("sample", rank)
            if line.get("phase") in ("train", "validate", "checkpoint") and line.get("cpu") is not None
        ]
        if not seen:
            return None
        used += sum(seen) / len(seen)
    cores = run.conditions.get("cpu_quota") or run.conditions.get("cpus")
    return min(used / cores, 1.0) if cores else None


def table(judged: Sequence[tuple[str, Judged]]) -> str:
    """One row a training: what was planted, what was named, what the others say."""
    rows = [("training", "planted", "named first", "weight", "next", "tb rules", "CPU")]
    for name, one in judged:
        found = one.diagnosis.findings
        named = one.named or f"- ({one.diagnosis.state})"
        rows.append((
            name, one.planting.cause or "-", named if one.right else f"{named}  WRONG",
            f"{found[0].weight:.2f}" if found else "",
            ", ".join(f"{f.cause} {f.weight:.2f}" for f in found[1:3]),
            ", ".join(one.rules) or "-", one.utilisation_says,
        ))  # fmt: skip
    return aligned(rows)


def confusion(judged: Sequence[tuple[str, Judged]]) -> str:
    """Planted by named, in numbers of trainings."""
    planted = list(dict.fromkeys(one.planting.cause for _, one in judged))
    named = list(dict.fromkeys([*planted, *(one.named for _, one in judged)]))
    keys = {cause: chr(ord("a") + i) for i, cause in enumerate(named)}
    rows = [("planted \\ named", *(keys[c] for c in named))]
    for cause in planted:
        counts = [sum(o.planting.cause == cause and o.named == other for _, o in judged) for other in named]
        rows.append((f"{keys[cause]} {cause or 'nothing'}", *(str(n) if n else "." for n in counts)))
    extra = "".join(f"\n{keys[c]} {c or 'nothing'}: named, not planted" for c in named if c not in planted)
    return aligned(rows) + extra


def aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def plain(judged: Judged) -> dict[str, Any]:
    """The numbers of one training, for the last line of a benchmark."""
    found = judged.diagnosis.findings
    return {
        "planted": judged.planting.cause, "named": judged.named, "right": judged.right,
        "weight": round(found[0].weight, 3) if found else None,
    }  # fmt: skip
