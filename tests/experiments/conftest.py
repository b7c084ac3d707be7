"""Fixtures that tests of measurements share."""

import pytest

from tests.tiny import config_file, tiny_policy


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Return the config of a tiny policy with random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    return config_file(folder, tiny_policy(folder / "policy"))
