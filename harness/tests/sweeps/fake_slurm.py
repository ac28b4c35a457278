"""A Slurm that takes jobs and runs none: sbatch and squeue are scripts with a table in a file."""

import os
from pathlib import Path

import pytest

SBATCH = """#!/bin/sh
cd "$(dirname "$0")"
if [ -e refusal ]; then cat refusal >&2; exit 1; fi
id=$(($(wc -l < jobs) + 1))
cp "$1" "script_$id"
echo "$(sed -n 's/^#SBATCH --comment=//p' "$1") $id PENDING" >> jobs
echo "Submitted batch job $id"
"""
SQUEUE = """#!/bin/sh
cd "$(dirname "$0")"
if [ -e silence ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi
cat jobs
"""


class FakeSlurm:
    """The jobs that sbatch has accepted.

    Args:
        folder: of its programs, which are the first in the PATH.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        (folder / "jobs").touch()
        for name, text in {"sbatch": SBATCH, "squeue": SQUEUE, "srun": "#!/bin/sh\n"}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def jobs(self) -> list[tuple[str, str]]:
        """Return the number in its sweep and the state of each Slurm job."""
        rows = [line.split() for line in (self.folder / "jobs").read_text().splitlines()]
        return [(number, state) for number, _, state in rows]

    def set_state(self, slurm_job: int, state: str) -> None:
        """Let a job have another state."""
        lines = (self.folder / "jobs").read_text().splitlines()
        lines[slurm_job - 1] = " ".join([*lines[slurm_job - 1].split()[:2], state])
        (self.folder / "jobs").write_text("".join(f"{line}\n" for line in lines))
