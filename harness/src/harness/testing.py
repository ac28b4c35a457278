"""Fixtures for ``tests/conftest.py`` of a project, and its commands as a user types them."""

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
    """Let tests see no GPU: one alone runs those that are marked for it, ``-m gpu``."""
    if not config.option.markexpr.startswith(("gpu", "multi_gpu")):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
