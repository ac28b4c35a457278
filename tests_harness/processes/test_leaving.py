"""A signal is answered before there is anything to save, whatever the process is doing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests_harness.conftest import ROOT, slow

BUSY = """
import hashlib
from harness.processes import leaving
leaving.answer_signals()
print("ready", flush=True)
hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as in torch, Python's own handlers wait
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2])
def test_busy_process_leaves_with_the_signals_status(signum: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signum)
        assert process.wait(300) == 128 + signum


DEAF = BUSY.replace(
    "print(",
    "import signal, sys\n"
    "leaving.DEAF_SECONDS = float(sys.argv[1])\n"
    "leaving.noting = print if len(sys.argv) == 2 else None\n"
    "for signum in leaving.ASKED_TO_LEAVE: signal.signal(signum, print)  # as a run's handler\n"
    "print(",
)


@pytest.mark.parametrize(
    ("signums", "seconds"),
    [((signal.SIGTERM,), 0.5), ((signal.SIGINT, signal.SIGINT), 1000)],
    ids=["once, after a while", "twice"],
)
def test_run_whose_step_does_not_end_leaves(
    signums: tuple[signal.Signals, ...], seconds: float
) -> None:
    """As where another process never comes to a collective operation."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for signum in signums:
            process.send_signal(signum)
            time.sleep(2.0)
        assert process.wait(300) == 128 + signums[0]
        assert process.stderr is not None
        assert "left without saving" in process.stderr.read()


def test_signal_that_an_author_handles_ends_no_run() -> None:
    """Nor do several of them: whoever has a handler decides what a signal does."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, "0.5", "author"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(3):
            process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize(("signum", "seconds"), [(signal.SIGTERM, 1.0), (signal.SIGINT, 0.2)])
def test_signal_that_comes_twice_waits_for_the_step(signum: signal.Signals, seconds: float) -> None:
    """From Slurm and from torchrun: the step may end, and be saved."""
    with subprocess.Popen(
        [sys.executable, "-c", DEAF, "1000"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(2):
            process.send_signal(signum)
            time.sleep(seconds)
        time.sleep(2.0)
        assert process.poll() is None
        process.kill()


@pytest.fixture
def heeds_ctrl_c() -> Iterator[None]:
    """What a shell starts with ``&`` ignores SIGINT, and so would all that the tests start."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Python's own start, before the first line of train.py, is not the harness's to answer for.
TELLS_OF_MAIN = """
import sys
class Watch:
    def find_spec(self, name, *_):
        if name == "harness.command":
            print("ready", flush=True)
sys.meta_path.insert(0, Watch())
"""


@pytest.mark.parametrize("moment", [0.0, 0.6, 1.5, *slow(0.3, 1.05, 2.1, 2.85)])
def test_ctrl_c_shows_no_traceback(moment: float, tmp_path: Path, heeds_ctrl_c: None) -> None:
    """From ``from harness import main`` on, at moments that a busy machine moves to and fro."""
    (tmp_path / "sitecustomize.py").write_text(TELLS_OF_MAIN)
    with subprocess.Popen(
        [sys.executable, "train.py", "model=mlp", "debug=fast_dev_run", f"output_dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.01 + moment)
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == ""
        assert process.wait(300) in (128 + signal.SIGINT, -signal.SIGINT)
