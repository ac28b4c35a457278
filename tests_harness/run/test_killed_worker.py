"""What happens in a data worker ends the run with a sentence.

That it goes on as if nothing had happened is shown by python -m tests_harness.faults.
"""

from pathlib import Path

import pytest

from tests_harness.faults.fork_server import command
from tests_harness.strategy_runs import write_conf

KILLED = "A data worker has ended"
RAISED = "ValueError: of a mistake"


@pytest.mark.parametrize(
    ("says", "num_processes", "is_persistent"),
    [
        (KILLED, 1, False),
        (RAISED, 1, False),
        pytest.param(KILLED, 1, True, marks=pytest.mark.slow),
        pytest.param(KILLED, 2, True, marks=pytest.mark.slow),
        pytest.param(RAISED, 2, False, marks=pytest.mark.slow),
    ],
)
def test_end_of_a_data_worker_is_told_and_nobody_waits_for_the_others(
    says: str, num_processes: int, is_persistent: bool, tmp_path: Path
) -> None:
    flag = tmp_path / "flag"
    data = f"_target_: tests_harness.workers.dying.Data\nflag: {flag}\nraises: {says == RAISED}\n"
    failed = command(
        "train.py",
        *write_conf(
            tmp_path,
            data=f"{data}persistent_workers: {is_persistent}\n",
            model="_target_: tests_harness.modules.classifiers.Dropout\n",
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
    assert says in failed.stderr
    assert "in main" not in failed.stderr  # no traceback of the run; a worker may have one
