"""Starts ranks as pods would: each in a mount namespace of its own, the data read-only, nothing shared."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kfp_gate.launching.processes import free_port

HERE = Path(__file__).parent

SETUP = """set -e
mount --make-rprivate /
mount --bind "$KG_DATA" "$KG_DATA"; mount -o remount,bind,ro "$KG_DATA"
mount --bind "$KG_PRIVATE" "$KG_OUT"
mount -t tmpfs tmpfs "$KG_OTHERS"
exec "$@"
"""


@dataclass(frozen=True)
class Rank:
    """What one rank printed and wrote; `folder` is its private view of the out folder."""

    code: int
    output: str
    folder: Path

    def lines(self, prefix: str) -> list[dict[str, Any]]:
        return [json.loads(x.removeprefix(prefix)) for x in self.output.splitlines() if x.startswith(prefix)]

    @property
    def failure(self) -> dict[str, Any]:
        return self.lines("KFP_GATE_FAILURE ")[-1]


@dataclass
class Running:
    """Ranks that run; their private folders lie under `home`."""

    processes: list[subprocess.Popen[str]]
    logs: list[Path]
    folders: list[Path]

    def wait(self, timeout: float = 240) -> list[Rank]:
        codes = [p.wait(timeout) for p in self.processes]
        return [
            Rank(c, log.read_text(encoding="utf-8"), f)
            for c, log, f in zip(codes, self.logs, self.folders, strict=True)
        ]


def start(
    home: Path, data: Path, plan: Sequence[Mapping[str, Any]], *, ranks: int,
    environment: Mapping[str, str] | None = None,
) -> Running:  # fmt: skip
    """Start a plan of `drive.py` on some ranks.

    Args:
        home: a new folder. Every rank sees `home/out`, each its own; `home/shared` is the object storage.
        data: mounted read-only.
        plan: items of `drive.py` without `out` and `port`.
    """
    for name in ("out", "others", "storage"):
        (home / name).mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in plan]
    items = [
        {"out": str(home / "out" / f"{i}"), "port": port, **item}
        for i, (item, port) in enumerate(zip(plan, ports, strict=True))
    ]
    (home / "plan.json").write_text(json.dumps(items), encoding="utf-8")
    running = Running([], [], [])
    for rank in range(ranks):
        private = home / "others" / f"rank{rank}"
        private.mkdir(parents=True, exist_ok=True)
        env = {
            **os.environ, "OMP_NUM_THREADS": "1", "KG_DATA": str(data), "KG_PRIVATE": str(private),
            "KG_OUT": str(home / "out"), "KG_OTHERS": str(home / "others"), "PYTHONUNBUFFERED": "1",
            **({"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"} if ranks > 1 else {}),
            **(environment or {}),
        }  # fmt: skip
        log = home / f"rank{rank}.log"
        isolate = ["unshare", *([] if os.geteuid() == 0 else ["--map-root-user"]), "--mount", "--"]
        with log.open("w", encoding="utf-8") as handle:
            running.processes.append(subprocess.Popen(
                [*isolate, "sh", "-c", SETUP, "sh", sys.executable, str(HERE / "drive.py"), str(home / "plan.json")],
                stdout=handle, stderr=subprocess.STDOUT, text=True, env=env,
            ))  # fmt: skip
        running.logs.append(log)
        running.folders.append(private)
    return running
