"""The commands of the tutorial run in their order, in a copy of the project, and train shortly."""

import re
from pathlib import Path

import pytest

from template.tests.conftest import ROOT, succeed

# The copy has an environment. Copier, Slurm, a GPU and a server have tests of their own, or none.
NOT_RUN = ("git clone", "make ", ". .venv", "pip ", "copier ", "sbatch ", "run=")
SOURCES = "PYTHONPATH=src:harness/src"  # those of the copy, before the installed ones
SHORT = "trainer.max_epochs=1 trainer.limit_train_batches=2"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_commands_of_the_tutorial_run_in_their_order(tmp_path: Path) -> None:
    succeed(ROOT, "bash", "-c", f"git archive HEAD | tar x -C {tmp_path}")
    text = (ROOT / "harness" / "docs" / "tutorial.md").read_text()
    num_run = 0
    for language, block in re.findall(r"```(bash|yaml|python)\n(.*?)```", text, re.DOTALL):
        if language == "yaml":
            (tmp_path / "conf" / "experiment" / "shapes.yaml").write_text(block)
        elif language == "python":
            succeed(tmp_path, "env", SOURCES, "python", "-c", block)
        for line in block.splitlines() if language == "bash" else ():
            command = line.partition("  #")[0]
            if command.startswith(NOT_RUN):
                continue
            if command.startswith(("python train.py", "python scripts/tune.py")):
                is_longer = "resume=auto" in command
                command = re.sub(r" trainer\.max_epochs=\d+", "", command)
                command += f" {SHORT.replace('=1', '=2') if is_longer else SHORT}"
            if command.startswith("python scripts/tune.py"):
                command = command.replace(SHORT, "data.num_workers=0")
            (*_, run) = sorted(tmp_path.glob("outputs/shapes/2*")) or [tmp_path]
            command = command.replace("$run", str(run))
            succeed(tmp_path, "env", SOURCES, "bash", "-c", command)
            num_run += 1
    assert num_run > 15
