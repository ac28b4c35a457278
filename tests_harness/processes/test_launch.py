import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes import launch


def test_rank_that_the_run_has_started_knows_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(launch.RANK_OF, f"{os.getppid()}:/runs/one")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert launch.run_that_this_is_a_rank_of() == Path("/runs/one")


@pytest.mark.parametrize("rank", ["0", "1"])
def test_program_that_a_callback_starts_is_no_rank(rank: str, tmp_path: Path) -> None:
    """It inherits the variables of the run, of whichever of its processes, and forgets them."""
    code = (
        "import os; from harness.processes import launch\n"
        "assert launch.run_that_this_is_a_rank_of() is None\n"
        "left = {'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT', 'SLURM_NTASKS', launch.RANK_OF}\n"
        "assert not left & set(os.environ), left & set(os.environ)\n"
    )
    first = os.getpid() if rank == "0" else os.getppid()
    inherited = {
        launch.RANK_OF: f"{first}:{tmp_path}",
        "LOCAL_RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_PORT": "1234",
        "SLURM_NTASKS": "2",
    }
    subprocess.run([sys.executable, "-c", code], env=os.environ | inherited, check=True, timeout=60)


def test_ranks_of_torchrun_are_no_ranks_of_a_callbacks_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(launch.RANK_OF, f"{os.getppid()}:/runs/one")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launch.run_that_this_is_a_rank_of() is None
    assert "TORCHELASTIC_RUN_ID" not in os.environ


def test_launcher_of_a_person_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert launch.run_that_this_is_a_rank_of() is None
    assert os.environ["LOCAL_RANK"] == "1"


def test_variables_last_as_long_as_the_run_and_a_job_is_told_once(tmp_path: Path) -> None:
    with launch.telling_ranks(tmp_path):
        assert os.environ[launch.RANK_OF] == f"{os.getpid()}:{tmp_path}"
    assert launch.RANK_OF not in os.environ
    os.environ.update(launch.job_environment(tmp_path))
    assert launch.job_that_this_is() == tmp_path
    assert launch.job_that_this_is() is None


@pytest.mark.parametrize(
    ("environment", "launcher"),
    [
        ({}, ("python", 1)),
        ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "1"}, ("torchrun", 1)),
        ({"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "4"}, ("torchrun", 4)),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, ("srun", 1)),
        ({"SLURM_JOB_ID": "1", "SLURM_STEP_NUM_TASKS": "4"}, ("srun", 4)),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "2"}, ("srun", 3)),
    ],
    ids=["alone", "torchrun of one", "torchrun", "batch script of Slurm", "srun", "old srun"],
)
def test_a_launcher_is_asked_how_many_processes_it_has_started(
    environment: dict[str, str], launcher: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in filter(launch.OF_LAUNCHERS.fullmatch, list(os.environ)):
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert launch.launcher_of_several() == launcher
