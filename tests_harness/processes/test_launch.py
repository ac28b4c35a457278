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
    subprocess.run(
        [sys.executable, "-c", code], env=os.environ | inherited, check=True, timeout=300
    )


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


FOLLOWS = "import harness, sys; print(sys.modules['harness.processes.leaving'].followed)"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends orphans")
@pytest.mark.parametrize(
    ("environment", "status"),
    [
        ({launch.RANK_OF: "{dead}:/runs/one", "LOCAL_RANK": "1"}, 1),
        ({launch.JOB: "{dead}:/runs/one"}, 1),
        ({launch.RANK_OF: "{mine}:/runs/one", "LOCAL_RANK": "1"}, 0),
        ({"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}, 0),
    ],
    ids=["rank", "job", "rank that is not late", "rank of torchrun"],
)
def test_process_whose_starter_is_gone_ends_before_it_does_anything(
    environment: dict[str, str], status: int
) -> None:
    """It would otherwise take itself for a command that a person has typed."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    pids = {"dead": ended.pid, "mine": os.getpid()}
    told = {name: value.format(**pids) for name, value in environment.items()}
    result = subprocess.run(
        [sys.executable, "-c", FOLLOWS],
        env=os.environ | told,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status, result.stderr
    assert result.stdout == ("" if status else f"{os.getpid()}\n")


def test_torchrun_that_ends_while_one_looks_is_gone() -> None:
    """It is no adopter to live on with."""
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    assert launch.is_adopter(ended.pid)


def test_program_of_a_callback_follows_nobody(tmp_path: Path) -> None:
    """It may be started by a thread that ends before it."""
    code = "import harness, sys; assert 'harness.processes.leaving' not in sys.modules"
    inherited = {
        launch.RANK_OF: f"{os.getpid()}:{tmp_path}",
        "TORCHELASTIC_RUN_ID": "x",
        "LOCAL_RANK": "1",
    }
    subprocess.run([sys.executable, "-c", code], env=os.environ | inherited, check=True)
