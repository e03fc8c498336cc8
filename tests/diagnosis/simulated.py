"""A simulated training that writes the lines that a worker writes: loader processes, a queue, steps, ranks that meet.

Costs are given, and everything that a timeline shows follows from them by simulation: which batch is ready when, how
long a step waits, who waits for whom. Nothing here knows how a diagnosis judges.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from kfp_gate.diagnosis.reading.runs import Run, read_run

START = datetime(2026, 11, 30, 9, 0, 0, tzinfo=timezone(timedelta(hours=9)))
WINDOW_S, WARM = 5.0, 3
COMPUTE = ("forward", "loss", "backward", "optimizer")

PARTS = {
    "open": (0.002, 0.002), "read": (0.002, 0.002), "decode": (0.020, 0.020), "resize": (0.005, 0.005),
    "labels": (0.001, 0.001), "transform:Mosaic": (0.015, 0.015), "transform:RandomPerspective": (0.018, 0.018),
    "collate": (0.002, 0.002), "other": (0.001, 0.001),
}  # fmt: skip
"""Wall and CPU seconds of an ordinary batch of 16 images: 66 ms."""


@dataclass(frozen=True)
class Training:
    """What it costs. Seconds a step, a batch or an epoch.

    Attributes:
        parts: preparation of a batch: (wall, CPU).
        step: transfer, forward, loss, backward, optimizer on the host.
        device: the same on the device's clock, or None on a CPU.
        rank_step: changes of `step` for one rank; rank_parts: of `parts`.
        stretch: what a core that is shared makes of preparation's and the step's times.
        validation: parts an epoch; checkpoint, waited: standing still, and of it waiting for an upload.
        redo: epochs that are done twice: not finite.
        died: (epoch, batch) after which the worker is gone, and another resumes.
        sample: what each sample says besides, by key.
        throttled: seconds a second.
    """

    parts: Mapping[str, tuple[float, float]] = field(default_factory=lambda: dict(PARTS))
    step: Mapping[str, float] = field(default_factory=lambda: {
        "transfer": 0.001, "forward": 0.1, "loss": 0.01, "backward": 0.2, "optimizer": 0.01,
    })  # fmt: skip
    device: Mapping[str, float] | None = None
    workers: int = 0
    workers_most: int | None = None
    prefetch: int = 2
    ranks: int = 1
    rank_step: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    rank_parts: Mapping[int, Mapping[str, tuple[float, float]]] = field(default_factory=dict)
    stretch: float = 1.0
    steps: int = 60
    epochs: int = 3
    images: int = 16
    file_bytes: int = 150_000
    files: int = 16
    validation: Mapping[str, float] = field(default_factory=lambda: {"load": 0.2, "forward": 0.6, "gather": 0.01})
    val_images: int = 100
    checkpoint: float = 0.3
    waited: float = 0.0
    upload: float = 0.5
    redo: tuple[int, ...] = ()
    died: tuple[int, int] | None = None
    cores: int = 8
    quota: float | None = None
    pinned: bool = True
    sample: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    main_cpu: float = 1.0
    queued: float = 0.0
    loaders_queued: float = 0.0
    waiting: float = 0.0
    throttled: float = 0.0
    gpu: Mapping[str, Any] | None = None
    extra: Sequence[Mapping[str, Any]] = ()
    ended: bool = True
    seed: int = 0

    def but(self, **changes: Any) -> "Training":
        return replace(self, **changes)

    def with_parts(self, **parts: tuple[float, float]) -> "Training":
        """Other costs of some parts; `transform_X` is `transform:X`."""
        return replace(
            self, parts={**self.parts, **{k.replace("transform_", "transform:"): v for k, v in parts.items()}}
        )


def write(training: Training, folder: Path) -> Path:
    """The folder of a worker, as if all ranks had written into it."""
    simulation = _Simulation(training)
    simulation.run()
    for rank, lines in enumerate(simulation.lines):
        path = folder / f"rank{rank}" / "timeline.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return folder


def simulate(training: Training, folder: Path) -> Run:
    """As it is read back."""
    return read_run(str(write(training, folder)), folder / "scratch")


class _Simulation:
    def __init__(self, training: Training) -> None:
        self.training, self.random = training, random.Random(training.seed)
        self.lines: list[list[dict[str, Any]]] = [[] for _ in range(training.ranks)]
        self.now = [0.0] * training.ranks
        self.held = [0.0] * training.ranks

    def write(self, rank: int, kind: str, phase: str = "", *, at: float | None = None, **values: Any) -> None:
        moment = self.now[rank] if at is None else at
        self.lines[rank].append({
            "kind": kind, "time": (START + timedelta(seconds=moment)).isoformat(timespec="milliseconds"),
            "mono": round(1000 + moment, 4), "run": "", "rank": rank, "node": f"node-{rank}", "phase": phase, **values,
        })  # fmt: skip

    def run(self) -> None:
        t = self.training
        self.begin()
        epoch, redone = 1, set()
        self.loaders = [_Loader(t, rank, self.random, self.now[rank]) for rank in range(t.ranks)]
        while epoch <= t.epochs:
            stop = t.died[1] if t.died and t.died[0] == epoch and "died" not in redone else None
            self.steps(epoch, stop)
            if stop is not None:
                redone.add("died")
                self.begin(resumed=epoch - 1)
                self.loaders = [_Loader(t, rank, self.random, self.now[rank]) for rank in range(t.ranks)]
                continue
            if epoch in t.redo and epoch not in redone:
                redone.add(epoch)
                for rank in range(t.ranks):
                    self.write(rank, "recover", reason=f"the loss or the weights are not finite in epoch {epoch}")
                continue
            self.after(epoch)
            epoch += 1
        for line in t.extra:
            self.write(0, **line)
        if t.ended:
            for rank in range(t.ranks):
                self.write(rank, "stop", reason="all epochs done")
                self.write(rank, "end", exit_code=0)
        for lines in self.lines:
            lines.sort(key=lambda line: line["mono"])

    def begin(self, resumed: int | None = None) -> None:
        t = self.training
        for rank in range(t.ranks):
            self.now[rank] = max(self.now) + (2.0 if rank == 0 else 0.0)
            places = {"rank": rank, "world_size": t.ranks, "local_rank": 0, "local_world_size": 1, "node_rank": rank}
            self.write(rank, "start", pid=100 + len(self.lines[rank]), versions={"torch": "2"}, ranks=places)
            if t.gpu is not None:
                self.write(rank, "gpu", **t.gpu)
            self.write(
                rank, "conditions", manifests={"train": "a", "val": "b"}, classes=2, train_images=t.steps * t.images,
                val_images=t.val_images, steps_per_epoch=t.steps, epochs=t.epochs, batch=t.images * t.ranks,
                rank_batch=t.images, ranks=t.ranks, workers=t.workers, workers_most=t.workers_most,
                prefetch=t.prefetch if t.workers else None,
                pin_memory=t.pinned, precision="fp32", image_size=640, device="cuda:0" if t.device else "cpu",
                gpu_name="GPU" if t.device else None, cpus=t.cores, cpu_quota=t.quota, memory_limit=None,
                monitors=["map50_95"], seed=0, base_model="yolo11n.yaml", sample_every_s=1.0, settings={},
            )  # fmt: skip
            if resumed is not None:
                self.write(rank, "resume", epoch=resumed, notes=[])
        self.warm = 0

    def steps(self, epoch: int, stop: int | None) -> None:
        t = self.training
        begun = list(self.now)
        windows = [_Window(self, rank, epoch) for rank in range(t.ranks)]
        for step in range(stop or t.steps):
            batch = (epoch - 1) * t.steps + step
            spent: list[dict[str, float]] = []
            for rank in range(t.ranks):
                own = {k: self.cost(v * t.stretch) for k, v in {**t.step, **t.rank_step.get(rank, {})}.items()}
                data, made = self.loaders[rank].next(self.now[rank])
                spent.append({"data": data, **own})
                windows[rank].made.append(made)
                self.now[rank] += data + own["transfer"] + own["forward"] + own["loss"]
            # Gradients are averaged: backward ends with the last.
            meet = max(self.now[r] + spent[r]["backward"] for r in range(t.ranks))
            for rank in range(t.ranks):
                windows[rank].met += meet - self.now[rank] - spent[rank]["backward"]
                spent[rank]["backward"] = meet - self.now[rank]
                self.now[rank] = meet + spent[rank]["optimizer"]
                windows[rank].add(batch, spent[rank])
            self.warm += 1
        for rank, window in enumerate(windows):
            window.flush()
            self.sample(rank, begun[rank], self.now[rank], "train", window.totals, window.cpu)
            self.totals = window.totals

    def after(self, epoch: int) -> None:
        t = self.training
        end = max(self.now)
        for rank in range(t.ranks):
            begun, self.now[rank] = self.now[rank], end + sum(t.validation.values())
            seconds = self.now[rank] - begun
            self.write(rank, "validation", "validate", epoch=epoch, seconds=seconds, images=t.val_images / t.ranks,
                       parts=dict(t.validation), threads=1)  # fmt: skip
            self.sample(rank, begun, self.now[rank], "validate", {}, 0.0)
            self.now[rank] += t.checkpoint + t.waited
            if rank == 0:
                self.write(rank, "checkpoint", "checkpoint", epoch=epoch, ok=True, seconds=t.checkpoint + t.waited,
                           waited_s=t.waited)  # fmt: skip
                self.write(rank, "upload", epoch=epoch, ok=True, seconds=t.upload, bytes=20_000_000)
            whole = {**self.totals, "validation": seconds, "checkpoint": t.checkpoint + t.waited, "other": 0.01}
            self.write(rank, "phases", epoch=epoch, seconds=whole, steps=t.steps, device=None)
            self.write(rank, "memory", epoch=epoch, rss=2 << 30, peak=2 << 30, children=0, cgroup=3 << 30,
                       limit=16 << 30, anon=2 << 30, file=1 << 30, shmem=0, oom_kills=0)  # fmt: skip
            if rank == 0:
                self.write(rank, "epoch", epoch=epoch, values={"map50_95": 0.1 * epoch}, losses={"box": 1.0})

    def sample(
        self, rank: int, begun: float, end: float, phase: str, spent: Mapping[str, float], loaders_cpu: float
    ) -> None:
        t, moment = self.training, begun
        length = max(1e-9, end - begun)
        busy = (length - (spent.get("data", 0.0) if t.workers else 0.0)) / length * t.main_cpu / t.stretch
        count = 0
        while moment + 1.0 <= end:
            moment += 1.0
            self.held[rank] += t.throttled
            values: dict[str, Any] = {
                "cpu": round(busy, 3), "cpu_thread": round(busy, 3), "queued": t.queued, "read": 0, "written": 0,
                "major_faults": 0,
                "loaders": {"count": t.workers, "cpu": round(loaders_cpu / length, 3) if t.workers else None,
                            "cpu_max": round(loaders_cpu / length / max(1, t.workers), 3) if t.workers else None,
                            "waiting": t.waiting if t.workers else None, "looks": 10, "read": 0,
                            "queued": t.loaders_queued if t.workers else None, "blocked": None},
                "throttled_periods": self.held[rank] * 10, "throttled_s": self.held[rank], "pressure_cpu": 0.0,
                "pressure_io": 0.0, "pressure_memory": 0.0, "rss": 2 << 30, "cgroup": 3 << 30, **t.sample,
            }  # fmt: skip
            if t.samples:
                values |= t.samples[count % len(t.samples)]
            if count == 0 and t.device is None:
                values["unknown"] = {"gpu": "this process uses no GPU"}
            self.write(rank, "sample", phase, at=moment, **values)
            count += 1

    def cost(self, seconds: float) -> float:
        return seconds * self.random.uniform(0.93, 1.07)


class _Window:
    """The steps since the last line, as the worker sums them."""

    def __init__(self, simulation: _Simulation, rank: int, epoch: int) -> None:
        self.simulation, self.rank, self.epoch = simulation, rank, epoch
        self.totals: dict[str, float] = {}
        self.made: list[dict[str, tuple[float, float]]] = []
        self.cpu = 0.0
        self.clear()

    def clear(self) -> None:
        self.seconds: dict[str, float] = {}
        self.each: list[list[float]] = []
        self.batches: list[int] = []
        self.met = 0.0

    def add(self, batch: int, spent: Mapping[str, float]) -> None:
        for name, value in spent.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + value
            self.totals[name] = self.totals.get(name, 0.0) + value
        self.each.append([spent["data"], sum(spent.values())])
        self.batches.append(batch)
        warm = self.simulation.warm < WARM
        if warm or sum(self.seconds.values()) >= WINDOW_S:
            self.flush(warm=warm)

    def flush(self, *, warm: bool = False) -> None:
        t, count = self.simulation.training, len(self.batches)
        if not count:
            return
        parts = {
            name: [sum(m[name][0] for m in self.made), sum(m[name][1] for m in self.made), t.files * count]
            for name in t.parts
        }
        self.cpu += sum(p[1] for p in parts.values())
        device = None
        if t.device is not None:
            work = {n: v * count for n, v in t.device.items()}
            work["backward"] += self.met
            whole = sum(self.seconds.values())
            device = {"data": max(0.0, whole - sum(work.values())), **work} if sum(work.values()) < whole else work
        self.simulation.write(
            self.rank, "window", "train", epoch=self.epoch, batches=[self.batches[0], self.batches[-1]], steps=count,
            images=count * t.images, warmup=warm, input="usual", profiled=False,
            seconds={k: round(v, 6) for k, v in self.seconds.items()}, device=device, each=self.each[:32],
            bytes=count * t.images * 3 * 640 * 640,
            loader={"batches": count, "parts": parts, "bytes": t.files * t.file_bytes * count,
                    "ready": (1.0 if self.seconds["data"] < 0.001 * count else 0.0) if t.workers else None},
        )  # fmt: skip
        self.made = []
        self.clear()


class _Loader:
    """Batches in order from processes that each make every w-th, at most `prefetch` each ahead."""

    def __init__(self, training: Training, rank: int, source: random.Random, now: float) -> None:
        self.training, self.rank, self.random = training, rank, source
        self.free = [now] * max(1, training.workers)
        self.asked: list[float] = []
        self.made: list[tuple[float, dict[str, tuple[float, float]]]] = []
        self.begun = now

    def next(self, now: float) -> tuple[float, dict[str, tuple[float, float]]]:
        """Seconds until the next batch is there, and what making it took."""
        t = self.training
        if not t.workers:
            made = self.make()
            return sum(w for w, _ in made.values()) + 0.0002, made
        index = len(self.asked)
        self.asked.append(now)
        while len(self.made) <= index:
            number = len(self.made)
            hand = number % t.workers
            ahead = number - t.workers * t.prefetch
            begin = max(self.free[hand], self.asked[ahead] if ahead >= 0 else self.begun)
            made = self.make()
            self.free[hand] = begin + sum(w for w, _ in made.values())
            self.made.append((self.free[hand], made))
        ready, made = self.made[index]
        return max(0.0, ready - now) + 0.0002, made

    def make(self) -> dict[str, tuple[float, float]]:
        t = self.training
        found = {}
        for name, (wall, cpu) in {**t.parts, **t.rank_parts.get(self.rank, {})}.items():
            factor = self.random.uniform(0.85, 1.15)
            found[name] = ((wall - cpu + cpu * t.stretch) * factor, cpu * factor)
        return found
