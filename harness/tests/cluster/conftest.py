from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import slurm as cluster
from tests.cluster.hosts import Network, missing
from tests.cluster.slurm import Slurm


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


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A cluster for the tests of one file."""
    if reason := cluster.missing():
        pytest.skip(reason)
    started = Slurm(tmp_path_factory.mktemp("slurm"))
    yield started
    started.close()


@pytest.fixture
def slurm(session: Slurm) -> Iterator[Slurm]:
    """A cluster that has no jobs."""
    session.wait_until_idle()
    yield session
    session.clear()
