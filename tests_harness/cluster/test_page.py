"""docs/cluster.md: from a laptop to Slurm in four commands, typed as the page shows them."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_harness.cluster import slurm as cluster
from tests_harness.cluster.hosts import Network
from tests_harness.cluster.runs import WORDS, finished, run_folders, screens, wait_all, where
from tests_harness.cluster.slurm import Slurm
from tests_harness.cluster.test_slurm import shown_script
from tests_harness.conftest import ROOT

# An experiment is a choice of data and model, which these words make as well; what it adds is not.
EXPERIMENT = "experiment=synthetic"


def shown() -> list[list[str]]:
    """The words of the page's first commands."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    block = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0]
    return [shlex.split(line, comments=True) for line in block.splitlines()]


def small(words: list[str], folder: Path) -> list[str]:
    """A command with words that make its run small."""
    return [*(word for word in words if word != EXPERIMENT), *WORDS, *where(folder)]


def check_trained(folder: Path, num_processes: int, screen: str) -> None:
    assert len(finished(folder)) == 1, screen
    assert finished(folder) == run_folders(folder)
    if num_processes > 1:
        assert screen.count(f"{num_processes} processes") == 1, screen


def test_there_are_four() -> None:
    begin = [words[0] for words in shown()]
    assert begin == ["python", "python", "torchrun", "sbatch"]
    assert all(EXPERIMENT in words for words in shown())


@pytest.mark.parametrize(("number", "num_processes"), [(0, 1), (1, 2)])
def test_one_machine(number: int, num_processes: int, network: Network, folder: Path) -> None:
    started = network.hosts[0].start(small(shown()[number][1:], folder))
    assert started.wait() == 0, started.screen()
    check_trained(folder, num_processes, started.screen())


def test_two_machines(network: Network, folder: Path) -> None:
    words = [word.replace("HOST", "host1") for word in small(shown()[2], folder)]
    started = [host.start(words) for host in network.hosts]
    assert wait_all(started) == [0, 0], screens(started)
    check_trained(folder, 2, started[0].screen())


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """A cluster for one test."""
    if reason := cluster.missing():
        pytest.skip(reason)
    started = Slurm(tmp_path)
    yield started
    started.close()


def test_a_job(slurm: Slurm, folder: Path) -> None:
    words = small(shown()[3][2:], folder)
    job = slurm.submit(shown_script(folder), *words)
    assert slurm.wait(job) == "COMPLETED", slurm.screen(job)
    check_trained(folder, 2, slurm.screen(job))
