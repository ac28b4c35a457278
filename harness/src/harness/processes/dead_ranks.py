"""End a run at once when one of the ranks that Lightning started has ended, and name it.

In: the processes that Lightning starts. Out: the end of this process, and with it, by the kernel,
of the other ranks. torchrun and srun watch the processes that they started themselves.
"""

import logging
import os
import signal
import subprocess
import threading
import time

from harness.processes import early, leaving
from harness.upstream.processes import replace_process_observer, replace_starter

log = logging.getLogger(__name__)

# A rank that was asked to leave has left; this process was asked as well, and may still save.
ASKED_SECONDS = 5.0


def observe_start() -> None:
    """Let Lightning take the ranks that were started early, and observe them with ``observe``."""
    if early.started:
        replace_starter(early.take)
    replace_process_observer(observe)


def observe(processes: "list[subprocess.Popen[bytes]]") -> None:
    """Watch the processes of the ranks after this one, in their order, each in a thread."""
    leaving.ranks[:] = processes
    first_rank = int(os.environ.get("NODE_RANK") or 0) * (len(processes) + 1)
    for rank, process in enumerate(processes, start=first_rank + 1):
        threading.Thread(target=_wait_for, args=(rank, process), daemon=True).start()


def release() -> "list[subprocess.Popen[bytes]]":
    """Return the ranks, which may end from now on: all processes leave as agreed."""
    processes, leaving.ranks[:] = list(leaving.ranks), []
    return processes


def _wait_for(rank: int, process: "subprocess.Popen[bytes]") -> None:
    """Leave when a process ends that the run cannot go on without."""
    status = process.wait()
    signum = -status if status < 0 else status - 128
    if signum in leaving.ASKED_TO_LEAVE:
        time.sleep(ASKED_SECONDS)
    if not status or process not in leaving.ranks:
        return
    # A rank that fails with an error has told it.
    log.log(
        logging.INFO if status == 1 else logging.ERROR,
        "The process of rank %d has ended (%s), and the run ends with it.\n"
        "The same command with resume=auto goes on from the last checkpoint.",
        rank,
        signal.Signals(-status).name if status < 0 else f"exit status {status}",
    )
    leaving.leave(128 + signum if signum in leaving.ASKED_TO_LEAVE else 1)
