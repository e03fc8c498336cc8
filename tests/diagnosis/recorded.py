"""A run as its ranks would have recorded it, made up: for pages and texts, whose numbers are not the subject."""

import math
import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

from kfp_gate.diagnosis.findings import Diagnosis, Finding, MemoryGrowth, PhaseShare, Scenario, Unjudged
from kfp_gate.diagnosis.reading.runs import Run

GIB = 1 << 30
ZONE = timezone(timedelta(hours=9))
START = datetime(2026, 11, 30, 9, 0, 0, tzinfo=ZONE)
TRAIN_S, VALIDATE_S, CHECKPOINT_S = 100.0, 25.0, 4.0


def recorded(
    *,
    ranks: int = 2,
    epochs: int = 12,
    gpu: bool = True,
    mig: Sequence[int] = (),
    gaps: Sequence[tuple[float, float]] = (),
    sample_s: float = 1.0,
    window_s: float = 5.0,
    stretch: float = 1.0,
    ended: bool = True,
    name: str = "cones",
    where: str = "runs/cones",
    older: bool = False,
) -> Run:
    """Ranks that wait for their data half of the time.

    Args:
        ranks, epochs: how many.
        gpu: whether each has one; mig: ranks whose GPU does not tell its use.
        gaps: (from, to) in seconds since the start in which nothing was written.
        sample_s, window_s: how often.
        stretch: how much longer than about two minutes an epoch takes.
        ended: whether the run is over.
        name: stands where names come from outside.
        older: as a version wrote it that knew no windows.
    """
    return Run(
        where,
        {
            r: [
                line
                for line in _Rank(
                    r, ranks, epochs, gpu, r in mig, sample_s, window_s, stretch, ended, name, older
                ).lines()
                if not any(a < line["mono"] < b for a, b in gaps)
            ]
            for r in range(ranks)
        },
        {},
    )


