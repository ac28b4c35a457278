"""Fixtures for a project's ``tests/conftest.py``, and a function that runs its scripts."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from harness.command.compose import compose


def pytest_configure(config: pytest.Config) -> None:
    """Hide GPUs from tests, except in ``pytest -m gpu`` and ``pytest -m multi_gpu``."""
    if not config.option.markexpr.startswith(("gpu", "multi_gpu")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.fixture(autouse=True)
def clean_environment() -> Iterator[None]:
    """After a test, restore the environment, close log files, and end the process group."""
    original = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(original)  # launchers set ranks and ports
    for handler in logging.getLogger("harness").handlers:
        handler.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run a script with this Python in the working directory, and return its output."""
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
    """Return a function that composes a training config, whose outputs go to ``tmp_path``."""

    def make(*overrides: str) -> DictConfig:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        return compose("train", [f"run_dir={run_dir}", f"output_dir={tmp_path}", *overrides])

    return make
