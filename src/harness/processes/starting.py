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


class StartObserver(threading.Thread):
    """Leave when a process that this one has started ends before all are connected, and name it.

    Lightning's own looks every five seconds, kills the first process without a word, and does so
    as well when all of them leave as agreed.

    Args:
        processes: those of the ranks after this one, in their order.
    """

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        super().__init__(name="start-observer", daemon=True)
        self.processes = processes

    def run(self) -> None:
        """Look at each of them."""
        while not connected.wait(POLL_SECONDS):
            for local_rank, process in enumerate(self.processes, start=1):
                if process.poll():
                    self._end(local_rank, process.poll() or 0)

    def _end(self, local_rank: int, status: int) -> None:
        rank = int(os.environ.get("NODE_RANK", "0")) * (len(self.processes) + 1) + local_rank
        how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        log.error("The process of rank %d has ended at the start (%s).", rank, how)
        for process in self.processes:
            process.kill()
        was_asked = -status in leaving.ASKED_TO_LEAVE or status > 128
        leaving.leave((128 - status if status < 0 else status) if was_asked else 1)


def observe_start() -> None:
    """Let Lightning start this observer instead of its own."""
    connected.clear()

    replace_process_observer(lambda processes: StartObserver(processes).start())
