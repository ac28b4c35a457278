"""A data worker that is killed ends the run with an error.

The storm in tests/faults tests that the run resumes as if nothing had happened.
"""

from pathlib import Path

from tests.faults.fork_server import command
from tests.strategy_runs import write_conf


def test_killed_data_worker_is_told(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    data = f"_target_: tests.workers.dying.Data\nflag: {flag}\n"
    model = "_target_: tests.modules.classifiers.Dropout\n"
    words = [*write_conf(tmp_path, data=data, model=model), "strategy=cpu"]
    words.append("trainer.precision=64-true")  # these data are of doubles
    failed = command("train.py", *words, f"output_dir={tmp_path}", timeout=120)
    assert flag.exists()
    assert failed.returncode == 1
    assert "A data worker has ended" in failed.stderr
    assert "in main" not in failed.stderr  # no traceback of the run; a worker may have one
