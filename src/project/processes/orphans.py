"""No process of a run outlives the one that has started it."""

import ctypes
import os
import signal
import sys
import threading
from typing import Any

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent ends; 0 lets it live."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def dismiss_observer() -> None:
    """End Lightning's watch over the processes that it has started.

    It looks every five seconds, and kills the first process when another has left, also when all
    of them leave as agreed.
    """
    threads: list[Any] = threading.enumerate()
    for thread in threads:
        if thread.name == "child-process-observer":
            thread._child_processes = []


def has_launched_itself() -> bool:
    """Whether this process was started by the run's first one, and not by torchrun or Slurm."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ
