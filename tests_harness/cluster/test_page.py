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


def shown(program: str) -> list[str]:
    """The words of the last command of this program in the page's first block."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    block = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)[0].splitlines()
    lines = [shlex.split(line, comments=True) for line in block]
    assert [words[0] for words in lines] == ["python", "python", "torchrun", "sbatch"]
    return next(words for words in reversed(lines) if words[0] == program)


def small(words: list[str], folder: Path) -> list[str]:
    """A command with words that make its run small."""
    assert EXPERIMENT in words
    return [*(word for word in words if word != EXPERIMENT), *WORDS, *where(folder)]


def check_trained_by_two(folder: Path, screen: str) -> None:
    assert len(finished(folder)) == 1, screen
    assert finished(folder) == run_folders(folder)
    assert screen.count("2 processes") == 1, screen


@pytest.mark.slow
def test_one_machine_and_two(network: Network, folder: Path) -> None:
    started = network.hosts[0].start(small(shown("python")[1:], folder / "one"))
    assert started.wait() == 0, started.screen()
    check_trained_by_two(folder / "one", started.screen())
    words = [word.replace("HOST", "host1") for word in small(shown("torchrun"), folder)]
    both = [host.start(words) for host in network.hosts]
    assert wait_all(both) == [0, 0], screens(both)
    check_trained_by_two(folder, both[0].screen())


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    """A cluster for one test."""
    if reason := cluster.missing():
        pytest.skip(reason)
    started = Slurm(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
def test_a_job(slurm: Slurm, folder: Path) -> None:
    words = small(shown("sbatch")[2:], folder)
    job = slurm.submit(shown_script(folder), *words)
    assert slurm.wait(job) == "COMPLETED", slurm.screen(job)
    check_trained_by_two(folder, slurm.screen(job))
