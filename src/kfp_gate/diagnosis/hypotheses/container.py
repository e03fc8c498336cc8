"""The container's CPU quota."""

from kfp_gate.diagnosis.amounts import cores, duration, share
from kfp_gate.diagnosis.findings import Finding, Unjudged
from kfp_gate.diagnosis.hypotheses.device import device_busy_share
from kfp_gate.diagnosis.observations import Observations
from kfp_gate.diagnosis.quantities import Unknown, known, reason


def judge(seen: Observations) -> list[Finding | Unjudged]:
    """Whether the kernel held this run's processes back for their quota.

    A process that may run r of every second and stands s of it has used r / (r + s) of what it wanted. With several
    processes both are sums over the cores, and the share that was lost stays s / (r + s).
    """
    first = seen.first
    if first is None:
        return [Unjudged("cpu_quota", ("no steady steps",))]
    quota = first.conditions.get("cpu_quota")
    if isinstance(first.throttled, Unknown):
        return [Unjudged("cpu_quota", (f"throttling of the container: {first.throttled.reason}",))]
    held = first.throttled.value
    used = 0.0
    for rank in (r for r in seen.ranks if r.node == first.node):
        main = known(rank.cpu)
        if main is None:
            return [Unjudged("cpu_quota", (f"CPU of this process: {reason(rank.cpu)}",))]
        used += main + (known(rank.loaders) or 0.0)
    if quota:
        # What others in the container use counts against the same quota.
        used = max(used, 0.0) if held < 0.01 else max(used, float(quota) * 0.9)
    lost = held / (used + held) if used + held > 0 else 0.0
    weight = seen.share(lost * first.step_s)
    evidence, against = [], []
    if held >= 0.01:
        evidence.append(f"each second the kernel holds processes of this container back for {duration(held)} in all, "
                        f"since their quota is used up; they ran for {duration(used)}")  # fmt: skip
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
            "cpu_quota", title if held >= 0.01 else "the container's CPU quota never held it back", weight,
            tuple(evidence), tuple(against),
            next_check="watch `cat /sys/fs/cgroup/cpu.stat` in the pod: nr_throttled must stand still with a higher "
            "`cpu` limit, or with none",
            refuted_by="steps as slow with twice the limit",
            missing=() if quota else ("the quota itself: not readable",),
            detail={"advice": f"Raise the container's CPU limit to about {max(1, round(used + held + 0.4))} cores",
                    "throttled_s_per_s": held, "used_cores": used, "quota": quota, "lost": lost},
        )
    ]  # fmt: skip
