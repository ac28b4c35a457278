"""The time before the processes of a run are connected, in which one of them may end."""

import logging
import os
import signal
import subprocess
import threading

from harness.processes import leaving
from harness.upstream.processes import replace_process_observer

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
connected = threading.Event()  # set when ``Peers`` connects the processes and notices an end


def observe_start() -> None:
    """Let Lightning start this observer instead of its own."""
    connected.clear()
    replace_process_observer(
        lambda processes: threading.Thread(target=observe, args=(processes,), daemon=True).start()
    )


def observe(processes: list[subprocess.Popen[bytes]]) -> None:
    """Leave when a process that this one has started ends before all are connected, and name it.

    Args:
        processes: those of the ranks after this one, in their order.
    """
    while not connected.wait(POLL_SECONDS):
        for local_rank, process in enumerate(processes, start=1):
            if status := process.poll():
                rank = int(os.environ.get("NODE_RANK", "0")) * (len(processes) + 1) + local_rank
                how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                log.error("The process of rank %d has ended at the start (%s).", rank, how)
                for other in processes:
                    other.kill()
                was_asked = -status in leaving.ASKED_TO_LEAVE or status > 128
                leaving.leave((128 - status if status < 0 else status) if was_asked else 1)
