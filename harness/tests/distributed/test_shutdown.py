"""A signal is answered before there is anything to save, whatever the process is doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.distributed import shutdown
from tests.conftest import ROOT
from tests.faults.fork_server import command

# As in torch, Python's own handlers wait. A run that trains answers signals itself.
BUSY = """
import hashlib, signal, sys
from harness.distributed import shutdown
shutdown.exit_on_signals()
run = shutdown.SignalHandlers()
run.wait_for_step = True
handler = {"run": run.note, "user": print}.get(sys.argv[1], shutdown.ignore_in_main_thread)
for signum in shutdown.EXIT_SIGNALS:
    signal.signal(signum, handler)
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""


@contextmanager
def busy(handler: str) -> Iterator["subprocess.Popen[str]"]:
    """A program that has begun to compute; it ends with the block."""
    words = [sys.executable, "-c", BUSY, handler]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_busy_process_leaves_with_the_signals_status() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        with busy("thread") as process:
            process.send_signal(signum)
            assert process.wait(300) == 128 + signum


def test_second_ctrl_c_ends_a_run_whose_step_does_not_end() -> None:
    """As where another process never comes to a collective operation."""
    with busy("run") as process:
        process.send_signal(signal.SIGINT)
        time.sleep(2.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 128 + signal.SIGINT
        assert process.stderr is not None
        assert "exits without saving" in process.stderr.read()


def test_signals_that_end_no_run_at_once() -> None:
    """Signals that a user handles; and torchrun's or Slurm's second one: the step may end."""
    with busy("user") as of_user, busy("run") as of_torchrun, busy("run") as of_terminal:
        for _ in range(2):
            of_user.send_signal(signal.SIGINT)
            of_torchrun.send_signal(signal.SIGTERM)
            of_terminal.send_signal(signal.SIGINT)
            time.sleep(0.2)  # soon enough to be the same signal, passed on
        time.sleep(2.0)
        assert [p.poll() for p in (of_user, of_torchrun, of_terminal)] == [None, None, None]


# Python itself handles a signal before the command starts, with a traceback.
TELLS_OF_COMMAND = """
import sys
class Watch:
    def find_spec(self, name, *_):
        if name in ("torch", "harness.training.train"):
            print("ready", flush=True)
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
"""


def test_ctrl_c_shows_no_traceback(tmp_path: Path) -> None:
    """While a command imports what it trains with."""
    (tmp_path / "sitecustomize.py").write_text(TELLS_OF_COMMAND)
    with subprocess.Popen(
        [sys.executable, "train.py", "model=mlp", "debug=fast_dev_run", f"output_dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # A program that a shell starts with ``&`` ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("train: ")
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
        assert process.wait(300) == 128 + signal.SIGINT


def test_task_of_slurm_ends_with_a_status_that_tells_a_mistake_from_a_signal(monkeypatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    mistake = command("train.py", "model=nope")
    assert mistake.returncode == shutdown.FAILED
    assert "model=nope: there is no" in mistake.stderr
    with busy("thread") as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == shutdown.RESUMABLE < shutdown.FAILED


STARTING = 128 + signal.SIGTERM  # of a task that a signal ended while it started


@pytest.mark.parametrize(
    ("status", "num_tasks", "is_put_back"),
    [
        (shutdown.RESUMABLE, 2, True),
        (shutdown.FAILED, 2, False),
        (STARTING, 2, False),
        (STARTING, 1, True),
        (1, 1, False),
    ],
)
def test_script_puts_a_job_back_only_where_all_tasks_can_go_on(
    status: int, num_tasks: int, is_put_back: bool, tmp_path: Path
) -> None:
    """Slurm ends the tasks beside one that fails, and srun ends with the highest status."""
    for name, line in {
        "srun": f"exit {status}",
        "squeue": "echo RUNNING",
        "scontrol": f"touch {tmp_path}/put_back",
        "sleep": "true",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1"}
    environment["SLURM_NTASKS"] = str(num_tasks)
    done = subprocess.run(["bash", "scripts/slurm/train.sbatch"], env=environment, check=False)
    assert done.returncode == (shutdown.RESUMABLE if is_put_back else status)
    assert (tmp_path / "put_back").exists() == is_put_back