class _Rank:
    def __init__(self, rank, ranks, epochs, gpu, mig, sample_s, window_s, stretch, ended, name, older):
        self.rank, self.ranks, self.epochs, self.gpu, self.mig = rank, ranks, epochs, gpu, mig
        self.sample_s, self.window_s, self.stretch, self.ended, self.name = sample_s, window_s, stretch, ended, name
        self.older = older
        self.random = random.Random(rank)
        self.written = []

    def line(self, at, kind, **values):
        self.written.append(
            {
                "kind": kind,
                "time": (START + timedelta(seconds=at)).isoformat(timespec="milliseconds"),
                "mono": at,
                "run": "ab12",
                "rank": self.rank,
                "node": f"{self.name}-node-{self.rank}",
                "gpu": f"GPU-{self.rank:08x}" if self.gpu else None,
                "phase": "",
                **values,
            }
        )

    def lines(self):
        self.line(
            0.0, "start", pid=7, versions={"torch": "2.14.1"}, ranks={"rank": self.rank, "world_size": self.ranks}
        )
        self.line(
            1.0,
            "gpu",
            uuid=f"GPU-{self.rank:08x}",
            name="NVIDIA H200",
            mig=self.mig,
            driver="570.1",
            unknown={"gpu_util": "NVML: not supported on a MIG instance"} if self.mig else {},
        ) if self.gpu else None
        self.line(
            6.0,
            "conditions",
            manifests={"train": "sha256:77aa", "val": "sha256:31cf"},
            classes=4,
            train_images=12800,
            val_images=2400,
            steps_per_epoch=400,
            epochs=self.epochs,
            batch=32,
            rank_batch=16,
            ranks=self.ranks,
            workers=4,
            prefetch=2,
            pin_memory=True,
            precision="bf16",
            image_size=640,
            device="cuda" if self.gpu else "cpu",
            gpu_name="NVIDIA H200" if self.gpu else None,
            cpus=8,
            cpu_quota=4.0,
            memory_limit=24 * GIB,
            monitors=["map50_95", f"class/{self.name}/map50"],
            stop_on="map50_95",
            patience=50,
            seed=0,
            base_model=f"{self.name}.yaml",
            sample_every_s=self.sample_s,
        )
        at, spans = 10.0, []
        for epoch in range(1, self.epochs + 1):
            train, validate = TRAIN_S * self.stretch, VALIDATE_S * self.stretch
            spans += [(at, at + train, "train"), (at + train, at + train + validate, "validate")]
            if not self.older:
                self._windows(at, train, epoch)
            at += train + validate
            self.line(
                at, "validation", epoch=epoch, seconds=validate, images=1200, parts={"forward": validate / 2}, threads=2
            ) if not self.older else None
            at += CHECKPOINT_S
            self.line(at, "checkpoint", epoch=epoch, ok=True, seconds=CHECKPOINT_S, waited_s=1.0)
            self.line(
                at,
                "phases",
                epoch=epoch,
                steps=400,
                device=None,
                seconds={
                    "data": 0.5 * train,
                    "transfer": 0.02 * train,
                    "forward": 0.2 * train,
                    "backward": 0.25 * train,
                    "optimizer": 0.03 * train,
                    "validation": validate,
                    "checkpoint": CHECKPOINT_S,
                },
            )
            grown = 4 * GIB + epoch * 180 * (1 << 20)
            self.line(
                at,
                "memory",
                epoch=epoch,
                rss=grown,
                peak=grown,
                children=4 * GIB,
                cgroup=grown + 6 * GIB,
                cgroup_peak=grown + 7 * GIB,
                limit=24 * GIB,
                anon=grown + 3 * GIB,
                file=3 * GIB,
                shmem=GIB // 4,
                pss=grown,
                children_pss=2 * GIB,
                oom_kills=0,
                cuda_reserved=21 * GIB if self.gpu else None,
                cuda_peak=22 * GIB if self.gpu else None,
            )
            if epoch == 3:
                self.line(at + 0.5, "recover", reason=f"the loss of {self.name} is not finite")
        if self.ended:
            self.line(at, "stop", reason="all epochs done")
            self.line(at + 1.0, "end", exit_code=0)
        self._samples(at, spans)
        return sorted(self.written, key=lambda line: line["mono"])

    def _windows(self, start, length, epoch):
        at, step = start, 0
        while at < start + length - 1e-6:
            seconds = min(self.window_s, start + length - at)
            at += seconds
            warmup = epoch == 1 and step < 20
            wait = 0.5 + 0.1 * math.sin(at / 40) + 0.1 * self.random.random()
            steps = max(1, round(seconds / 0.25))
            self.line(
                at,
                "window",
                epoch=epoch,
                batches=[step, step + steps - 1],
                steps=steps,
                images=16 * steps,
                warmup=warmup,
                input="usual",
                profiled=False,
                seconds={
                    "data": seconds * wait,
                    "transfer": 0.02 * seconds,
                    "forward": seconds * (1 - wait) * 0.4,
                    "loss": 0.04 * seconds,
                    "backward": seconds * (1 - wait) * 0.4,
                    "optimizer": 0.03 * seconds,
                },
                device={
                    "data": seconds * wait,
                    "transfer": 0.02 * seconds,
                    "forward": seconds * (1 - wait) * 0.3,
                    "backward": seconds * (1 - wait) * 0.55,
                    "optimizer": 0.02 * seconds,
                }
                if self.gpu
                else None,
                each=[[wait * 0.25, 0.25]] * 8,
                bytes=16 * steps * 3 * 640 * 640,
                loader={
                    "batches": steps,
                    "bytes": 16 * steps * 300_000,
                    "ready": 0.1,
                    "parts": {
                        "read": [0.05 * steps, 0.01 * steps, 16 * steps],
                        "decode": [0.12 * steps, 0.11 * steps, 16 * steps],
                        f"transform:{self.name}": [0.55 * steps, 0.54 * steps, 16 * steps],
                        "transform:Mosaic": [0.08 * steps, 0.08 * steps, 16 * steps],
                        "collate": [0.02 * steps, 0.02 * steps, steps],
                    },
                },
            )
            step += steps

    def _samples(self, end, spans):
        at, i, throttled, draw, quiet = 1.0, 0, 0.0, self.random.random, {}
        while at < end:
            while i + 1 < len(spans) and spans[i][1] < at:
                i += 1
            doing = spans[i][2] if spans[i][0] <= at <= spans[i][1] else "other"
            busy = {"train": 0.42, "validate": 0.8, "other": 0.03}[doing]
            throttled += 0.05 * draw() * self.sample_s
            util = None if self.mig or not self.gpu else min(1.0, max(0.0, busy + 0.4 * (draw() - 0.5)))
            gpu = {
                "gpu_util": util,
                "gpu_memory_used": 31 * GIB,
                "gpu_memory_total": 139 * GIB,
                "cuda_reserved": 21 * GIB,
                "cuda_peak": 22 * GIB,
                "gpu_sm_mhz": 1980,
                "gpu_power_w": 300 + 100 * draw(),
                "gpu_throttle": [],
            }
            self.line(
                at,
                "sample",
                phase={"validate": "validation"}.get(doing, doing),
                cpu=0.7 + 0.2 * draw(),
                cpu_thread=0.6 + 0.2 * draw(),
                loaders={
                    "count": 4,
                    "cpu": 3.4 + 0.5 * draw(),
                    "cpu_max": 0.97,
                    "waiting": 0.1 * draw(),
                    "read": 3_000_000 * draw(),
                },
                read=0,
                written=1000,
                major_faults=0,
                throttled_periods=3,
                throttled_s=throttled,
                pressure_cpu=0.2 * draw(),
                pressure_io=0.05 * draw(),
                pressure_memory=0.0,
                rss=4 * GIB,
                cgroup=(10 + 3 * at / end) * GIB,
                cgroup_peak=14 * GIB,
                anon=(7 + 3 * at / end) * GIB,
                file=3 * GIB,
                shmem=GIB // 4,
                oom_kills=0,
                net_rx=5_000_000 * draw(),
                net_tx=1000,
                **(gpu if self.gpu else {k: None for k in gpu}),
                **quiet,
            )
            if at == 1.0 and not self.gpu:
                self.written[-1]["unknown"] = {"gpu": "this process uses no GPU"}
            at += self.sample_s


