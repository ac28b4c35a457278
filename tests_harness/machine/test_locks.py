import os
import signal
import subprocess
import sys

import pytest

from harness.errors import UserError
from harness.machine import locks

HOLD = """
import os, sys, time
from harness.machine import locks
locks.PREFIX = sys.argv[1]
print(locks.acquire("GPU-1"), flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:  # as a data worker
    print(os.getpid(), flush=True)
time.sleep(60)
"""


def process(prefix: str, kind: str = "plain") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, prefix, kind], stdout=subprocess.PIPE, text=True
    )


def test_gpu_is_held_by_one_process_until_it_is_killed(own_locks: str) -> None:
    with process(own_locks) as first:
        assert first.stdout.readline() == "True\n"
        with process(own_locks) as second:
            assert second.stdout.readline() == "False\n"
            second.kill()
        assert not locks.acquire("GPU-1")
        assert locks.acquire("GPU-2")
        first.send_signal(signal.SIGKILL)
    assert locks.acquire("GPU-1")


def test_forked_worker_does_not_hold_its_process_s_gpu(own_locks: str) -> None:
    with process(own_locks, "fork") as first:
        assert first.stdout.readline() == "True\n"
        worker = int(first.stdout.readline())
        try:
            assert not locks.acquire("GPU-1")
            os.kill(first.pid, signal.SIGKILL)
            os.waitpid(first.pid, 0)
            assert locks.acquire("GPU-1")
        finally:
            os.kill(worker, signal.SIGKILL)


def test_released_gpu_can_be_taken(own_locks: str) -> None:
    assert locks.acquire("GPU-1")
    assert not locks.acquire("GPU-1")
    locks.release("GPU-1")
    assert locks.acquire("GPU-1")


@pytest.mark.skipif(os.getuid() != 0, reason="becomes another user")
def test_other_user_sees_and_takes_the_lock(own_locks: str) -> None:
    for is_held in (True, False):
        if is_held:
            assert locks.acquire("GPU-1")
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            os._exit(int(locks.acquire("GPU-1")))
        taken = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert taken != is_held
        if is_held:
            locks.release("GPU-1")


def test_process_that_never_ends_choosing_is_named(
    own_locks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "WAIT_SECONDS", 0.0)
    with (
        locks.choosing(),
        pytest.raises(UserError, match="has been choosing"),
        locks.choosing(),
    ):
        pass
    with locks.choosing():  # it was given back
        pass
