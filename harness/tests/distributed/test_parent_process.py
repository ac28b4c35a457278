"""Who was started by a run, and ends with it; all others are commands of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.distributed import parent_process


def status_of(code: str, inherited: dict[str, str]) -> tuple[int, str]:
    """How a program with variables of a run ends, and what it prints."""
    words, environment = [sys.executable, "-c", code], os.environ | inherited
    result = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    return result.returncode, result.stdout


def test_program_that_a_callback_starts_is_no_rank_and_follows_nobody(tmp_path: Path) -> None:
    """It inherits the variables of the run, of whichever of its processes, and forgets them."""
    code = (
        "import os, sys; from harness.distributed import parent_process as parent\n"
        "parent.follow_parent()\n"
        "assert 'harness.distributed.shutdown' not in sys.modules\n"
        "assert parent.folder_of_run() is None\n"
        "left = {'LOCAL_RANK', 'WORLD_SIZE', 'MASTER_PORT', 'SLURM_NTASKS', parent.PARENT}\n"
        "left |= {'TORCHELASTIC_RUN_ID'}\n"
        "assert not left & set(os.environ), left & set(os.environ)\n"
        "assert os.environ['SLURM_CONF'] == 'x'\n"  # where Slurm is, and not which job this is
    )
    inherited = {"WORLD_SIZE": "2", "MASTER_PORT": "1234", "SLURM_NTASKS": "2"}
    inherited["SLURM_CONF"] = "x"
    by_rank = {"0": {}, "1": {}, "1 of torchrun": {"TORCHELASTIC_RUN_ID": "x"}}
    for rank, more in by_rank.items():
        first = os.getpid() if rank == "0" or more else os.getppid()
        told = {parent_process.PARENT: f"{first}:rank:{tmp_path}", "LOCAL_RANK": rank[0]}
        assert status_of(code, inherited | told | more)[0] == 0, rank


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's kernel ends orphans")
def test_process_whose_starter_is_gone_ends_before_it_does_anything() -> None:
    """It would otherwise take itself for a command that a person has typed."""
    follows = "import harness, sys; print(sys.modules['harness.distributed.shutdown'].parent_pid)"
    with subprocess.Popen([sys.executable, "-c", "pass"]) as ended:
        ended.wait()
    mine = f"{os.getpid()}:rank:/runs/one"
    for role, rank in (("rank", "1"), ("job", "0")):
        dead = {parent_process.PARENT: f"{ended.pid}:{role}:/runs/one", "LOCAL_RANK": rank}
        assert status_of(follows, dead) == (1, "")
    followed = 0, f"{os.getpid()}\n"
    assert status_of(follows, {parent_process.PARENT: mine, "LOCAL_RANK": "1"}) == followed
    assert status_of(follows, {"TORCHELASTIC_RUN_ID": "x", "LOCAL_RANK": "1"}) == followed
