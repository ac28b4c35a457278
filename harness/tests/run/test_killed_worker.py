"""A data worker that is killed ends the run with a sentence.

That it goes on as if nothing had happened is shown by the storm in tests/faults.
"""

from pathlib import Path

import pytest

from tests.conftest import slow
from tests.faults.fork_server import command
from tests.strategy_runs import write_conf


@pytest.mark.parametrize(("num_processes", "is_persistent"), [(1, False), *slow((2, True))])
def test_killed_data_worker_is_told_and_nobody_waits_for_the_others(
    num_processes: int, is_persistent: bool, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    data = f"_target_: tests.workers.dying.Data\nflag: {flag}\n"
    failed = command(
        "train.py",
        *write_conf(
            tmp_path,
            data=f"{data}persistent_workers: {is_persistent}\n",
            model="_target_: tests.modules.classifiers.Dropout\n",
        ),
        "strategy=ddp" if num_processes > 1 else "strategy=cpu",
        f"trainer.devices={num_processes}",
        "trainer.accelerator=cpu",
        "trainer.precision=64-true",
        f"output_dir={tmp_path}",
        timeout=120,  # after which it hangs
    )
    assert flag.exists()
    assert failed.returncode == 1
    assert "A data worker has ended" in failed.stderr
    assert "in main" not in failed.stderr  # no traceback of the run; a worker may have one
