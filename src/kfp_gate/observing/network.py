"""Bytes over the network interfaces that this process's network namespace has: the pod's (proc(5), /proc/net/dev)."""

from pathlib import Path

DOUBLES = ("ifb", "docker", "br-", "veth", "cni", "cali", "flannel", "cilium", "lxc", "virbr", "dummy", "tunl")
"""Interfaces that carry nothing out of the machine, or what another one counts as well. Seen on the host's network;
a pod has `eth0` and perhaps `net1`, and `lo`, which is left out too."""


def read_network(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes received and sent since the namespace's start; None if it has no interface. RDMA is not in these counts."""
    try:
        text = (root / "proc/self/net/dev").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    received = sent = 0
    found = False
    for line in text.splitlines():
        name, colon, rest = line.strip().partition(":")
        values = rest.split()
        if (
            not colon
            or name == "lo"
            or name.startswith(DOUBLES)
            or len(values) < 9
            or not (values[0] + values[8]).isdigit()
        ):
            continue
        found = True
        received += int(values[0])
        sent += int(values[8])
    return (received, sent) if found else None
