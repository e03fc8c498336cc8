"""The API-server double, running, for each test that asks for it."""

from pathlib import Path

import pytest
from double import Cluster


@pytest.fixture
def cluster(tmp_path: Path):
    with Cluster(tmp_path).running() as running:
        yield running
