"""A signal is answered before there is anything to save, whatever the process is doing."""

import signal
import subprocess
import sys

import pytest

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
        assert process.wait(20) == 128 + signum
