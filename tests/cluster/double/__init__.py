"""A small Kubernetes API server for tests: strict where the real one is, and breakable on command.

Not a mock: the product talks to it over TLS through the real client. `test_goldens.py` replays recorded answers
of a real server against it.
"""

from double.cluster import Cluster, JobHandle, PodHandle

__all__ = ["Cluster", "JobHandle", "PodHandle"]
