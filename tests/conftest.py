import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from project.composition import compose

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def _clean_environment() -> Iterator[None]:
    """Launchers leave ranks and ports in the environment, runs their log file open."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    for handler in logging.getLogger("project").handlers:
        handler.close()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def command(
    *arguments: str | Path, environment: dict[str, str] | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a script of the repository as a user would, with this Python."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def make_cfg(tmp_path: Path):
    """Compose a training config that writes below the test's folder."""

    def make(*overrides: str) -> DictConfig:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        return compose("train", [f"run_dir={run_dir}", f"output_dir={tmp_path}", *overrides])

    return make


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a short training run, made by the command itself."""
    output_dir = tmp_path_factory.mktemp("outputs")
    result = command(
        "train.py",
        "trainer.max_epochs=2",
        "data=synthetic",
        "model=mlp",
        f"output_dir={output_dir}",
    )
    assert result.returncode == 0, result.stderr
    (run_dir,) = (output_dir / "default").iterdir()
    (run_dir / "screen.txt").write_text(result.stdout + result.stderr)
    return run_dir
