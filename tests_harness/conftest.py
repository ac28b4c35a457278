from pathlib import Path

import pytest

from harness.testing import clean_environment, command, make_cfg

__all__ = ["ROOT", "clean_environment", "command", "finished_run", "make_cfg"]

ROOT = Path(__file__).parents[1]


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
