"""The training record: what was watched, what each epoch gave, what was lost. One JSON file, versioned.

    record.json   schema_version, settings, manifests, versions, ranks, epochs (number, values of the monitors and the
                  overall metrics, losses, seconds), monitors, sanity, resumed, stopped, tracking, checkpoints, weights

Readers must tolerate unknown keys; null is "not computed" or "unknown".
"""

import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
PACKAGES = ("kfp-gate", "torch", "torchvision", "ultralytics", "numpy", "pillow", "opencv-python",
            "opencv-python-headless", "pyarrow", "mlflow-skinny")  # fmt: skip


@dataclass
class Record:
    """Grows while training runs; `values()` is what is written."""

    settings: dict[str, Any]
    manifests: dict[str, str]
    classes: tuple[str, ...]
    ranks: int
    device: str
    epochs: list[dict[str, Any]] = field(default_factory=list)
    monitors: list[dict[str, Any]] = field(default_factory=list)
    sanity: dict[str, Any] = field(default_factory=dict)
    resumed: dict[str, Any] = field(default_factory=dict)
    stopped: str = ""
    tracking: dict[str, Any] = field(default_factory=dict)
    checkpoints: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    not_computed: dict[str, str] = field(default_factory=dict)

    def values(self) -> dict[str, Any]:
        return {"schema_version": SCHEMA_VERSION, "versions": versions(), **vars(self)}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.values(), ensure_ascii=False, indent=1, default=str), encoding="utf-8")

    def adopt(self, earlier: dict[str, Any], monitors: tuple[str, ...]) -> None:
        """Continue an earlier record: its epochs stay, so that curves have no hole."""
        self.epochs = list(earlier.get("epochs", []))
        self.monitors = list(earlier.get("monitors", []))
        self.weights = {k: v for k, v in earlier.get("weights", {}).items() if k in monitors}


def versions() -> dict[str, str]:
    """Versions of what decides the numbers; what is not installed is left out."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
