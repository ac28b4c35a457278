"""Ways to end a process of a run. Imports no torch."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from typing import Any, NoReturn

received = 0  # the last signal that asked this process to leave


class AgreedExit(SystemExit):
    """Raised in every process at the same step, so that none waits for another."""


def leave(status: Any) -> NoReturn:
    """End this process and its workers now, whatever it is waiting for."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
