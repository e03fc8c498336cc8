"""Run the command line as a user does, and look at what it left behind."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = "base_model=yolo11n.yaml:depth=0.33,width=0.125"


@dataclass(frozen=True)
class Run:
    """One finished command: exit code, what it printed, and the run's folder."""

    code: int
    text: str
    folder: Path

    @property
    def log(self) -> str:
        """Everything that the runner and the steps printed."""
        return (self.folder / "run.log").read_text(encoding="utf-8")

    @property
    def events(self) -> dict[str, dict[str, Any]]:
        """The last event of each step that started."""
        lines = (self.folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return {e["step"]: e for e in map(json.loads, lines)}

    def artifact(self, step: str, name: str) -> Path:
        """An output of a step of this run."""
        (found,) = self.folder.glob(f"steps/*/{step}/{name}")
        return found


def kfp_gate(*arguments: str, out: Path) -> Run:
    """Run the command line in a folder of its own and wait for its end."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "AWS_"))}
    (out / "tmp").mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "kfp_gate.cli", *arguments, "--out", str(out)],
        cwd=out, capture_output=True, text=True, check=False,
        env={**environment, "COLUMNS": "200", "TMPDIR": str(out / "tmp")},
    )  # fmt: skip
    newest = max((out / "runs").iterdir(), key=lambda p: p.stat().st_mtime)
    return Run(done.returncode, done.stdout + done.stderr, newest)


def parameters(**values: Any) -> list[str]:
    """Arguments `-p name=value` for `kfp-gate run`."""
    return [
        part
        for name, value in values.items()
        for part in ("-p", f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
    ]
