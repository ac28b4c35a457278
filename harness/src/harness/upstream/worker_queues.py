"""Ends a data worker whose batch cannot be sent, which its process would wait for without end.

A worker's queue sends in a thread. An error there, such as shared memory without room or a value
that cannot be pickled, Python prints and drops, and nothing public sees it. Seen in Python 3.11.
"""

import sys
import traceback
from collections.abc import Callable
from multiprocessing import queues
from typing import Any

PRIVATE = {"multiprocessing:Queue()": "_on_queue_feeder_error"}


def end_where_nothing_is_sent(end: Callable[[int], Any]) -> None:
    """Let this data worker end with its first such error: torch notices that, and names it.

    Args:
        end: ends the process, from whichever thread, with a status.
    """

    def show_and_end(error: BaseException, batch: Any) -> None:
        if "No space left" not in str(error):  # else the worker's process says what to do
            traceback.print_exception(error)
            sys.stderr.flush()
        end(1)

    queues.Queue._on_queue_feeder_error = staticmethod(show_and_end)  # type: ignore[attr-defined]
