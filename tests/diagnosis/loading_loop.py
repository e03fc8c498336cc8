"""A loop over a real torch DataLoader whose costs are known, writing the timeline that a worker writes.

    python loading_loop.py OUT '{"workers": 2, "transform": 0.02, ...}'

Every cost is slept, or spun where `spin` says so: the loader's own machinery, its processes and its queue are real.
"""

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from kfp_gate.observing import loading
from kfp_gate.observing.cores import usable_cores
from kfp_gate.observing.phases import BACKWARD, CHECKPOINT, FORWARD, OPTIMIZER, OTHER, TRANSFER, VALIDATION, Phases
from kfp_gate.observing.sampler import Sampler
from kfp_gate.observing.timeline import Timeline
from kfp_gate.training.windows import Windows


@dataclass(frozen=True)
class Costs:
    """Seconds: reading and transforming an image; forward, backward and optimizer a step; validation an epoch."""

    workers: int = 0
    read: float = 0.002
    transform: float = 0.01
    spin: float = 0.0
    forward: float = 0.005
    backward: float = 0.01
    optimizer: float = 0.002
    validation: float = 0.3
    batch: int = 2
    steps: int = 30
    epochs: int = 3
    slow_every: int = 0
    slow: float = 0.0


class Images:
    def __init__(self, costs):
        self.costs = costs

    def __len__(self):
        return self.costs.batch * self.costs.steps * self.costs.epochs

    def __getitem__(self, index):
        with loading.PARTS.during("read"):
            time.sleep(self.costs.read)
        with loading.PARTS.during("transform:Slowed"):
            time.sleep(self.costs.transform)
            if self.costs.slow_every and index % self.costs.slow_every == 0:
                time.sleep(self.costs.slow)
            if self.costs.spin:
                spin(self.costs.spin)
        return torch.full((3, 8, 8), float(index))


def spin(seconds):
    """Work for so much CPU time, however many share the core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def main(out: Path, costs: Costs) -> None:
    torch.set_num_threads(1)
    timeline = Timeline(out / "timeline.jsonl", run="loop", rank=0, node="here", gpu=None)
    timeline.write("start", pid=0, versions={}, ranks={"rank": 0, "world_size": 1})
    phases = Phases()
    windows = Windows(timeline, phases)
    loader = DataLoader(
        loading.TimedItems(Images(costs)), batch_size=costs.batch, num_workers=costs.workers,
        collate_fn=loading.TimedCollate(torch.stack), prefetch_factor=2 if costs.workers else None,
    )  # fmt: skip
    timeline.write(
        "conditions", workers=costs.workers, prefetch=2 if costs.workers else None, steps_per_epoch=costs.steps,
        epochs=costs.epochs, batch=costs.batch, ranks=1, device="cpu", cpus=usable_cores(), cpu_quota=None,
        settings={}, manifests={},
    )  # fmt: skip
    sampler = Sampler(timeline, every_s=0.25)
    sampler.start()
    # One iterator over all epochs, as the training's own loader has: it goes on while validation runs.
    batches = iter(loader)
    for epoch in range(1, costs.epochs + 1):
        timeline.phase = "train"
        windows.begin(epoch, (epoch - 1) * costs.steps)
        for _ in range(costs.steps):
            batch, made = loading.unwrap(next(batches))
            phases.enter(TRANSFER)
            batch = batch.contiguous()
            for phase, seconds in ((FORWARD, costs.forward), (BACKWARD, costs.backward), (OPTIMIZER, costs.optimizer)):
                phases.enter(phase)
                time.sleep(seconds)
            windows.step(images=len(batch), moved=batch.nbytes, made=made, ready=None)
        windows.end()
        timeline.phase = "validate"
        with phases.during(VALIDATION):
            time.sleep(costs.validation)
        with phases.during(CHECKPOINT):
            pass
        phases.enter(OTHER)
        times = phases.take()
        timeline.write("phases", epoch=epoch, seconds=times.seconds, steps=times.steps, device=None)
    sampler.stop()
    timeline.write("end", exit_code=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Costs(**{**asdict(Costs()), **json.loads(sys.argv[2])}))
