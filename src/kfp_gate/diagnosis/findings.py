"""What a diagnosis says: causes with their evidence, scenarios, growth of memory, and what could not be told."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 1

CAUSES = {
    "slow_reads": "reading files",
    "small_files": "opening many small files",
    "preparation_cpu": "preparing images on the CPU",
    "too_few_workers": "too few loader processes",
    "too_many_workers": "more loader processes than cores",
    "cpu_quota": "the container's CPU quota",
    "transfer": "copying batches to the device",
    "kernel_launch": "launching many small kernels",
    "rank_imbalance": "one rank that is slower than the others",
    "checkpoint_stall": "writing checkpoints",
    "upload_stall": "waiting for uploads",
    "validation": "validation",
    "memory_pressure": "memory pressure",
    "memory_growth": "memory that grows until its limit",
    "forked_copies": "copies of memory in loader processes",
    "gpu_throttling": "a GPU that slows itself down",
    "discarded_work": "work that is thrown away",
    "device_busy": "the device computes all the time",
}
"""Every cause that can be named, and how a sentence names it. `device_busy` is a state of health, not a fault."""

MEMORY_CAUSES = ("memory_pressure", "memory_growth", "forked_copies")
"""Causes whose weight is an urgency and not a share of the time."""

HEALTH = "device_busy"
"""The cause that is none: judged in every run, never named as a fault."""

BAR = 0.10
"""Share of the time that a cause must explain before it is named."""

STATES = ("cause", "no_cause", "not_enough")


@dataclass(frozen=True)
class Finding:
    """One hypothesis, judged.

    Attributes:
        cause: a key of `CAUSES`.
        title: one line, with the number that matters.
        weight: what the ranking goes by, 0..1. For time: the share of the run's time, without start and warm-up, that
            it explains. For memory: 1 if the limit is reached before the last epoch, less if later.
        evidence: what speaks for it.
        against: what speaks against it, or weakens it.
        next_check: the one observation or experiment that would tell it from its neighbours.
        refuted_by: what one would see if it were wrong.
        missing: observations that would have helped and are unknown, each with the reason.
        detail: numbers for programs, by name; null is unknown.
    """

    cause: str
    title: str
    weight: float
    evidence: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    next_check: str = ""
    refuted_by: str = ""
    missing: tuple[str, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unjudged:
    """A hypothesis for which there were not enough observations."""

    cause: str
    missing: tuple[str, ...]


def together(unjudged: Iterable[Unjudged]) -> dict[tuple[str, ...], list[str]]:
    """What is missing to the causes that miss the same, as a sentence names them."""
    found: dict[tuple[str, ...], list[str]] = {}
    for one in unjudged:
        found.setdefault(one.missing, []).append(CAUSES.get(one.cause, one.cause))
    return found


@dataclass(frozen=True)
class PhaseShare:
    """Time of one phase in a steady step: seconds a step with an interval, and its share of the step."""

    name: str
    seconds: float
    low: float
    high: float
    share: float


@dataclass(frozen=True)
class Scenario:
    """What an epoch would take if one thing were different. Seconds; low and high are a 90% interval."""

    change: str
    seconds: float
    low: float
    high: float
    note: str = ""


@dataclass(frozen=True)
class MemoryGrowth:
    """How one kind of memory develops.

    Attributes:
        what: rss, children, cgroup, anon, shmem, pss, cuda_reserved, ...
        phase: the phase in which it grows; "" if that cannot be told.
        since: the first epoch of the growth.
        slope: bytes an epoch, with a 90% interval.
        limit: bytes that it may reach; None: unknown.
        limit_epoch: the epoch in which the limit is reached at this rate; None: never, or unknown.
        text: one line for people.
    """

    what: str
    phase: str
    since: int
    slope: float
    low: float
    high: float
    limit: int | None
    limit_epoch: int | None
    text: str


@dataclass(frozen=True)
class Diagnosis:
    """The answer to "what held this run back".

    Attributes:
        where: what was diagnosed, as the user named it.
        state: one of `STATES`.
        answer: one sentence.
        findings: causes at or above `BAR`, first the heaviest.
        minor: causes that were judged and stay below the bar.
        unjudged: causes that could not be judged, and why.
        running: whether the run had not ended when it was read.
        conditions: what the run ran under, as its timeline says.
    """

    where: str
    state: str
    answer: str
    findings: tuple[Finding, ...] = ()
    minor: tuple[Finding, ...] = ()
    unjudged: tuple[Unjudged, ...] = ()
    phases: tuple[PhaseShare, ...] = ()
    epoch_s: float | None = None
    scenarios: tuple[Scenario, ...] = ()
    growth: tuple[MemoryGrowth, ...] = ()
    running: bool = False
    conditions: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """The diagnosis as JSON; null is unknown."""
        return json.dumps(asdict(self), ensure_ascii=False, indent=1, default=str)
