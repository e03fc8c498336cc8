"""The weights of each monitor's best epoch, until disk and storage have them."""

import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from kfp_gate.training.record import Record


@dataclass(frozen=True)
class _Unsaved:
    """Best weights that wait for the disk."""

    epoch: int
    value: float | None
    content: bytes


class BestWeights:
    """One file a monitor; what the disk or the store did not take is brought by a later epoch."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder, self.record = folder, record
        self._unsaved: dict[str, _Unsaved] = {}
        self._unstored: set[str] = set()

    def add(self, monitors: Iterable[str], epoch: int, values: Mapping[str, float | None], content: bytes) -> None:
        """These weights are the best of these monitors; they stay in memory until `save`."""
        self._unsaved |= {n: _Unsaved(epoch, values[n], content) for n in monitors}

    def save(self) -> None:
        """Write what is still in memory alone.

        Raises:
            OSError: the disk is full. It stays in memory and is tried again with the next epoch.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, unsaved in list(self._unsaved.items()):
            target = self.path(name)
            part = target.with_suffix(".part")
            part.write_bytes(unsaved.content)
            part.replace(target)
            self.record.weights[name] = {
                "epoch": unsaved.epoch, "value": unsaved.value, "file": f"best/{target.name}",
            }  # fmt: skip
            del self._unsaved[name]
            self._unstored.add(name)

    def put(self, step: Path) -> None:
        """Copy into a checkpoint's folder what no queued checkpoint has brought yet: also that of an epoch whose step
        came to nothing, since else a step would point at older weights than its monitors say."""
        (step / "best").mkdir()
        for name in sorted(self._unstored):
            shutil.copyfile(self.path(name), step / "best" / self.path(name).name)

    def queued(self) -> None:
        """What was put is on its way to the store."""
        self._unstored.clear()

    def path(self, monitor: str) -> Path:
        """Where a monitor's best weights lie."""
        return self.folder / f"{slot(monitor)}.pt"


def slot(monitor: str) -> str:
    """A file name that stands for a monitor, whatever characters it holds and in whatever order monitors are listed.

    >>> slot("class/a/map50")
    'best-2a01a1e3a3'
    """
    return f"best-{sha256(monitor.encode()).hexdigest()[:10]}"
