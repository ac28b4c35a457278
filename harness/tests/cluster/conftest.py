from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Network, missing


@pytest.fixture(scope="session")
def both_hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Two hosts for all tests of this process."""
    if reason := missing():
        pytest.skip(reason)
    network = Network(tmp_path_factory.mktemp("hosts"))
    yield network
    network.close()


@pytest.fixture
def network(both_hosts: Network) -> Iterator[Network]:
    """Two hosts on which nothing runs."""
    both_hosts.clear()
    yield both_hosts
    both_hosts.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder for a test's runs; both hosts share it."""
    return tmp_path
