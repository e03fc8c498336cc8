"""The container's CPU quota."""

import math

from kfp_gate.diagnosis.amounts import cores, duration, share
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.crowding import HELD, cores_used, quota_lost
from kfp_gate.diagnosis.hypotheses.device import device_busy_share
from kfp_gate.diagnosis.measured.observations import Observations
from kfp_gate.diagnosis.measured.quantities import Unknown, reason


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Whether the kernel held this run's processes back for their quota."""
    first = seen.first
    if first is None:
        return [Unjudged("cpu_quota", ("no steady steps",))]
    quota = first.conditions.get("cpu_quota")
    if isinstance(first.throttled, Unknown):
        return [Unjudged("cpu_quota", (f"throttling of the container: {first.throttled.reason}",))]
    held, lost, used = first.throttled.value, quota_lost(seen), cores_used(seen)
    if lost is None or used is None:
        return [Unjudged("cpu_quota", (f"CPU of this process: {reason(first.cpu)}",))]
    weight = seen.share(lost * first.step_s)
    evidence, against = [], []
    if held >= HELD:
        evidence.append(f"each second the kernel holds processes of this container back for {duration(held)} in all, "
                        f"since their quota is used up; they run for {duration(used)}")  # fmt: skip
    else:
        against.append("the kernel never held this container back for its quota")
    if quota:
        evidence.append(f"the quota is {cores(float(quota))}, the machine has {cores(first.conditions.get('cpus'))}")
        wanted = used + held
        if wanted <= quota:
            against.append(f"on average it wants only {cores(wanted)}: the quota is short in bursts")
    busy = device_busy_share(first)
    if busy is not None and weight > 1 - busy:
        weight = max(0.0, 1 - busy)
        against.append(f"the device computes {share(busy)} of the time all the same")
    title = f"{share(weight)} of the time is lost to the container's CPU quota"
    title += f" of {cores(float(quota))}" if quota else ""
    return [
        Finding(
            "cpu_quota", title if held >= HELD else "the container's CPU quota never held it back", weight,
            tuple(evidence), tuple(against),
            next_check="watch `cat /sys/fs/cgroup/cpu.stat` in the pod: nr_throttled must stand still with a higher "
            "`cpu` limit, or with none",
            refuted_by="steps that take as long with twice the limit",
            missing=() if quota else ("the quota itself: not readable",),
            detail={"advice": f"Raise the container's CPU limit to {_cores_wanted(used + held)}",
                    "throttled_s_per_s": held, "used_cores": used, "quota": quota, "lost": lost},
        )
    ]  # fmt: skip


def _cores_wanted(value: float) -> str:
    whole = max(1, math.ceil(value))
    return f"{whole} core{'s' if whole > 1 else ''}"
