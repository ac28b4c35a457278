"""Fixtures for ``tests/conftest.py`` of a project, and its promises as tests."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from harness.command.compose import compose
from harness.prove.compare import STRATEGIES, prove
from harness.prove.runs import Runs


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """Reset what a run changes: launchers set ranks and ports, and the log file stays open."""
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
    """What ``scripts/prove.py`` proves of an experiment, as a test.

    ``class TestMine(Promises): experiment = "mine"`` is all. What is refused with a sentence, or
    warned of by the run itself, is printed (``pytest -rP``).
    """

    experiment: str  # a file of conf/experiment
    words: Sequence[str] = ()  # more of train.py's command
    strategies: Sequence[str] = STRATEGIES  # fewer take less time

    def test_promises_hold(self, tmp_path: Path) -> None:
        """No verdict is broken."""
        runs = Runs([f"experiment={self.experiment}", *self.words], tmp_path / "runs")
        verdicts = list(prove(runs, self.strategies))
        print(*verdicts, sep="\n")
        assert [str(verdict) for verdict in verdicts if verdict.is_broken] == []
