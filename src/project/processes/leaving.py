"""Ways to end a process of a run. Imports no torch."""

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

received = 0  # the last signal that asked this process to leave


ASKED_TO_LEAVE = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
# What is called with the status before this process ends: others may have to be told.
FAREWELLS: list[Callable[[int], None]] = []


class AgreedExit(SystemExit):
    """Raised in every process at the same step, so that none waits for another."""


def answer_signals() -> None:
    """Leave at once when asked to, with 128 + the signal's number, while nothing needs saving."""
    if threading.current_thread() is threading.main_thread():
        for signum in ASKED_TO_LEAVE:
            signal.signal(signum, lambda signum, _: leave(128 + signum))


def leave(status: Any) -> NoReturn:
    """End this process and its workers now, whatever it is waiting for."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch raises where a worker is killed
    for farewell in FAREWELLS:
        farewell(status)
    for worker in multiprocessing.active_children():
        worker.kill()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)
