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

from tests.conftest import ROOT

BUSY = """
import hashlib
from harness.processes import leaving
leaving.answer_signals()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as in torch, Python's own handlers wait
"""
DEAF = BUSY.replace(
    "print(",
    "import signal, sys\n"
    "run = leaving.Signals()\n"
    "run.wait_for_step = True\n"
    "handler = print if len(sys.argv) > 1 else run.note\n"
    "for signum in leaving.ASKED_TO_LEAVE: signal.signal(signum, handler)  # as a run does\n"
    "print(",
    1,
)


@contextmanager
def ready(code: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A program that has begun to compute; it ends with the block."""
    words = [sys.executable, "-c", code, *arguments]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def test_busy_process_leaves_with_the_signals_status() -> None:
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        with ready(BUSY) as process:
            process.send_signal(signum)
            assert process.wait(300) == 128 + signum


def test_second_ctrl_c_ends_a_run_whose_step_does_not_end() -> None:
    """As where another process never comes to a collective operation."""
    with ready(DEAF) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(2.0)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 128 + signal.SIGINT
        assert process.stderr is not None
        assert "left without saving" in process.stderr.read()


def test_signals_that_end_no_run_at_once() -> None:
    """Those that an author handles; and the second of torchrun's or Slurm's: the step may end."""
    with (
        ready(DEAF, "author") as of_author,
        ready(DEAF) as of_torchrun,
        ready(DEAF) as of_terminal,
    ):
        for _ in range(2):
            of_author.send_signal(signal.SIGINT)
            of_torchrun.send_signal(signal.SIGTERM)
            of_terminal.send_signal(signal.SIGINT)
            time.sleep(0.2)  # soon enough to be the same signal, passed on
        time.sleep(2.0)
        assert [p.poll() for p in (of_author, of_torchrun, of_terminal)] == [None, None, None]


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What a shell starts with ``&`` ignores SIGINT, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# What comes before the command itself is answered by Python, with a traceback.
TELLS_OF_COMMAND = """
import sys
class Watch:
    def find_spec(self, name, *_):
        if name in ("torch", "harness.run.train"):
            print("ready", flush=True)
            sys.meta_path.remove(self)
sys.meta_path.insert(0, Watch())
"""


def test_ctrl_c_shows_no_traceback(tmp_path: Path, heeds_ctrl_c: None) -> None:
    """While a command imports what it trains with."""
    (tmp_path / "sitecustomize.py").write_text(TELLS_OF_COMMAND)
    with subprocess.Popen(
        [sys.executable, "train.py", "model=mlp", "debug=fast_dev_run", f"output_dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("train: ")
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
        assert process.wait(300) == 128 + signal.SIGINT
