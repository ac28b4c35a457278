"""No process of a run outlives the one that has started it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def die_with_parent(signum: int = signal.SIGKILL, parent: int | None = None) -> None:
    """Let the kernel end this process when its parent ends.

    Args:
        signum: what ends it; 0 lets it live.
        parent: process that may have ended already, which the kernel does not tell any more.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)
        if parent not in (None, os.getppid()):
            os._exit(1)


def has_launched_itself() -> bool:
    """Whether this process was started by the run's first one, and not by torchrun or Slurm."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ
