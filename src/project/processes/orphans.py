"""No process of a run outlives the one that has started it."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Let the kernel end this process when its parent ends; 0 lets it live."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signum)


def has_launched_itself() -> bool:
    """Whether this process was started by the run's first one, and not by torchrun or Slurm."""
    return os.environ.get("LOCAL_RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ
