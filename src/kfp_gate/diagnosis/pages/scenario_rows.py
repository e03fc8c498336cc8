"""The counterfactual table, made short: what saves nothing is named, not tabled; what many rows say is said once."""

from collections import Counter
from dataclasses import dataclass

from kfp_gate.diagnosis import amounts
from kfp_gate.diagnosis.findings import Diagnosis, Scenario

IDLE = 0.01
"""Share of the epoch below which a saving is not worth a row."""


@dataclass(frozen=True)
class ScenarioRow:
    """One change: its words, its note if no other row has the same, and the share of the epoch that it saves."""

    scenario: Scenario
    note: str
    saved: float

    @property
    def interval(self) -> str:
        return amounts.interval(self.scenario.low, self.scenario.high)


@dataclass(frozen=True)
class ScenarioTable:
    """The epoch as it is in seconds, rows, notes that hold for several of them, and changes that would save nothing."""

    now: float
    rows: tuple[ScenarioRow, ...]
    notes: tuple[str, ...]
    idle: tuple[str, ...]


def scenario_table(diagnosis: Diagnosis) -> ScenarioTable | None:
    """None if it is not known how long an epoch takes, or what would change it."""
    now = diagnosis.epoch_s
    if not now or not diagnosis.scenarios:
        return None
    notes = Counter(s.note for s in diagnosis.scenarios if s.note)
    shared = tuple(n for n, count in notes.items() if count > 1)
    rows = [ScenarioRow(s, "" if s.note in shared else s.note, 1 - s.seconds / now) for s in diagnosis.scenarios]
    idle = [r for r in rows if r.saved < IDLE]
    return ScenarioTable(
        now, tuple(r for r in rows if r not in idle), tuple(n[:1].upper() + n[1:] + "." for n in shared),
        tuple(r.scenario.change for r in idle),
    )  # fmt: skip
