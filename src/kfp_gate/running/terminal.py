"""What a person sees while a pipeline runs on this machine, and the one screen at its end."""

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kfp_gate.running.local import GATES, LOG_FILE, RunState

_DOING = {
    "split_dataset": "splitting the dataset",
    "preflight": "checking what could fail later",
    "launch_training": "training",
    "validation_gate": "judging on the test set",
    "register_model": "registering",
    "record_outcome": "recording the outcome",
    "judge_evaluation": "judging a stored evaluation",
    "diagnose_training": "looking for what held it back",
}

_STYLES = {"met": "green", "missed": "bold red", "insufficient": "yellow", "waived": "magenta"}
_SHOWN = 40


class Terminal:
    """Live progress: one line for each step, with a bar and the time left while training.

    Where the output is no terminal (a CI log), each step prints one line when it ends.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.console = Console(highlight=False, soft_wrap=True)
        self.bars = Progress(
            SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description:<34}"), BarColumn(bar_width=24),
            TextColumn("{task.fields[note]}"), TimeElapsedColumn(), console=self.console,
        )  # fmt: skip
        self.tasks: dict[str, TaskID] = {}
        self.begun = time.monotonic()

    def __enter__(self) -> Self:
        self.console.print(f"log: {self.folder / LOG_FILE}", style="dim")
        if self.console.is_terminal:
            self.bars.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.bars.stop()

    def update(self, state: RunState) -> None:
        """Show what changed."""
        for name, event in state.events.items():
            new = name not in self.tasks
            if new:
                self.tasks[name] = self.bars.add_task(_DOING.get(name, name), total=None, note="")
            task = self.tasks[name]
            if event["state"] == "started" and name == "launch_training" and state.progress:
                self._training(task, state.progress)
            if event["state"] in ("done", "failed") and not self.bars.tasks[task].finished:
                note = "" if event["state"] == "done" else "failed"
                self.bars.update(task, total=1, completed=1, note=note)
                if not self.console.is_terminal:
                    end = "done" if event["state"] == "done" else "FAILED"
                    self.console.print(
                        f"[{time.monotonic() - self.begun:4.0f} s] {_DOING.get(name, name)}: {end}", markup=False
                    )

    def _training(self, task: TaskID, progress: Mapping[str, Any]) -> None:
        epoch, epochs = progress.get("epoch", 0), progress.get("epochs", 0)
        left = progress.get("eta_s")
        note = f"epoch {epoch}/{epochs}" + (f", {left:.0f} s left" if left is not None else "")
        if not self.console.is_terminal and self.bars.tasks[task].completed != epoch:
            self.console.print(f"[{time.monotonic() - self.begun:4.0f} s] training: {note}", markup=False)
        self.bars.update(task, total=epochs or None, completed=epoch, note=note)

    def summary(self, state: RunState, arguments: Mapping[str, Any]) -> None:
        """One screen: the per-class table, the verdict, what was registered, where the reports are."""
        print_ = self.console.print
        for note in state.result("split_dataset").get("notes", []):
            print_(Text(f"note: {note}", style="yellow"))
        if state.failed is not None:
            print_(Text(f"\n{state.failed['step']} failed", style="bold red"))
            print_(Text(str(state.failed["message"])))
            print_(f"\nwhole log: {self.folder / LOG_FILE}", markup=False)
            return
        if answer := state.result("diagnose_training").get("answer"):
            print_(Text(answer, style="bold"))
        gate = next((g for name in GATES if (g := state.result(name))), {})
        if gate:
            print_(_verdict_table(json.loads(Path(gate["verdict"]).read_text(encoding="utf-8"))))
            style, word = ("bold green", "PASSED") if gate["passed"] else ("bold red", "REFUSED")
            print_(Text(f"{word}: {gate['summary'].partition(': ')[2]}", style=style))
        registered = state.result("register_model")
        if registered.get("version"):
            print_(f"registered: {registered['name']} version {registered['version']}"
                   + (f" as @{registered['alias']}" if registered.get("alias") else ""), markup=False)  # fmt: skip
        elif gate:
            print_("registered: nothing" + ("" if gate["passed"] else " (the gate refused)"), markup=False)
        for name, path in (
            ("report", gate.get("report")),
            ("diagnosis", state.result("diagnose_training").get("report")),
            ("coverage", state.result("split_dataset").get("coverage")),
            ("training", state.result("launch_training").get("training")),
        ):
            if path:
                # KFP's artifacts have no suffix, and a browser goes by it.
                page = self.folder / f"{name}.html"
                shutil.copyfile(path, page)
                print_(f"{name + ':':<12}{page}", markup=False)
        if "tracking_uri" in arguments:
            print_(f"{'tracking:':<12}{arguments['tracking_uri']}", markup=False)


def _verdict_table(verdict: Mapping[str, Any]) -> Table:
    """Criterion by criterion; of very many, those that are not met come first and the rest is counted."""
    table = Table(box=None, pad_edge=False)
    for column in ("criterion", "value", "bound", "instances", "state"):
        table.add_column(column, justify="left" if column in ("criterion", "state") else "right")
    entries = sorted(verdict["entries"], key=lambda e: e["state"] == "met")
    for entry in entries[:_SHOWN]:
        value, sign = entry["value"], {"min": "≥", "max": "≤", "max_drop": "drop ≤"}[entry["kind"]]
        table.add_row(
            Text(entry["metric"]),
            "not computed" if value is None else f"{value:.3f}",
            f"{sign} {entry['bound']:g}",
            "" if entry["instances"] is None else str(entry["instances"]),
            Text(entry["state"], style=_STYLES[entry["state"]]),
        )
    if len(entries) > _SHOWN:
        table.add_row(f"... and {len(entries) - _SHOWN} more, all met or in the report")
    return table
