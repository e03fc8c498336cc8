"""What a run's timelines say in numbers: per rank, over its steady steps, and per epoch. Judges nothing.

Steady steps are those after the warm-up, on images as they come and without a profiler (`steady`). Readings of the
sampler are those taken during them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from kfp_gate.diagnosis.measured.quantities import Measured, Unknown, Value
from kfp_gate.diagnosis.measured.steady import COMPUTE
from kfp_gate.diagnosis.reading.runs import Line, Run


@dataclass(frozen=True)
class Part:
    """One part of preparation, per batch: wall seconds, CPU seconds and calls; None is unknown."""

    wall: float
    cpu: float | None
    calls: float | None

    @property
    def blocked(self) -> float | None:
        """Seconds in which it did not run."""
        return max(0.0, self.wall - self.cpu) if self.cpu is not None else None


@dataclass(frozen=True)
class Loading:
    """Preparation of a batch, summed over the processes that made it.

    Attributes:
        parts: by name, without what lies inside of another part.
        batches: that were measured.
        bytes: read from files per batch.
        ready: mean number of batches that waited when one was asked for; None without loader processes, or unknown.
        queued: seconds that these processes waited for a core for each that they had one; infinite if unknown.
        cold, warm: seconds of reading a file in the first epoch, and later; None if there are not both.
    """

    parts: Mapping[str, Part]
    batches: int
    bytes: float | None
    ready: float | None
    queued: float = math.inf
    cold: float | None = None
    warm: float | None = None

    @property
    def wall(self) -> float:
        return sum(p.wall for p in self.parts.values())

    @property
    def cpu(self) -> float | None:
        found = [p.cpu for p in self.parts.values()]
        return None if None in found else sum(c for c in found if c is not None)

    @property
    def stretch(self) -> float:
        """Wall over CPU seconds of the parts that compute: above 1 they wait for a core.

        The median over the CPU seconds of the parts, and no more than the scheduler says that was waited for a core: a
        part may also wait for something else.
        """
        ratios = sorted(
            (p.wall / p.cpu, p.cpu) for n, p in self.parts.items() if p.cpu and n not in ("open", "read")
        )  # fmt: skip
        whole, so_far = sum(cpu for _, cpu in ratios), 0.0
        for ratio, cpu in ratios:
            so_far += cpu
            if so_far >= whole / 2:
                return max(1.0, min(ratio, 1 + self.queued))
        return 1.0


@dataclass(frozen=True)
class GpuReadings:
    """What NVML said during the steps: shares 0..1, MHz, watts.

    Attributes:
        util: share of time in which any kernel ran.
        slowed: share of samples with a reason that slows the device for heat or power, by reason.
        clock, clock_slowed: mean clock without and with such a reason.
        top_clock: the highest clock of a sample without such a reason; board_clock: what the board may reach.
    """

    name: str
    util: Measured
    power: Measured
    slowed: Mapping[str, float] | Unknown
    clock: Measured
    clock_slowed: Measured
    top_clock: Measured
    board_clock: Measured


@dataclass(frozen=True)
class RankSeen:
    """One rank. Seconds are per step; CPU is in cores; shares are 0..1.

    Attributes:
        step: seconds of a step, spread over the windows.
        phases: seconds a step by phase, host clock, with the spread over the windows.
        device: seconds a step by phase on the device's clock; None without one.
        loading: preparation of a batch.
        workers: loader processes.
        cpu, thread: of this process and of its busiest thread; loaders, loaders_top: of all loader processes and of the
            busiest of them.
        waiting: share of loader processes that waited for a disk (state D).
        queued: share of the time in which the main thread could run and got no core; loaders_queued: the same of the
            loader processes, the mean over them.
        blocked: share of the time in which loader processes waited for block devices.
        throttled: seconds a second that the container's processes were held back by the CPU quota.
        pressure: share of time in which some task waited, by resource (cpu, io, memory).
        faults: major page faults a second.
        bytes: moved to the device per step.
    """

    rank: int
    node: str
    cuda: bool
    steps: int
    step: Measured
    phases: Mapping[str, Value]
    device: Mapping[str, float] | None
    workers: int | None
    loading: Loading | Unknown
    cpu: Measured
    thread: Measured
    loaders: Measured
    loaders_top: Measured
    queued: Measured
    loaders_queued: Measured
    waiting: Measured
    blocked: Measured
    throttled: Measured
    pressure: Mapping[str, Measured]
    faults: Measured
    bytes: Measured
    gpu: GpuReadings | Unknown
    conditions: Line = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.step.value if isinstance(self.step, Value) else 0.0

    def phase(self, *names: str) -> float:
        """Seconds a step, host clock."""
        return sum(self.phases[n].value for n in names if n in self.phases)

    @property
    def computing(self) -> float:
        return self.phase(*COMPUTE, "optimizer")


@dataclass(frozen=True)
class EpochSeen:
    """A steady epoch of rank 0 in seconds, typical of the epochs of the last attempt (`measuring.typical`).

    `counted` is how many epochs ended: with 0, the epoch is its steps alone.
    """

    steps: int
    in_steps: float
    validation: float
    checkpoint: float
    between: float
    waited: Measured
    counted: int

    @property
    def total(self) -> float:
        return self.in_steps + self.validation + self.checkpoint + self.between


@dataclass(frozen=True)
class Observations:
    """All that is known. `ranks` are those with steady steps; `epoch` is None without any of rank 0."""

    run: Run
    ranks: tuple[RankSeen, ...]
    epoch: EpochSeen | None
    cuda: bool | None
    cores: float | None
    ranks_on_node: int
    profile: Line = field(default_factory=dict)
    probes: Mapping[str, Line] = field(default_factory=dict)

    @property
    def first(self) -> RankSeen | None:
        """The rank that stands for the run: 0, or the first that is known."""
        return self.ranks[0] if self.ranks else None

    def share(self, seconds_a_step: float) -> float:
        """Share of the run's time that so many seconds in each step are."""
        first = self.first
        if first is None or first.step_s <= 0 or self.epoch is None or self.epoch.total <= 0:
            return 0.0
        return min(1.0, max(0.0, seconds_a_step / first.step_s * self.epoch.in_steps / self.epoch.total))

    def share_of_epoch(self, seconds: float) -> float:
        """Share of the run's time that so many seconds in each epoch are."""
        if self.epoch is None or self.epoch.total <= 0:
            return 0.0
        return min(1.0, max(0.0, seconds / self.epoch.total))