def diagnosed(run: Run, name: str = "cones") -> Diagnosis:
    """What a diagnosis of such a run could say."""
    slow = Finding(
        "preparation_cpu",
        f"preparing images on the CPU takes 51% of the time, most of it in transform:{name}",
        0.51,
        evidence=(
            "51% of a step is a wait for the next batch (49% to 53%); on prepared input it takes 120 ms, not 247",
            f"transform:{name} takes 67% of the loaders' time, 34 ms an image, 98% of it computing",
            "the loaders use 3.6 of 4 cores, each one 0.97",
        ),
        against=("pressure of the container's CPU is low (11%)",),
        next_check=f"run with profile_steps=20 and look which function of transform:{name} takes the time",
        refuted_by="a step on prepared input is as slow as on the usual one",
        missing=("block device latency: not readable in this container",),
    )
    validation = Finding(
        "validation",
        "validation takes 19% of the time",
        0.19,
        evidence=("25.0 s of each epoch of 129 s", "its forward pass is 50% of it"),
        next_check="halve the val set, or validate every second epoch",
        refuted_by="epochs without validation are as long",
    )
    minor = (
        Finding(
            "checkpoint_stall", "writing checkpoints takes 3% of the time", 0.03, evidence=("4.0 s of each epoch",)
        ),
        Finding("transfer", "copying batches takes 2% of the time", 0.02, evidence=("5.0 ms a step, pinned",)),
    )
    growth = MemoryGrowth(
        "anon",
        "validation",
        2,
        180 * 2**20,
        171 * 2**20,
        189 * 2**20,
        24 * GIB,
        71,
        "memory of the processes grows by 180 MiB an epoch since epoch 2: at the limit in epoch 71",
    )
    return Diagnosis(
        where=run.where,
        state="cause",
        answer=f"The device waits half of each step for its data: transform:{name} takes 34 ms an image on the CPU.",
        findings=(slow, validation),
        minor=minor,
        unjudged=(
            Unjudged("gpu_throttling", ("throttle reasons of rank 1: NVML: not supported on a MIG instance",)),
            Unjudged("kernel_launch", ("no profile window",)),
        ),
        phases=(
            PhaseShare("data", 0.126, 0.121, 0.131, 0.51),
            PhaseShare("transfer", 0.005, 0.005, 0.005, 0.02),
            PhaseShare("forward", 0.048, 0.046, 0.05, 0.195),
            PhaseShare("loss", 0.01, 0.01, 0.01, 0.04),
            PhaseShare("backward", 0.05, 0.048, 0.052, 0.205),
            PhaseShare("optimizer", 0.0075, 0.007, 0.008, 0.03),
        ),
        epoch_s=129.0,
        scenarios=(
            Scenario("preparation twice as fast", 94.0, 90.0, 99.0),
            Scenario("preparation free", 79.0, 76.0, 83.0, "then the device sets the pace"),
            Scenario("device twice as fast", 118.0, 113.0, 124.0, "most of the gain is lost to the wait for data"),
            Scenario("no validation", 104.0, 101.0, 107.0),
        ),
        growth=(growth,),
        running=run.running,
        conditions=run.conditions,
        notes=("steps 1 to 20 are warm-up and not counted",),
    )
