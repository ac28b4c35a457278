"""A GPU belongs to one process, of whichever user, until that ends."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from harness import machine as choice

HOLD = """
import os, sys, time
from harness import machine as choice
choice.PREFIX = sys.argv[1]
taken = choice.lock(sys.argv[2])
if not os.fork():  # as a data worker, which speaks when it has closed what it inherited
    print(f"{taken} {os.getpid()}", flush=True)
time.sleep(60)
"""


@contextmanager
def holder(name: str, prefix: str) -> Iterator[int]:
    """Another process that has a lock, with a forked one, which lives as long as the block."""
    program = [sys.executable, "-c", HOLD, prefix, name]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        taken, worker = process.stdout.readline().split()
        assert taken == "True"
        try:
            yield process.pid
        finally:
            os.kill(int(worker), signal.SIGKILL)
            process.kill()


def test_gpu_is_held_by_one_process_until_it_is_killed_and_not_by_its_workers(own_locks) -> None:
    with holder("GPU-1", own_locks) as pid:
        assert not choice.lock("GPU-1")
        assert choice.lock("GPU-2")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert choice.lock("GPU-1")
        assert not choice.lock("GPU-1")
        choice.release()
        assert choice.lock("GPU-1")
