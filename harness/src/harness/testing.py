"""What tests of a project share: the fixtures for ``tests/conftest.py``, and ``Promises``."""

import fcntl
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from harness.command.compose import compose
from harness.prove.proof import ELSEWHERE, FIRST, RESUME, STRATEGIES, Proof


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Undo what a run leaves: launchers set ranks and ports, and the log file stays open."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    for handler in logging.getLogger("harness").handlers:
        handler.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script of the project as a user would, with this Python, where pytest was started."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def make_cfg(tmp_path: Path) -> Callable[..., DictConfig]:
    """Compose a training config that writes below the test's folder."""

    def make(*overrides: str) -> DictConfig:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        return compose("train", [f"run_dir={run_dir}", f"output_dir={tmp_path}", *overrides])

    return make


class Promises:
    """What ``scripts/prove.py`` proves of an experiment, with a test for each verdict.

    ``class TestMine(Promises): experiment = "mine"`` is all. What is refused with a sentence, or
    told by the run itself, is skipped with it.

    Attributes:
        experiment: a file of ``conf/experiment``.
        words: further words of train.py's command.
        strategies: those that are tried; fewer take less time.
    """

    experiment: str
    words: Sequence[str] = ()
    strategies: Sequence[str] = STRATEGIES

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each verdict."""
        if "name" in metafunc.fixturenames:
            metafunc.parametrize("name", [FIRST, *self.strategies, RESUME, ELSEWHERE])

    def test_holds(self, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        """One row of the table."""
        proof = self.proof(tmp_path_factory)
        (verdict,) = [one for one in proof.verdicts if one.name == name]
        assert not verdict.is_broken, str(verdict)
        if not verdict.is_equal:
            pytest.skip(str(verdict))

    @classmethod
    def proof(cls, tmp_path_factory: pytest.TempPathFactory) -> Proof:
        """The runs, of which all tests of the class read, also those of other pytest workers."""
        from harness.prove.proof import prove
        from harness.prove.runs import Runs

        base = tmp_path_factory.getbasetemp()
        base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
        folder = base / f"proof of {cls.__module__}.{cls.__name__}"
        folder.mkdir(exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            path = folder / "proof.pickle"
            if not path.exists():
                words = [f"experiment={cls.experiment}", *cls.words]
                proof = prove(Runs(words, folder / "runs"), cls.strategies)
                path.write_bytes(pickle.dumps(proof))
        found: Proof = pickle.loads(path.read_bytes())
        return found
