"""A test set, a good model and a weak one."""

import pytest


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    from detectors import make_place

    return make_place(tmp_path_factory.mktemp("gate"))
